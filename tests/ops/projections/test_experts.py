"""`experts` against the layers of transformers, and what its arguments promise."""

import itertools
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, Llama4TextConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from src.ops import EXPERTS, Routing, experts, route
from src.ops.matrix import Matrix
from src.ops.projections.experts import ClampedSwiglu, Experts, grouped
from src.ops.runtime.kernel_library import KernelLibrary
from tests.ops.comparison import TOLERANCE, keeping_one_way

HIDDEN, INTERMEDIATE, COUNT, CHOSEN = 64, 48, 8, 2


def mixtral() -> Any:
    return MixtralSparseMoeBlock(
        MixtralConfig(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_local_experts=COUNT,
            num_experts_per_tok=CHOSEN,
        )
    )


def qwen3(renormalize: bool) -> Any:
    return Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            num_experts=COUNT,
            num_experts_per_tok=CHOSEN,
            norm_topk_prob=renormalize,
        )
    )


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize(
    ("block", "renormalize"),
    [(mixtral(), True), (qwen3(True), True), (qwen3(False), False)],
    ids=["mixtral", "qwen3", "qwen3, weights as they are"],
)
def test_equals_transformers(block: Any, renormalize: bool, tokens: int) -> None:
    random = torch.Generator().manual_seed(tokens)
    with torch.no_grad():
        for parameter in block.parameters():
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=random) * scale)
        x = torch.randn(1, tokens, HIDDEN, generator=random)
        expected = block(x)[0]
        logits = x[0] @ block.gate.weight.T
        chosen = route(logits, Routing(chosen=CHOSEN, renormalize=renormalize))
        layer = (block.experts.gate_up_proj, block.experts.down_proj)
        for got in (
            experts(x[0], *map(Matrix.plain, layer), *chosen),
            grouped(x[0], *layer, *chosen),
        ):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def drawn(block: Any, tokens: int) -> torch.Tensor:
    """Fills a block at random; hidden states [1, T, H] for it."""
    random = torch.Generator().manual_seed(tokens)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * HIDDEN**-0.5)
    return torch.randn(1, tokens, HIDDEN, generator=random)


@pytest.mark.parametrize("limit", [7.0, 0.3])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_equals_gpt_oss(tokens: int, limit: float) -> None:
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=COUNT,
        num_experts_per_tok=CHOSEN,
        swiglu_limit=limit,
    )
    block: Any = GptOssMLP(config)
    x = drawn(block, tokens)
    own, router = block.experts, block.router
    with torch.no_grad():
        own.gate_up_proj_bias.mul_(5)
        own.down_proj_bias.mul_(5)
        expected = block(x)[0][0]
        logits = x[0] @ router.weight.T + router.bias
        chosen = route(logits, Routing(chosen=CHOSEN, scoring="softmax_of_chosen"))
        # Gates and ups take turns there.
        apart = torch.arange(2 * INTERMEDIATE).view(-1, 2).T.flatten()
        got = experts(
            x[0],
            Matrix.plain(own.gate_up_proj.transpose(1, 2)[:, apart].contiguous()),
            Matrix.plain(own.down_proj.transpose(1, 2).contiguous()),
            *chosen,
            gate_up_bias=own.gate_up_proj_bias[:, apart].contiguous(),
            down_bias=own.down_proj_bias,
            activation=ClampedSwiglu(config.swiglu_alpha, limit),
        )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_equals_llama4(tokens: int, chosen: int) -> None:
    config = Llama4TextConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=COUNT,
        num_experts_per_tok=chosen,
    )
    block: Any = Llama4TextMoe(config)
    x = drawn(block, tokens)
    with torch.no_grad():
        expected = block(x)[0] - block.shared_expert(x[0])
        routing = Routing(chosen=chosen, scoring="sigmoid", renormalize=False)
        got = experts(
            x[0],
            Matrix.plain(block.experts.gate_up_proj.transpose(1, 2).contiguous()),
            Matrix.plain(block.experts.down_proj.transpose(1, 2).contiguous()),
            *route(x[0] @ block.router.weight.T, routing),
            weighs_inputs=True,
        )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_gate_that_is_no_number_shows(libraries: dict[str, KernelLibrary]) -> None:
    """A clamp must not turn it into a number."""
    args = EXPERTS.build(
        "cpu",
        tokens=3,
        experts=2,
        chosen=2,
        hidden=32,
        intermediate=16,
        activation=ClampedSwiglu(1.702, 7.0),
    )
    for row in (3, 19):  # of the gate, of up
        gate_up = args[1].clone()
        gate_up[:, row] = torch.nan
        given = (args[0], gate_up, *args[2:])
        for kernel in (EXPERTS.reference, *(each.experts for each in libraries.values())):
            assert kernel(*given).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_product_equals_reference(dtype: torch.dtype) -> None:
    for tokens, padding in ((1, 0), (33, 4)):
        args = EXPERTS.build(
            "cpu",
            tokens=tokens,
            experts=8,
            chosen=2,
            hidden=64,
            intermediate=32,
            dtype=dtype,
            padding=padding,
        )
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        call = Experts.of_flat(*args)
        matrices = (call.gate_up.values, call.down.values)
        got, expected = grouped(call.x, *matrices, call.weights, call.ids), EXPERTS.reference(*args)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert not got.isnan().any()


