"""GGUF files of small models against transformers: on what was converted, and on what is decoded.

In float32. The format's own package decodes. How near logits have to be follows from an analysis of
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.errors import ModelLoadError
from src.models import Model, load_config, load_model, outline_model
from src.models.loading import filling
from src.models.loading.options import LoadOptions
from src.ops.matrix import Matrix
from src.ops.projections.projection import Projection
from tests.models.harness import PagedSequence, dense_logits
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.gguf_files import ARCHITECTURES, Type, restore, write_gguf
from tests.support.rounding import MARGIN, Expected, assert_only_rounded, expected_logits

PROMPT = [3 + 7 * i % 300 for i in range(40)]
# What rows of 32 fit, and rows of 256.
SMALL = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)
LARGE = (Type.Q4_K, Type.Q5_K, Type.Q6_K)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
OWN: dict[str, dict[str, Any]] = {
    # Files have neither: heads are tied, and queries scaled by the size of a head.
    "gemma2": {"query_pre_attn_scalar": 16, "tie": True},
    "gemma3": {"query_pre_attn_scalar": 16, "tie": True},
    "qwen2_moe": {"mlp_only_layers": [], "moe_intermediate_size": 32},
    "qwen3_moe": {"mlp_only_layers": [], "moe_intermediate_size": 32},
}


def logits_of(reference: Any) -> Expected:
    return expected_logits(reference, PROMPT)


def reference_of(path: Path, checkpoint: Path, architecture: str) -> Expected:
    """Logits of the decoded weights."""
    decoded = restore(path, checkpoint, architecture, path.parent / "decoded")
    return logits_of(load_reference(decoded))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A checkpoint, and the GGUF file that a converter makes of it."""

    def made(
        architecture: str, type_of: Callable[[str], Type] = lambda name: Type.F32, **settings: Any
    ) -> tuple[Path, Path]:
        own = OWN.get(architecture, {}) | settings
        checkpoint = make_checkpoint(tmp_path / "of", architecture, **own)
        (tmp_path / "file").mkdir()
        path = tmp_path / "file" / "m.gguf"
        return checkpoint, write_gguf(path, checkpoint, architecture, type_of)

    return made


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_is_the_model_that_was_converted(
    make: Callable[..., tuple[Path, Path]], architecture: str
) -> None:
    checkpoint, path = make(architecture)
    model = load_model(path)
    assert model.spec.dtype == torch.float32
    assert_only_rounded(dense_logits(model, PROMPT), logits_of(load_reference(checkpoint)))
    assert load_config(path).max_position_embeddings == 256


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_rope_follows_from_metadata_and_factors(
    make: Callable[..., tuple[Path, Path]], rope: str
) -> None:
    checkpoint, path = make("llama", rope=rope)
    assert_only_rounded(
        dense_logits(load_model(path), PROMPT), logits_of(load_reference(checkpoint))
    )


def test_longrope_of_phi3(make: Callable[..., tuple[Path, Path]]) -> None:
    checkpoint, path = make("phi3", rope="longrope")
    assert_only_rounded(
        dense_logits(load_model(path), PROMPT), logits_of(load_reference(checkpoint))
    )


@pytest.mark.parametrize("kind", [*SMALL, *LARGE], ids=lambda kind: kind.name)
def test_every_type_is_held_exactly(make: Callable[..., tuple[Path, Path]], kind: Type) -> None:
    wide = WIDE if kind in LARGE else {}
    checkpoint, path = make("llama", lambda name: kind, tie=kind == Type.Q8_0, **wide)
    model = load_model(path, LoadOptions(dtype="float32"))
    held = [name for name, each in model.weights.items() if isinstance(each, Projection)]
    assert "layers.0.qkv_weight" in held
    assert "head" in held
    assert isinstance(model.weights["embedding"], torch.Tensor)
    want = reference_of(path, checkpoint, "llama")
    assert_only_rounded(dense_logits(model, PROMPT), want)
    sequence = PagedSequence(model)
    parts = [sequence.append(PROMPT[i : i + 7]) for i in range(0, len(PROMPT), 7)]
    assert_only_rounded(torch.cat(parts), want)
    # What is no rounding shows: a group without its scale, one byte of weights with two other bits.
    weight = model.weights["layers.1.down_weight"]
    assert isinstance(weight, Projection)
    matrix = weight.matrix
    assert matrix.scales is not None
    for tensor, index in ((matrix.scales, (5, 1)), (matrix.values, (5, 7))):
        part = tensor[index if tensor.dim() == 2 else index[0]]
        before = part.clone()
        part.copy_(torch.ones_like(part) if tensor is matrix.scales else part ^ 0x24)
        assert want.share(dense_logits(model, PROMPT)).max() > MARGIN
        part.copy_(before)


