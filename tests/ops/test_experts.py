"""`experts` against the layers of transformers, and what its arguments promise."""

from typing import Any

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from src.ops import EXPERTS, Routing, experts, route
from src.ops.experts import grouped

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


def qwen3(renormalise: bool) -> Any:
    return Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            num_experts=COUNT,
            num_experts_per_tok=CHOSEN,
            norm_topk_prob=renormalise,
        )
    )


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize(
    ("block", "renormalise"),
    [(mixtral(), True), (qwen3(True), True), (qwen3(False), False)],
    ids=["mixtral", "qwen3", "qwen3, weights as they are"],
)
def test_equals_transformers(block: Any, renormalise: bool, tokens: int) -> None:
    random = torch.Generator().manual_seed(tokens)
    with torch.no_grad():
        for parameter in block.parameters():
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=random) * scale)
        x = torch.randn(1, tokens, HIDDEN, generator=random)
        expected = block(x)[0]
        logits = x[0] @ block.gate.weight.T
        chosen = route(logits, Routing(chosen=CHOSEN, renormalise=renormalise))
        layer = (block.experts.gate_up_proj, block.experts.down_proj)
        for product in (experts, grouped):
            got = product(x[0], *layer, *chosen)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


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
        got, expected = grouped(*args[:5]), EXPERTS.reference(*args)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert not got.isnan().any()


def test_padding_adds_nothing_and_reads_nothing() -> None:
    args = EXPERTS.build(
        "cpu", tokens=9, experts=4, chosen=2, hidden=32, intermediate=16, padding=4
    )
    assert args[0][5:].isnan().all()
    assert torch.equal(EXPERTS.overload(*args)[5:], torch.zeros(4, 32))


def test_cost_counts_the_experts_that_are_read() -> None:
    args = EXPERTS.build("cpu", tokens=2, experts=8, chosen=2, hidden=32, intermediate=16)
    together, apart = (list(args) for _ in range(2))
    together[4], apart[4] = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 1], [2, 3]])
    of_an_expert = 4 * 32 * 16 * 3
    assert EXPERTS.cost(*apart).bytes - EXPERTS.cost(*together).bytes == 2 * of_an_expert
    assert EXPERTS.cost(*apart).flops == 4 * 2 * 32 * 16 * 3