def test_padding_adds_nothing_and_reads_nothing() -> None:
    args = EXPERTS.build(
        "cpu", tokens=9, experts=4, chosen=2, hidden=32, intermediate=16, padding=4
    )
    assert args[0][5:].isnan().all()
    assert torch.equal(EXPERTS.overload(*args)[5:], torch.zeros(4, 32))


def test_cost_counts_the_experts_that_are_read() -> None:
    call = Experts.of_flat(
        *EXPERTS.build("cpu", tokens=2, experts=8, chosen=2, hidden=32, intermediate=16)
    )
    together, apart = (
        call.replace(ids=torch.tensor(ids)).flat() for ids in ([[0, 1], [1, 0]], [[0, 1], [2, 3]])
    )
    of_an_expert = 4 * 32 * 16 * 3
    assert EXPERTS.cost(*apart).bytes - EXPERTS.cost(*together).bytes == 2 * of_an_expert
    assert EXPERTS.cost(*apart).flops == 4 * 2 * 32 * 16 * 3


def of_tokens(call: Experts, part: slice) -> Experts:
    """The call of some of its tokens."""
    return call.replace(x=call.x[part], weights=call.weights[part], ids=call.ids[part])


def test_a_token_is_alike_in_any_company(libraries: dict[str, KernelLibrary]) -> None:
    """What deterministic kernels promise, whatever weights are held in and who else is there."""
    clamped = {"activation": ClampedSwiglu(1.702, 0.7), "biased": True, "weighs_inputs": True}
    for weight, dtype, more in itertools.product(
        ("same", "strips of same", "int8", "strips of int8", "e2m1/32", "float8/32"),
        (torch.float32, torch.bfloat16),
        ({}, clamped),
    ):
        if weight == "strips of same" and dtype == torch.float32:
            continue
        call = Experts.of_flat(
            *EXPERTS.build(
                "cpu",
                tokens=600,
                experts=6,
                chosen=2,
                hidden=192,
                intermediate=128,
                dtype=dtype,
                weight=weight,
                **more,
            )
        )
        with keeping_one_way(libraries.values()):
            for library in libraries.values():
                whole = library.experts(*call.flat())
                for part, threads in ((slice(3, 4), 1), (slice(11, 16), 2), (slice(200, 590), 3)):
                    torch.set_num_threads(threads)
                    some = library.experts(*of_tokens(call, part).flat())
                    assert torch.equal(some, whole[part]), (weight, dtype, part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighs_inputs", [False, True])
@pytest.mark.parametrize(("hidden", "intermediate"), [(37, 21), (44, 60), (7, 3)])
def test_sizes_that_do_not_fill_a_vector(
    library: KernelLibrary, dtype: torch.dtype, weighs_inputs: bool, hidden: int, intermediate: int
) -> None:
    """Of 4, 8 and 16 numbers; inputs are weighed, or results."""
    shape = {"experts": 4, "chosen": 2, "hidden": hidden, "intermediate": intermediate}
    tolerance = TOLERANCE[dtype]
    for tokens in (1, 9):
        args = EXPERTS.build(
            "cpu", tokens=tokens, dtype=dtype, weighs_inputs=weighs_inputs, **shape
        )
        torch.testing.assert_close(
            library.experts(*args), EXPERTS.reference(*args), rtol=tolerance, atol=tolerance
        )


def test_kernel_takes_turns_when_tokens_are_many(library: KernelLibrary) -> None:
    """More than its memory holds at once: as of the same tokens in two calls."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(3000, 1024, generator=random)
    gate_up = torch.randn(8, 16, 1024, generator=random) / 32
    down = torch.randn(8, 1024, 8, generator=random)
    weights, ids = torch.rand(3000, 8, generator=random).topk(4, dim=-1)
    call = Experts(x, Matrix.plain(gate_up), Matrix.plain(down), weights, ids)
    whole = library.experts(*call.flat())
    parts = (slice(0, 1000), slice(1000, 3000))
    calls = [library.experts(*of_tokens(call, part).flat()) for part in parts]
    assert torch.equal(torch.cat(calls), whole)


def test_kernel_reads_slices_of_a_wider_tensor(library: KernelLibrary) -> None:
    args = EXPERTS.build("cpu", tokens=5, experts=4, chosen=2, hidden=64, intermediate=32)
    wide = torch.full((5, 100), torch.nan)
    wide[:, 7:71] = args[0]
    assert torch.equal(library.experts(wide[:, 7:71], *args[1:]), library.experts(*args))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("gate_up", Matrix.plain(torch.zeros(4, 64, 64, dtype=torch.bfloat16))),
        ("gate_up", Matrix.plain(torch.zeros(64, 64))),
        ("gate_up", Matrix.plain(torch.zeros(4, 64, 64))._replace(order=torch.zeros(4, 63).int())),
        ("gate_up", Matrix.plain(torch.zeros(4, 64, 64))._replace(order=torch.zeros(4, 64).long())),
        ("down", Matrix.plain(torch.zeros(4, 64, 31))),
        ("down", Matrix.plain(torch.zeros(3, 64, 32))),
        ("down", Matrix.plain(torch.zeros(4, 63, 32))),
        ("weights", torch.zeros(5, 3)),
        ("ids", torch.zeros(5, 2, dtype=torch.int32)),
        ("gate_up_bias", torch.zeros(4, 63)),
        ("gate_up_bias", torch.zeros(4, 64, dtype=torch.bfloat16)),
        ("down_bias", torch.zeros(64, 4).T),
    ],
)
def test_kernel_refuses_what_does_not_fit(library: KernelLibrary, field: str, wrong: Any) -> None:
    args = EXPERTS.build("cpu", tokens=5, experts=4, chosen=2, hidden=64, intermediate=32)
    with pytest.raises(ValueError, match="expected"):
        library.experts(*Experts.of_flat(*args).replace(**{field: wrong}).flat())


def test_no_tokens_and_no_experts_of_theirs(library: KernelLibrary) -> None:
    call = Experts.of_flat(
        *EXPERTS.build("cpu", tokens=3, experts=4, chosen=2, hidden=64, intermediate=32)
    )
    nobody = call.replace(ids=torch.full_like(call.ids, -1))
    for kernel in (library.experts, EXPERTS.reference):
        assert kernel(*of_tokens(call, slice(0)).flat()).shape == (0, 64)
        assert torch.equal(kernel(*nobody.flat()), torch.zeros(3, 64))