def mixed(name: str) -> Type:
    """As a "medium" mixture has it: some matrices of one fused parameter are finer."""
    if "attn_v" in name or "ffn_up" in name:
        return Type.Q6_K
    if "attn_q." in name and "blk.1" in name:
        return Type.Q4_1
    if "attn_k." in name and "blk.0" in name:
        return Type.F16
    return Type.Q8_0 if "embd" in name else Type.Q4_K


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "qwen3_moe"])
def test_types_may_differ_within_a_layer(
    make: Callable[..., tuple[Path, Path]], architecture: str
) -> None:
    wide = WIDE | {"num_key_value_heads": 2}
    if architecture == "gemma3":
        wide["query_pre_attn_scalar"] = 64
    if architecture == "qwen3_moe":
        wide["moe_intermediate_size"] = 256
    checkpoint, path = make(architecture, mixed, **wide)
    assert load_config(path).dtype == "bfloat16"
    exact = load_model(path, LoadOptions(dtype="float32"))
    want = reference_of(path, checkpoint, architecture)
    assert_only_rounded(dense_logits(exact, PROMPT), want)
    weight = exact.weights["layers.1.qkv_weight"]
    assert isinstance(weight, Projection)
    # Of 8 bits, since the finest of them has 6; of groups of 16, as that one has.
    assert weight.matrix.values.dtype == torch.int8
    # One part of the other layer's is not quantized at all.
    assert isinstance(exact.weights["layers.0.qkv_weight"], torch.Tensor)
    if architecture == "qwen3_moe":
        stacks = [exact.weights[f"layers.1.experts.{name}"] for name in ("gate_up", "down")]
        for stack, dtype in zip(stacks, (torch.int8, torch.uint8), strict=True):
            assert isinstance(stack, Matrix)
            assert stack.values.dtype == dtype


def test_experts_may_have_rounded_inputs(make: Callable[..., tuple[Path, Path]]) -> None:
    """Where gates and ups are whole strips, they are laid out for integer products."""
    wide = WIDE | {"moe_intermediate_size": 64}
    checkpoint, path = make("qwen3_moe", lambda name: Type.Q4_0, **wide)
    model = load_model(path, LoadOptions(dtype="float32", rounds_inputs=True))
    stack = model.weights["layers.1.experts.gate_up"]
    assert isinstance(stack, Matrix)
    assert stack.values.shape[1:] == (2, 32, 256)  # strips, eights of inputs, bytes
    assert stack.nbytes == load_model(path).weights["layers.1.experts.gate_up"].nbytes
    want = reference_of(path, checkpoint, "qwen3_moe")
    exact = want.logits
    error = (dense_logits(model, PROMPT) - exact).abs() / exact.abs().amax(dim=-1, keepdim=True)
    # Rounding to 127 steps of the largest input is an error of a standard deviation of
    # 1 / (127 * sqrt(12)) of it, and so of 0.7 % of a product of 256 inputs, the largest of which
    # is three times as large as they are on average. Eight products follow each other: 2 %, of
    # logits the largest of which is three times as large as the others: 0.6 % on average, and four
    # times that for the largest of ten thousand. Of both, twice that again and more. With the
    # values of one expert of eight in another order, or its scales doubled, the largest is 15 % or
    # more.
    assert error.mean() < 0.015
    assert error.max() < 0.1


def test_an_outline_is_the_model_without_values(make: Callable[..., tuple[Path, Path]]) -> None:
    path = make("llama", lambda name: Type.Q4_1, tie=True)[1]
    model, outline = load_model(path), outline_model(path)
    shapes: Callable[[Model], dict[str, Any]] = lambda one: {  # noqa: E731
        name: (each.shape, each.dtype) for name, each in one.parameters().items()
    }
    assert shapes(outline) == shapes(model)
    assert all(each.is_meta for each in outline.parameters().values())


def test_rounding_a_quantized_file_again_is_refused(
    make: Callable[..., tuple[Path, Path]],
) -> None:
    path = make("llama", lambda name: Type.Q4_0)[1]
    with pytest.raises(ModelLoadError, match=r"model.quantization = 'int8'.*quantized already"):
        load_model(path, LoadOptions(quantization="int8"))


def test_a_file_of_plain_types_may_be_rounded(make: Callable[..., tuple[Path, Path]]) -> None:
    _, path = make("llama", lambda name: Type.BF16)
    assert load_config(path).dtype == "bfloat16"
    model = load_model(path, LoadOptions(quantization="int8"))
    assert isinstance(model.weights["layers.0.qkv_weight"], Projection)
    assert load_config(path).formats is None


@pytest.mark.parametrize("kind", [Type.F32, Type.Q4_1, Type.Q8_0, Type.Q5_0])
def test_long_tensors_are_read_in_pieces(
    make: Callable[..., tuple[Path, Path]], kind: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make("llama", lambda name: kind)[1]
    whole = load_model(path).parameters()
    monkeypatch.setattr(filling, "_PIECE_BYTES", 3000)
    rows: list[tuple[int, int] | None] = []
    read = filling._Reader.read
    monkeypatch.setattr(
        filling._Reader, "read", lambda own, one: (rows.append(one.rows), read(own, one))[1]
    )
    pieces = load_model(path).parameters()
    assert sum(one is not None for one in rows) > 20
    assert all(torch.equal(pieces[name], value) for name, value in whole.items())
