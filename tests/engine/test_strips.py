"""Weights of bfloat16 models in strips: when they are laid out, and that answers are the same."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.engine import startup
from src.engine.execution import compilation
from src.models import Model, load_model, outline_model
from src.models.loading.options import LoadOptions
from src.ops.build import kernels as build
from src.ops.build.kernels import ensure_built
from src.ops.build.levels import LEVELS
from src.ops.projections.projection import Projection
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import random_prompts, small_config
from tests.support.probe import Probe

# Compilers take their time on a machine that does other things too.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strips")
    return make_checkpoint(path, tokenizer=True, dtype=torch.bfloat16, tie=False, **SIZES)


def dims(model: Model) -> list[int]:
    """Of the projections' weights, the head last: three of those in strips, two of others."""
    names = [name for name, each in model.table.items() if each.kind == "matrix"]
    assert len(names) == 4 * SIZES["num_hidden_layers"]
    weights = [model.weights[name] for name in [*names, "head"]]
    return [w.matrix.values.dim() if isinstance(w, Projection) else 2 for w in weights]


@pytest.mark.parametrize(
    ("status", "is_building", "level", "strips", "multiplies"),
    [
        ("cpp-avx512_bf16", False, "portable", True, True),
        ("cpp-avx2", False, "avx512", True, True),
        ("cpp-avx512", False, "avx512_bf16", False, False),
        ("cpp-avx512_vnni", False, "portable", False, True),
        ("cpp-amx", False, "amx", True, True),
        ("reference", True, "avx512_bf16", True, True),
        ("reference", True, "avx2_vnni", True, True),
        ("reference", True, "avx512", False, False),
        ("reference", True, "portable", False, False),
        ("reference", False, "avx512_bf16", False, False),
    ],
)
def test_the_kernels_that_serve_decide(
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    is_building: bool,
    level: str,
    strips: bool,
    multiplies: bool,
) -> None:
    fastest = next(one for one in LEVELS if one.name == level)
    monkeypatch.setattr(build, "kernel_status", lambda: status)
    monkeypatch.setattr(build, "is_building", lambda: is_building)
    monkeypatch.setattr(build, "fastest_level", lambda _: fastest)
    assert build.takes_strips() is strips
    assert build.multiplies_bytes() is multiplies


def test_what_is_laid_out_and_what_is_not(directory: Path, tmp_path: Path) -> None:
    model = load_model(directory)
    for done, _ in enumerate(model.lay_out(), 1):
        # A matrix at a time, the head last.
        assert sum(dim == 3 for dim in dims(model)) == done
    assert set(dims(model)) == {3}
    assert model.weights["embedding"].dim() == 2
    laid_out = outline_model(directory)
    list(laid_out.lay_out())
    assert {name: tensor.shape for name, tensor in laid_out.parameters().items()} == {
        name: tensor.shape for name, tensor in model.parameters().items()
    }
    tied = load_model(make_checkpoint(tmp_path / "tied", dtype=torch.bfloat16, tie=True, **SIZES))
    list(tied.lay_out())
    assert dims(tied) == [3] * 8 + [2]
    assert tied.weights["head"] is tied.weights["embedding"]
    for other in (
        load_model(directory, LoadOptions(dtype="float32")),
        load_model(directory, LoadOptions(quantization="int8")),
    ):
        before = dims(other)
        list(other.lay_out())
        assert dims(other) == before


@pytest.mark.parametrize("mode", ["wait", "background"])
async def test_answers_are_those_of_the_reference(
    directory: Path, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever this machine's kernels gain, for all of them take strips."""
    ensure_built(wait=True)
    monkeypatch.setattr(startup, "takes_strips", lambda: True)
    monkeypatch.setattr(compilation, "takes_strips", lambda: True)
    config = small_config(directory, compile__enforce_eager=False, compile__startup=mode)
    prompts = random_prompts(5, longest=40, seed=3)
    with caplog.at_level(logging.INFO, "src"):
        async with AsyncEngine.open(config) as engine:
            # In the background, steps go on while weights move.
            meanwhile = asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))
            parts = Probe(engine).parts
            assert parts.compilation is not None
            await asyncio.to_thread(parts.compilation.join)
            assert [len(result.token_ids) for result in await meanwhile] == [12] * 5
            assert engine.stats.compiled
            results = await asyncio.gather(*(engine.generate(p, SCORED) for p in prompts))
            model = Probe(engine).model
            assert set(dims(model)) == {3}
    assert "weights laid out in strips" in caplog.text
    reference = load_reference(directory, torch.float32)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            scores = reference(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        expected = [float(scores[i, token]) for i, token in enumerate(prompt[1:])]
        entries = [entry for entry in result.prompt_logprobs or [] if entry]
        # Of bfloat16, in compiled code, against float32; of rows it is the same.
        assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=0.25)


async def test_a_head_that_only_the_weights_tell_from_the_embedding_stays_in_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code is compiled from the configuration, which says that they are one."""
    ensure_built(wait=True)
    monkeypatch.setattr(startup, "takes_strips", lambda: True)
    monkeypatch.setattr(compilation, "takes_strips", lambda: True)
    path = make_checkpoint(tmp_path, tokenizer=True, dtype=torch.bfloat16, tie=False, **SIZES)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    config = small_config(path, compile__enforce_eager=False, compile__startup="wait")
    async with AsyncEngine.open(config) as engine:
        assert engine.stats.compiled
        result = await engine.generate([5, 17, 3], GREEDY)
        model = Probe(engine).model
        assert model.weights["head"] is not model.weights["embedding"]
        assert dims(model) == [3] * 8 + [2]
    assert len(result.token_ids) == 12


async def test_kernels_that_turn_out_to_gain_nothing_leave_rows(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a level that was foreseen, and did not pass its check."""
    ensure_built(wait=True)
    monkeypatch.setattr(startup, "takes_strips", lambda: True)
    monkeypatch.setattr(compilation, "takes_strips", lambda: False)
    config = small_config(directory, compile__enforce_eager=False, compile__startup="wait")
    async with AsyncEngine.open(config) as engine:
        assert not engine.stats.compiled
        result = await engine.generate([5, 17, 3], GREEDY)
        assert set(dims(Probe(engine).model)) == {2}
    assert len(result.token_ids) == 12
    assert "goes on uncompiled: it is compiled for weights in strips" in caplog.text
