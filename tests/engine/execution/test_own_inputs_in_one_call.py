"""Integers that a request brings for its tokens, in a step that is one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine
from tests.support.classifiers import load_classifier_reference, make_classifier, reference_logits
from tests.support.engines import assert_idle, small_config
from tests.support.probe import Probe

# Compilers take their time on a machine that does other things too.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

COMPILED = {"compile__enforce_eager": False, "compile__startup": "wait"}
PAIRS = [("a small brown engine", "fox " * count) for count in (1, 5, 2, 9, 30, 3)]


async def scores(directory: Path, **changes: Any) -> list[float]:
    config = small_config(directory, **changes)
    async with AsyncEngine.open(config) as engine:
        is_compiled = not config.compile.enforce_eager
        assert (Probe(engine).computer.code.step is not None) == is_compiled
        made = [each.score for each in await engine.score(PAIRS, use_activation=False)]
        # Each beside others has what it has alone, with kinds of its own.
        alone = [(await engine.score([pair], use_activation=False))[0].score for pair in PAIRS]
        labelled = await engine.classify([[5, 6, 7, 8]], use_activation=False)
        assert_idle(engine)
    assert made == (alone if config.model.deterministic else pytest.approx(alone, abs=1e-5))
    return [*made, labelled[0].probs[0]]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_kinds_of_tokens_are_those_of_the_request(
    tmp_path: Path, deterministic: bool
) -> None:
    directory = make_classifier(tmp_path, "bert", labels=1)
    setting = {"model__deterministic": deterministic}
    one_call = await scores(directory, **COMPILED, **setting)
    assert one_call == pytest.approx(await scores(directory, **setting), abs=1e-5)
    # A text that brings no kinds beside pairs that do: zeros.
    want = reference_logits(load_classifier_reference(directory), [5, 6, 7, 8])
    assert one_call[-1] == pytest.approx(float(want[0]), abs=1e-4)
