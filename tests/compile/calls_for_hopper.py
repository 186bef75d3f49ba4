"""Compiles a model's calls for an sm_90 GPU, which needs no GPU; prints what each launches.

A program of its own, for it pretends to its process that the device is there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from src.compile.job import flatten, is_tensor
from src.compile.just_in_time import CompiledFunction
from src.models import Call, Model
from src.models.fields import Fields
from src.models.model import ModelOptions
from src.models.program import run_chain
from src.models.registry import family_of
from tests.compile import hopper_stand_in as hopper

# Two layers of each: one call in the middle, between the first and the last.
NAMES = ("first", "middle", "last", "head")
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    # With biases of queries, keys and values. Torch would rather multiply by a padded copy of the
    # head.
    "biased": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151937,
    },
}
# As many as there are hidden units, which stay another number; and more logits than 32 bits count.
MOST_TOKENS = {"llama-3.1-8b": 4096, "biased": 16384}


def model_of(shape: dict[str, Any]) -> Model:
    fields = {"num_hidden_layers": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    family = family_of(shape["architectures"][0])
    config = family.describe(Fields(shape | fields, "shape", family.defaults))
    options = ModelOptions(dtype=torch.bfloat16, device=hopper.DEVICE, max_positions=4096)
    return Model(config, family.write, options)


def expected_shapes(shape: dict[str, Any], call: Call, tokens: int) -> list[tuple[int, ...]]:
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    kv_heads, head_dim = shape["num_key_value_heads"], hidden // heads
    shapes = {
        "residual": (tokens, hidden),
        "query": (tokens, heads, head_dim),
        "key": (tokens, kv_heads, head_dim),
        "value": (tokens, kv_heads, head_dim),
        "hidden": (tokens, hidden),
        "logits": (tokens, shape["vocab_size"]),
    }
    return [shapes[name] for name in call.chain.writes]


def run(name: str) -> dict[str, list[str]]:
    """What each call launches, by name, in order."""
    shape, most_tokens = SHAPES[name], MOST_TOKENS[name]
    model = model_of(shape)
    calls = model.program.calls
    assert [call.chain.reads for call in calls] == [
        ("input_ids", "positions"),
        ("attended", "residual", "positions"),
        ("attended", "residual"),
        ("hidden",),
    ]
    functions = [
        CompiledFunction(run_chain, range(2, 2 + len(call.chain.reads)), most_tokens)
        for call in calls
    ]
    launched: dict[str, list[str]] = {}
    counts = (8, 0, 1, 2, 3, 256, most_tokens)
    for tokens in counts:
        before = len(hopper.KERNELS)
        for which, call, compiled in zip(NAMES, calls, functions, strict=True):
            arguments = model.call_arguments(call, tokens)
            # While it compiles torch does what it does on a device of its own.
            with hopper.recorded(alone=tokens != counts[0]) as seen:
                results = compiled(*arguments)
            expected = expected_shapes(shape, call, tokens)
            assert [tuple(result.shape) for result in results] == expected, (which, tokens)
            names = [called for called, _ in seen]
            assert launched.setdefault(which, names) == names, (which, tokens)
            _check_copies(which, seen, arguments)
        if tokens == counts[0]:
            of_logits = launched["head"][-1]
            _check_indices(hopper.KERNELS[before:], of_logits, shape["vocab_size"] * most_tokens)
        else:
            assert len(hopper.KERNELS) == before, tokens
    return launched


def _check_indices(kernels: list[hopper.HopperKernel], of_logits: str, most_logits: int) -> None:
    """64-bit indices cost registers and time: only where one is needed."""
    for kernel in kernels:
        is_wide = kernel.name == of_logits and most_logits >= 1 << 31
        assert ("i64" in kernel.signature.values()) == is_wide, (kernel.name, kernel.signature)


def _check_copies(
    which: str, seen: list[tuple[str, tuple[Any, ...]]], arguments: tuple[Any, ...]
) -> None:
    """Nothing but products reads a matrix of weights, but for the embedding, which is looked up."""
    weights = [each for each in flatten(arguments[1], is_tensor) if each.dim() == 2]
    matrices = {_memory(each) for each in weights}
    multiplied = set()
    for name, given in seen:
        read = {_memory(each) for each in given if isinstance(each, Tensor)}
        if name in ("mm", "addmm"):
            multiplied |= read & matrices
        else:
            assert "embedding" in name or not read & matrices, (which, name)
    # Each of them, but for the embedding.
    assert len(matrices) - len(multiplied) == (which == "first"), which


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def main() -> None:
    hopper.install()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with torch.inference_mode(), mode:
        sys.stdout.write(json.dumps({name: run(name) for name in SHAPES}) + "\n")


if __name__ == "__main__":
    main()
