"""Which engines round the inputs of their projections, and that compiled code serves them too."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.core.config import Config
from src.core.errors import ConfigError
from src.core.start_timeline import StartTimeline
from src.engine import startup
from src.models import Implementation
from src.models.loading.options import LoadOptions
from src.ops.build.kernels import ensure_built, kernel_library, kernel_status
from src.ops.projections.linear import linear
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import small_config

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rounded"), tokenizer=True, **SIZES)


def test_rounded_inputs_need_quantized_weights(directory: Path) -> None:
    config = small_config(directory, model__quantize_activations=True)
    with pytest.raises(ConfigError, match=r"quantize_activations = true goes with"):
        startup.build_engine(config, lambda *_: None, StartTimeline())


@pytest.mark.parametrize(
    ("multiplies_bytes", "wish", "expected"),
    [
        (True, None, None),
        (False, None, False),
        (True, False, False),
        (False, False, False),
        (True, True, True),
        (False, True, True),
    ],
)
def test_the_kernels_that_serve_decide_unless_somebody_has(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    multiplies_bytes: bool,
    wish: bool | None,
    expected: bool | None,
) -> None:
    asked: list[bool | None] = []

    def load(_: object, options: LoadOptions, __: object) -> None:
        asked.append(options.rounds_inputs)
        raise LookupError

    monkeypatch.setattr(startup, "multiplies_bytes", lambda: multiplies_bytes)
    implementation = Implementation("native", is_program=True, load=load)
    monkeypatch.setattr(startup, "choose_implementation", lambda *_: implementation)
    config = small_config(directory, model__quantization="int8", model__quantize_activations=wish)
    with pytest.raises(LookupError):
        startup.build_engine(config, lambda *_: None, StartTimeline())
    assert asked == [expected]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_engine_keeps_one_way(
    directory: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """As long as it is open: kernels may otherwise multiply many tokens in another way than few."""
    ensure_built(wait=True)
    library = kernel_library()
    assert library is not None
    told: list[bool] = []
    monkeypatch.setattr(library.ways, "_keep", told.append)

    def load(*_: object, **__: object) -> None:
        # Before anything is computed.
        assert told == [True] * deterministic
        raise LookupError

    implementation = Implementation("native", is_program=True, load=load)
    monkeypatch.setattr(startup, "choose_implementation", lambda *_: implementation)
    config = small_config(directory, model__quantization="int4", model__deterministic=deterministic)
    with pytest.raises(LookupError):
        startup.build_engine(config, lambda *_: None, StartTimeline())
    assert told == [True, False] * deterministic


@pytest.mark.anyio
async def test_one_way_is_kept_until_the_last_deterministic_engine_has_ended(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_built(wait=True)
    library = kernel_library()
    assert library is not None
    told: list[bool] = []
    keep = library.ways._keep
    monkeypatch.setattr(library.ways, "_keep", lambda kept: (told.append(kept), keep(kept)))
    tokens, weight = torch.randn(64, 387), torch.randn(64, 387)

    def same_bits() -> bool:
        few = [linear(token, weight) for token in tokens.split(1)]
        return torch.equal(torch.cat(few), linear(tokens, weight))

    # The slowest level sums any number of tokens in one way.
    before = kernel_status() == "cpp-portable"
    assert same_bits() is before

    def deterministic(wanted: bool) -> Config:
        return small_config(directory, model__deterministic=wanted)

    async with AsyncEngine.open(deterministic(True)):
        async with AsyncEngine.open(deterministic(True)), AsyncEngine.open(deterministic(False)):
            assert same_bits()
            assert told == [True, True]
        assert same_bits()
        assert told == [True, True, False]
    assert told == [True, True, False, False]
    assert same_bits() is before


@pytest.mark.anyio
@pytest.mark.parametrize("method", [pytest.param("int8", marks=pytest.mark.compilers), "int4"])
async def test_compiled_code_rounds_as_eager_code_does(
    directory: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    settings: dict[str, Any] = {"model__quantization": method, "model__quantize_activations": True}
    for eager in (True, False):
        config = small_config(
            directory, compile__enforce_eager=eager, compile__startup="wait", **settings
        )
        with caplog.at_level(logging.INFO, "src"):
            async with AsyncEngine.open(config) as engine:
                answers.append(await engine.generate([5, 17, 3, 250, 99], GREEDY))
                assert engine.stats.compiled is not eager
    assert f"weights rounded to {method}, inputs to 8 bits in 9 of 9 projections" in caplog.text
    first, second = answers
    assert first.token_ids == second.token_ids


@pytest.mark.anyio
@pytest.mark.parametrize(("architecture", "warns"), [("mixtral", True), ("llama", False)])
async def test_a_start_says_that_experts_are_not_rounded(
    tmp_path: Path, architecture: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_checkpoint(tmp_path, architecture, tokenizer=True)
    config = small_config(checkpoint, compile__enforce_eager=True, model__quantization="int8")
    async with AsyncEngine.open(config) as engine:
        await engine.generate([5, 17, 3], GREEDY)
    assert ("weights of experts are not rounded" in caplog.text) is warns
