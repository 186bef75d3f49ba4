"""Compiles a model's regions for an sm_90 GPU, which needs no GPU; prints what each launches.

A program of its own, for it pretends to its process that the device is there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from src.models.regions import (
    EAGER_REGIONS,
    TOKEN_ARGUMENTS,
    PostAttention,
    PreAttention,
    RegionSpec,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from src.compile.job import flatten, is_tensor
from src.compile.just_in_time import compile_functions
from src.distributed import Group
from tests.compile import hopper_stand_in as hopper

# hidden, query heads, key heads, head, intermediate, vocabulary; whether projections have a bias
SHAPES = {
    "llama-3.1-8b": (4096, 32, 8, 128, 14336, 128256, False),
    # Torch would rather multiply by a padded copy of the head.
    "biased": (896, 14, 2, 64, 4864, 151937, True),
}
# As many as there are hidden units, which stay another number; and more logits than 32 bits count.
MOST_TOKENS = {"llama-3.1-8b": 4096, "biased": 16384}


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=hopper.DEVICE)


def arguments_of(shape: tuple[Any, ...], tokens: int) -> list[tuple[Any, ...]]:
    """Of a call of each region, as `Model.region_arguments`."""
    hidden, heads, kv_heads, head_dim, intermediate, vocab, has_bias = shape
    spec = RegionSpec(heads, kv_heads, head_dim, 1e-5, Group(), rotates_in_op=True)
    projected = (heads + 2 * kv_heads) * head_dim
    bias = weight(projected) if has_bias else None
    pre = PreAttention(weight(hidden), weight(projected, hidden), bias, None, None)
    post = PostAttention(
        weight(hidden, heads * head_dim),
        None,
        weight(hidden),
        weight(2 * intermediate, hidden),
        None,
        weight(hidden, intermediate),
        None,
    )
    table = weight(4096, head_dim, dtype=torch.float32)
    embedding, head, norm = weight(vocab, hidden), weight(vocab, hidden), weight(hidden)

    def ids() -> Tensor:
        return weight(tokens, dtype=torch.int64)

    attended = weight(tokens, heads * head_dim)
    residual = weight(tokens, hidden)
    return [
        (spec, embedding, pre, table, ids(), ids()),
        (spec, post, pre, table, attended, residual, ids()),
        (spec, post, norm, attended, residual),
        (spec, head, residual),
    ]


def expected_shapes(shape: tuple[Any, ...], tokens: int) -> list[list[tuple[int, ...]]]:
    hidden, heads, kv_heads, head_dim, _, vocab, _ = shape
    inputs = [
        (tokens, heads, head_dim),
        (tokens, kv_heads, head_dim),
        (tokens, kv_heads, head_dim),
        (tokens, hidden),
    ]
    return [inputs, inputs, [(tokens, hidden)], [(tokens, vocab)]]


def run(name: str) -> dict[str, list[str]]:
    """What each region launches, by name, in order."""
    shape, most_tokens = SHAPES[name], MOST_TOKENS[name]
    regions = compile_functions(list(EAGER_REGIONS), TOKEN_ARGUMENTS, most_tokens)
    launched: dict[str, list[str]] = {}
    counts = (8, 0, 1, 2, 3, 256, most_tokens)
    vocab_size = shape[5]
    for tokens in counts:
        before = len(hopper.KERNELS)
        calls = zip(
            *(EAGER_REGIONS._fields, regions, arguments_of(shape, tokens)),
            expected_shapes(shape, tokens),
            strict=True,
        )
        for region, compiled, arguments, expected in calls:
            # While it compiles torch does what it does on a device of its own.
            with hopper.recorded(alone=tokens != counts[0]) as seen:
                got = compiled(*arguments)
            results = [got] if isinstance(got, Tensor) else list(got)
            assert [tuple(result.shape) for result in results] == expected, (region, tokens)
            names = [called for called, _ in seen]
            assert launched.setdefault(region, names) == names, (region, tokens)
            _check_copies(region, seen, arguments)
        if tokens == counts[0]:
            of_logits = launched["logits"][-1]
            _check_indices(hopper.KERNELS[before:], of_logits, vocab_size * most_tokens)
        else:
            assert len(hopper.KERNELS) == before, tokens
    return launched


def _check_indices(kernels: list[hopper.HopperKernel], of_logits: str, most_logits: int) -> None:
    """64-bit indices cost registers and time: only where one is needed."""
    for kernel in kernels:
        is_wide = kernel.name == of_logits and most_logits >= 1 << 31
        assert ("i64" in kernel.signature.values()) == is_wide, (kernel.name, kernel.signature)


def _check_copies(
    region: str, seen: list[tuple[str, tuple[Any, ...]]], arguments: tuple[Any, ...]
) -> None:
    """Nothing but products reads a matrix of weights, but for the embedding, which is looked up."""
    weights = [each for each in flatten(arguments[1:3], is_tensor) if each.dim() == 2]
    matrices = {_memory(each) for each in weights}
    multiplied = set()
    for name, given in seen:
        read = {_memory(each) for each in given if isinstance(each, Tensor)}
        if name in ("mm", "addmm"):
            multiplied |= read & matrices
        else:
            assert "embedding" in name or not read & matrices, (region, name)
    # Each of them, but for the embedding.
    assert len(matrices) - len(multiplied) == (region == "first"), region


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def main() -> None:
    hopper.install()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with torch.inference_mode(), mode:
        sys.stdout.write(json.dumps({name: run(name) for name in SHAPES}) + "\n")


if __name__ == "__main__":
    main()
