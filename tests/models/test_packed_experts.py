"""Experts stay packed as their checkpoint stores them, and are those of the dequantized weights.

Their inputs are not rounded, so with every format logits are within 1e-4 of a row's largest of what
transformers computes in float32, whole and in chunks.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.distributed import Group
from src.models import Model, load_config, load_model
from src.models.checkpoint import open_checkpoint
from src.models.loading.loader import outline_model
from src.models.loading.options import LoadOptions
from src.ops.matrix import Matrix
from tests.models.harness import dense_logits
from tests.models.test_placements import loaded
from tests.models.test_quantized_checkpoints import (
    AWQ,
    FP8,
    GPTQ,
    MODELOPT,
    NVFP4_WEIGHTS,
    PER_GROUP,
    TOKEN,
    UNEVEN,
    check,
    compressed,
    made,
    prompt_of,
    weights,
)
from tests.support.quantized import Packer, awq, fp8, gptq, int8, nvfp4, packed

BYTE, FLOAT8 = torch.int8, torch.float8_e4m3fn
# Nothing else is quantized, so that no other inputs are rounded.
EXPERTS = re.compile(r"experts\.\d+\.\w+\.weight$")
WIDE = {"num_hidden_layers": 2, "moe_intermediate_size": 96}
BLOCKS = FP8 | {"weight_block_size": [32, 32]}
# Name: section, packer, family, dtype of values, numbers of a row's scales of gate, whether there
# are offsets.
FORMATS: dict[str, tuple[dict[str, Any], Packer, str, torch.dtype, int, bool]] = {
    "awq": (AWQ, awq(32), "qwen3_moe", torch.uint8, 2, True),
    "awq-rows": (AWQ | {"group_size": -1}, awq(-1), "mixtral", torch.uint8, 1, True),
    "gptq": (GPTQ, gptq(), "mixtral", torch.uint8, 2, False),
    "gptq-zeros-8-bits-by-16": (
        GPTQ | {"sym": False, "bits": 8, "group_size": 16},
        gptq(8, 16, symmetric=False), "qwen3_moe", BYTE, 4, True,
    ),
    # Bits that fit four, in groups that do not.
    "gptq-by-16": (GPTQ | {"group_size": 16}, gptq(4, 16), "qwen3_moe", BYTE, 4, False),
    # One group has no order.
    "gptq-order-rows": (
        GPTQ | {"group_size": -1, "desc_act": True}, gptq(4, -1), "mixtral", torch.uint8, 1, False,
    ),
    "gptq-order": (
        GPTQ | {"desc_act": True}, gptq(shuffled=True), "mixtral", torch.uint8, 2, False,
    ),
    "gptq-order-zeros": (
        GPTQ | {"desc_act": True, "sym": False},
        gptq(shuffled=True, symmetric=False), "qwen3_moe", torch.uint8, 2, True,
    ),
    "packed-order": (
        compressed("pack-quantized", PER_GROUP | {"actorder": "group"}),
        packed(shuffled=True), "qwen3_moe", torch.uint8, 2, False,
    ),
    "packed": (
        compressed("pack-quantized", PER_GROUP), packed(), "mixtral", torch.uint8, 2, False,
    ),
    "packed-zeros": (
        compressed("pack-quantized", UNEVEN),
        packed(symmetric=False), "qwen3_moe", torch.uint8, 2, True,
    ),
    "int8": (compressed("int-quantized", weights(bits=8)), int8(), "qwen3_moe", BYTE, 0, False),
    "w8a8-int8": (
        compressed("int-quantized", weights(bits=8), TOKEN), int8(), "mixtral", BYTE, 0, False,
    ),
    "w8a8-int8-zeros": (
        compressed("int-quantized", weights(bits=8, symmetric=False), TOKEN),
        int8(symmetric=False), "qwen3_moe", BYTE, 1, True,
    ),
    "fp8": (FP8, fp8(), "mixtral", FLOAT8, 0, False),
    "fp8-static": (
        FP8 | {"activation_scheme": "static"}, fp8(static="input_scale"),
        "qwen3_moe", FLOAT8, 0, False,
    ),
    "fp8-rows": (
        compressed("float-quantized", weights("float", 8), TOKEN | {"type": "float"}),
        fp8(per_row=True), "mixtral", FLOAT8, 0, False,
    ),
    "fp8-blocks": (BLOCKS, fp8(32, name="weight_scale_inv"), "deepseekv3", FLOAT8, 2, False),
    # Rows end within a block.
    "fp8-cut-blocks": (
        FP8 | {"weight_block_size": [128, 128]},
        fp8(128, name="weight_scale_inv"), "qwen3_moe", FLOAT8, 1, False,
    ),
    # Rows of gate of 192 inputs: one whole block, and half of another; rows of down of 160.
    "fp8-second-blocks": (
        FP8 | {"weight_block_size": [128, 128]},
        fp8(128, name="weight_scale_inv"), "qwen3_moe", FLOAT8, 3, False,
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", NVFP4_WEIGHTS), nvfp4(), "qwen3_moe", BYTE, 4, False,
    ),
    "modelopt": (MODELOPT, nvfp4(modelopt=True), "mixtral", BYTE, 4, False),
}  # fmt: skip
SIZES: dict[str, dict[str, int]] = {
    "fp8-second-blocks": {"hidden_size": 192, "moe_intermediate_size": 160}
}


def stacks(model: Model) -> list[Matrix]:
    found = [model.weights[name] for name in model.names_of("experts")]
    assert found
    stacked = [each for each in found if isinstance(each, Matrix)]
    assert len(stacked) == len(found)
    return stacked


def checkpoint(tmp_path: Path, name: str, **more: Any) -> Any:
    section, pack, family, *_ = FORMATS[name]
    shape = WIDE | ({"intermediate_size": 96} if family == "mixtral" else {})
    shape |= SIZES.get(name, {}) | more
    return made(tmp_path, section, pack, family, chosen=EXPERTS, **shape)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_stay_as_they_are_stored(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, _, dtype, groups, has_offsets = FORMATS[name]
    directory, reference = checkpoint(tmp_path, name)
    with caplog.at_level("INFO"):
        model = load_model(directory)
    assert "decoded" not in caplog.text
    first, *_ = stacks(model)
    assert first.is_stack
    assert first.values.dtype == dtype
    assert first.scales is not None
    assert (first.scales.shape[2] if first.scales.dim() == 3 else 0) == groups
    assert (first.offsets is not None) == has_offsets
    check(model, reference)
    # What is planned from the configuration alone has these bytes too.
    outlines = stacks(outline_model(directory))
    assert [one.nbytes for one in outlines] == [one.nbytes for one in stacks(model)]
    values = first.dequantized()
    assert first.nbytes < values.nbytes / 2
    dummy = load_model(directory, LoadOptions(load_format="dummy"))
    assert [one.nbytes for one in stacks(dummy)] == [one.nbytes for one in stacks(model)]
    assert dense_logits(dummy, prompt_of(5)).isfinite().all()


@pytest.mark.parametrize("name", ["awq", "gptq", "int8", "fp8-rows", "fp8-blocks"])
def test_ranks_hold_parts_of_what_is_stored(tmp_path: Path, name: str) -> None:
    """Of two ranks, whose 48 columns of down end within a group of 32, or a block."""
    directory, _ = checkpoint(tmp_path, name, **SHARDED.get(name, {}))
    formats = load_config(directory).formats
    assert formats is not None
    formats = formats.opened({n: each.dtype for n, each in open_checkpoint(directory).items()})
    whole = loaded(directory, formats=formats)
    parts = [loaded(directory, formats=formats, group=Group(rank, 2)) for rank in range(2)]
    for layer in whole.names_of("experts"):
        want, *halves = (dense(model.weights[layer]) for model in (whole, *parts))
        if layer.endswith("down"):
            got = torch.cat(halves, 2)
        else:
            cut = [half.chunk(2, 1) for half in halves]
            got = torch.cat([rows for pair in zip(*cut, strict=True) for rows in pair], 1)
        assert torch.equal(got, want)


# Others have 48 columns of down in a rank, which no weight has: they are decoded.
SHARDED = {"gptq": {"intermediate_size": 64}, "fp8-blocks": {"moe_intermediate_size": 192}}


def dense(weight: Any) -> Tensor:
    found: Tensor = weight if isinstance(weight, Tensor) else weight.dequantized()
    return found


@pytest.mark.parametrize("apart", [None, 0, 1, 5])
def test_orders_of_gates_and_ups_may_differ_in_any_expert(
    tmp_path: Path, apart: int | None
) -> None:
    """They are decoded then, and kept where gates and ups of each expert have one order."""

    def pack(name: str) -> Packer | None:
        expert = re.search(r"experts\.(\d+)\.(w3|up)", name)
        number = re.search(r"experts\.(\d+)", name)
        if number is None:
            return None
        is_apart = expert is not None and int(expert[1]) == apart
        return gptq(shuffled=True, seed=lambda: 100 * is_apart + int(number[1]))

    section = GPTQ | {"desc_act": True}
    directory, reference = made(
        tmp_path, section, pack, "mixtral", chosen=EXPERTS, by_name=True, num_hidden_layers=1
    )
    model = load_model(directory)
    gate_up, down = (model.weights[name] for name in model.names_of("experts"))
    assert isinstance(gate_up, Matrix if apart is None else Tensor)
    assert isinstance(down, Matrix)
    assert down.order is not None
    # Every expert has an order of its own.
    assert len({tuple(order.tolist()) for order in down.order}) == len(down.order)
    check(model, reference)


def test_what_no_weight_holds_is_decoded_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Orders of gates and ups that differ, experts of which one is plain, rows of no 32 columns."""
    seeds = itertools.count()
    cases: dict[str, tuple[Any, ...]] = {
        "order": (
            GPTQ | {"desc_act": True},
            gptq(shuffled=True, seed=lambda: next(seeds)),
            "mixtral",
            {},
        ),
        "mixed": (
            AWQ,
            lambda name: None if "experts.2" in name else awq(32),
            "mixtral",
            {"by_name": True},
        ),
        "rows": (FP8, fp8(), "qwen3_moe", {"moe_intermediate_size": 48}),
    }
    for name, (section, pack, family, more) in cases.items():
        caplog.clear()
        shape = {"num_hidden_layers": 1} | more
        directory, reference = made(tmp_path / name, section, pack, family, chosen=EXPERTS, **shape)
        with caplog.at_level("WARNING"):
            model = load_model(directory)
        gate_up, down = model.names_of("experts")
        dense = down if name == "rows" else gate_up
        assert isinstance(model.weights[dense], Tensor)
        assert dense in caplog.text
        assert "decoded" in caplog.text
        check(model, reference)
