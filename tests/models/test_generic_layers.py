"""Decoder layers of transformers are compiled once for a class, or stay as they are."""

from __future__ import annotations

import itertools
import logging
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from src.models.generic.loading import load_by_transformers
from src.models.generic.model import TransformersModel
from tests.architectures.tiny import make_tiny


def outputs(model: TransformersModel, count: int) -> Tensor:
    """Hidden states of a pass whose attention mixes what each token itself has."""

    def mix(mixer: Any, given: Any) -> Tensor:
        assert [len(tensor) for tensor in given] == [count] * 3
        heads = given[0].shape[1]
        whole = [one.repeat_interleave(heads // one.shape[1], 1).flatten(1) for one in given]
        return whole[0] * whole[1].sigmoid() + whole[2]

    ids = torch.arange(count) * 3 + 1
    with torch.inference_mode():
        return model.forward((), ids, torch.arange(count), mix)


@pytest.fixture
def compiled_graphs() -> Any:
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def stablelm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stablelm")
    make_tiny(directory, "stablelm")
    return directory


def test_layers_are_compiled_once_whatever_the_depth(
    stablelm: Path, compiled_graphs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = load_by_transformers(stablelm), load_by_transformers(stablelm)
    num_layers = len(model.mixers)
    assert num_layers > 2
    with caplog.at_level(logging.INFO, "src"):
        model.compile_layers("eager")
    assert "layers are compiled: StableLmDecoderLayer" in caplog.messages
    graphs = compiled_graphs()
    # Before and behind attention, the layer around it; for one token and for more.
    assert 2 <= graphs <= 8
    for count in (1, 2, 11, 17):
        assert torch.equal(outputs(model, count), outputs(plain, count))
    # No request waits for a compiler.
    assert compiled_graphs() == graphs


def test_a_thread_with_another_number_of_threads_runs_what_is_compiled(
    stablelm: Path, compiled_graphs: Any
) -> None:
    """Layers are compiled while they are loaded, and called on the thread of the device."""
    calls: list[int] = []

    def counted(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        def call(*arguments: Any) -> Any:
            calls.append(len(arguments))
            return graph(*arguments)

        return call

    plain, model = load_by_transformers(stablelm), load_by_transformers(stablelm)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model.compile_layers(counted)
        for threads, count in itertools.product((1, 3), (1, 17)):
            torch.set_num_threads(threads)
            calls.clear()
            assert torch.equal(outputs(model, count), outputs(plain, count))
            # Before attention and behind it, in every layer.
            assert len(calls) >= 2 * len(model.mixers)
    finally:
        torch.set_num_threads(before)


@pytest.mark.compilers
def test_inductor_s_code_gives_what_the_layers_give(stablelm: Path, compiled_graphs: Any) -> None:
    plain, model = load_by_transformers(stablelm), load_by_transformers(stablelm)
    model.compile_layers()
    assert compiled_graphs() > 0
    for count in (1, 5, 30):
        torch.testing.assert_close(
            outputs(model, count), outputs(plain, count), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("fault", ["raises", "is wrong", "rotates wrongly"])
def test_a_compiler_s_fault_leaves_the_layers_as_they_are(
    fault: str, stablelm: Path, compiled_graphs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    turned: list[Any] = []

    def compiler(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        if fault == "raises":
            raise RuntimeError("no compiler is here")
        if fault == "rotates wrongly":
            for node in graph.graph.nodes:
                # Of queries and keys alone.
                if node.target is operator.neg:
                    node.target = operator.pos
                    turned.append(node)
            graph.recompile()
            return graph
        return lambda *arguments: tuple(
            one * 1.5 if one.is_floating_point() else one for one in graph(*arguments)
        )

    plain, model = load_by_transformers(stablelm), load_by_transformers(stablelm)
    model.compile_layers(compiler)
    assert bool(turned) == (fault == "rotates wrongly")
    assert any("go on uncompiled" in line for line in caplog.messages)
    assert torch.equal(outputs(model, 6), outputs(plain, 6))
