"""The regions are captured once each, whatever the depth and the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.decorators import mark_dynamic
from torch.fx.experimental import _config as shape_config

from src.models import Model, Regions, load_model
from src.models.regions import TOKEN_ARGUMENTS
from tests.models.harness import dense_attend
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
    """A region under `torch.compile`, its token dimensions symbolic as `TOKEN_ARGUMENTS` says."""

    def __init__(
        self, region: Callable[..., Any], token_arguments: tuple[int, ...], graphs: list[Graph]
    ) -> None:
        self._region = torch.compile(region, backend=capturing(graphs), fullgraph=True)
        self._token_arguments = token_arguments

    def __call__(self, *arguments: Any) -> Any:
        for index in self._token_arguments:
            mark_dynamic(arguments[index], 0, min=0, max=64)
        with shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            return self._region(*arguments)


@torch.inference_mode()
def run(decoder: Model, regions: Regions, tokens: int) -> torch.Tensor:
    ids, positions = torch.arange(3, 3 + tokens), torch.arange(tokens)
    hidden = decoder.forward(regions, ids, positions, dense_attend(decoder))
    return decoder.logits(regions, hidden)


@pytest.mark.parametrize("architecture", CLASSES)
def test_four_graphs_serve_any_depth_and_any_number_of_tokens(
    tmp_path: Path, architecture: str
) -> None:
    directory = make_checkpoint(tmp_path, architecture, num_hidden_layers=6)
    decoder = load_model(directory)
    graphs: list[Graph] = []
    regions = Regions(
        *(Capturing(r, t, graphs) for r, t in zip(decoder.functions, TOKEN_ARGUMENTS, strict=True))
    )
    for tokens in (7, 1, 2, 33):
        got = run(decoder, regions, tokens)
        torch.testing.assert_close(got, run(decoder, decoder.functions, tokens))
    assert len(graphs) == 4


def test_attention_inputs_have_the_promised_layout(tmp_path: Path) -> None:
    decoder = load_model(make_checkpoint(tmp_path, head_dim=24))
    ids, positions = torch.arange(5), torch.arange(5)
    inputs = decoder.functions.first(
        decoder.region_spec,
        decoder.weights["embedding"],
        decoder.pre[0],
        decoder.rope_table,
        ids,
        positions,
    )
    assert inputs.query.shape == (5, 4, 24)
    assert inputs.key.shape == inputs.value.shape == (5, 2, 24)
    assert inputs.residual.shape == (5, 64)
    assert inputs.query.is_contiguous()
    assert inputs.key.is_contiguous()
    assert inputs.value.stride() == ((4 + 2 * 2) * 24, 24, 1)


@torch.inference_mode()
def test_what_an_op_will_rotate_leaves_the_regions_as_slices(tmp_path: Path) -> None:
    decoder = load_model(make_checkpoint(tmp_path, "qwen3", head_dim=24))
    ids, positions = torch.arange(5), torch.arange(5)
    arguments = (decoder.weights["embedding"], decoder.pre[0], decoder.rope_table, ids, positions)
    spec = replace(decoder.region_spec, rotates_in_op=True)
    raw = decoder.functions.first(spec, *arguments)
    rotated = decoder.functions.first(decoder.region_spec, *arguments)
    width = (4 + 2 * 2) * 24
    for index, (tensor, heads) in enumerate(zip(raw[:3], (4, 2, 2), strict=True)):
        assert tensor.shape == (5, heads, 24)
        assert tensor.stride() == (width, 24, 1)
        assert tensor.storage_offset() == (0, 4 * 24, 6 * 24)[index]
        assert tensor.untyped_storage().data_ptr() == raw.query.untyped_storage().data_ptr()
    assert torch.equal(raw.value, rotated.value)
    assert torch.equal(raw.residual, rotated.residual)
    assert not torch.equal(raw.query, rotated.query)


def test_logits_are_float32_whatever_the_dtype(tmp_path: Path) -> None:
    decoder = load_model(make_checkpoint(tmp_path), dtype="bfloat16")
    hidden = torch.randn(3, 64, dtype=torch.bfloat16)
    assert decoder.logits(decoder.functions, hidden).dtype == torch.float32


def test_kv_cache_spec_names_each_layers_window(tmp_path: Path) -> None:
    directory = make_checkpoint(
        tmp_path, "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    layers = load_model(directory, dtype="bfloat16").kv_cache_spec()
    assert [layer.sliding_window for layer in layers] == [None, None, 8]
    assert {layer[:3] for layer in layers} == {(2, 16, torch.bfloat16)}
