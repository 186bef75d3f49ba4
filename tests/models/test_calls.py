"""Calls are captured once for each that is alike, whatever the depth and the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.decorators import mark_dynamic
from torch.fx.experimental import _config as shape_config

from src.models import Model, keys_and_values, load_model
from src.models.loading.options import LoadOptions
from src.models.model import ModelOptions
from src.models.program import run_chain
from src.models.registry import family_of, load_config
from tests.models.harness import dense_mix
from tests.support.checkpoints import CLASSES, make_checkpoint

Graph = torch.fx.GraphModule


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def capturing(graphs: list[Graph]) -> Callable[..., Any]:
    def backend(graph: Graph, example_inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


class Capturing:
    """`run_chain` under `torch.compile`, with symbolic token dimensions."""

    def __init__(self, graphs: list[Graph]) -> None:
        self._function = torch.compile(run_chain, backend=capturing(graphs), fullgraph=True)

    def __call__(self, chain: Any, weights: Any, *tensors: torch.Tensor) -> Any:
        for tensor in tensors:
            mark_dynamic(tensor, 0, min=0, max=64)
        with shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            return self._function(chain, weights, *[tensor.contiguous() for tensor in tensors])


@torch.inference_mode()
def run(model: Model, functions: Any, tokens: int) -> torch.Tensor:
    ids, positions = torch.arange(3, 3 + tokens), torch.arange(tokens)
    hidden = model.forward(functions, ids, positions, dense_mix(model))
    return model.logits(functions, hidden)


def alike(model: Model) -> int:
    """How many different calls there are."""
    return len({call.chain for call in model.program.calls})


# Families in which some layers are dense, or some are not rotated.
UNLIKE = dict.fromkeys(
    ("cohere2", "deepseekv2", "deepseekv3", "glm4_moe", "qwen2_moe", "qwen3_moe", "smollm3"), 5
)
UNLIKE |= {"exaone4": 5, "llama4": 7, "granite_moehybrid": 6, "qwen3next": 7}
UNLIKE |= {"lfm2": 6, "lfm2_moe": 7}


@pytest.mark.parametrize("architecture", CLASSES)
def test_as_many_graphs_as_kinds_of_calls_serve_any_depth_and_any_number_of_tokens(
    tmp_path: Path, architecture: str
) -> None:
    directory = make_checkpoint(tmp_path, architecture, num_hidden_layers=6)
    model = load_model(directory)
    # The first, what lies between two mixers, the last and the head; more where layers differ.
    kinds = alike(model)
    assert kinds == UNLIKE.get(architecture, 4)
    graphs: list[Graph] = []
    by_chain: dict[Any, Capturing] = {}
    functions = [by_chain.setdefault(call.chain, Capturing(graphs)) for call in model.program.calls]
    for tokens in (7, 1, 2, 33):
        got = run(model, functions, tokens)
        torch.testing.assert_close(got, run(model, model.functions, tokens))
    assert len(graphs) == kinds


def first_call(model: Model, tokens: int) -> dict[str, torch.Tensor]:
    call = model.program.calls[0]
    given = {"input_ids": torch.arange(tokens), "positions": torch.arange(tokens)}
    results = run_chain(
        call.chain, model.bound[call.slot], *[given[name] for name in call.chain.reads]
    )
    return dict(zip(call.chain.writes, results, strict=True))


def test_attention_inputs_have_the_promised_layout(tmp_path: Path) -> None:
    inputs = first_call(load_model(make_checkpoint(tmp_path, head_dim=24)), 5)
    assert inputs["query"].shape == (5, 4, 24)
    assert inputs["key"].shape == inputs["value"].shape == (5, 2, 24)
    assert inputs["residual"].shape == (5, 64)
    assert inputs["query"].is_contiguous()
    assert inputs["key"].is_contiguous()
    assert inputs["value"].stride() == ((4 + 2 * 2) * 24, 24, 1)


@torch.inference_mode()
def test_what_an_op_will_rotate_leaves_its_call_as_slices(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3", head_dim=24)
    rotated, config = load_model(directory), load_config(directory)
    options = ModelOptions(
        dtype=torch.float32, device=torch.device("cpu"), max_positions=256, rotates_in_op=True
    )
    model = Model(config, family_of(config.architecture).write, options)
    assert model.parameters().keys() == rotated.parameters().keys()
    for name in model.parameters():
        model.replace(name, rotated.weights[name])
    raw, expected = first_call(model, 5), first_call(rotated, 5)
    width = (4 + 2 * 2) * 24
    parts = zip(("query", "key", "value"), (4, 2, 2), (0, 4 * 24, 6 * 24), strict=True)
    for name, heads, offset in parts:
        tensor = raw[name]
        assert tensor.shape == (5, heads, 24)
        assert tensor.stride() == (width, 24, 1)
        assert tensor.storage_offset() == offset
        assert tensor.untyped_storage().data_ptr() == raw["query"].untyped_storage().data_ptr()
    assert torch.equal(raw["value"], expected["value"])
    assert torch.equal(raw["residual"], expected["residual"])
    assert not torch.equal(raw["query"], expected["query"])
    # And what rotates has the norms and the table.
    assert all(each is not None for each in model.mixer_weights[0][:3])


def test_logits_are_float32_whatever_the_dtype(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path), LoadOptions(dtype="bfloat16"))
    hidden = torch.randn(3, 64, dtype=torch.bfloat16)
    assert model.logits(model.functions, hidden).dtype == torch.float32


def test_kv_cache_spec_names_each_layers_window(tmp_path: Path) -> None:
    directory = make_checkpoint(
        tmp_path, "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    layers = load_model(directory, LoadOptions(dtype="bfloat16")).kv_cache_spec()
    assert layers == tuple(keys_and_values(2, 16, torch.bfloat16, at) for at in (None, None, 8))
