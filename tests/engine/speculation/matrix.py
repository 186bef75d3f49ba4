"""The whole matrix: models, formats, requests, ways and drafters, bit for bit against `off`.

`nox -s speculation` runs it, uncompiled and compiled; the suite has a selection (`test_exactness`,
`test_restricted`, `test_states`, `tests/engine/drafters`). Names select: `-k "gpt_oss and rows-3"`.
`--quarter` runs a quarter of it: every model, every way and every drafter, but few of the products.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from src import AsyncEngine, SamplingParams
from src.core.outputs import GenerationResult
from src.engine.speculation import Widths, verification
from tests.engine.speculation import test_by_transformers, test_exactness, test_restricted
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.crowd import crowd
from tests.engine.speculation.test_exactness import config, speculating, texts
from tests.support.adapters import make_adapter
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.drafts import make_eagle3, make_medusa, make_mtp
from tests.support.engines import assert_idle, random_prompts
from tests.support.families import SHORT_SIGHTED
from tests.support.gguf_files import Type, write_gguf

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

ASKED = test_exactness.ASKED | test_restricted.ASKED
PROMPTS = random_prompts(len(ASKED), longest=24, seed=77)
LONG = random_prompts(4, longest=24, seed=78)


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Subject(NamedTuple):
    """A model, how it is served, and what of it differs.

    Attributes
    ----------
    family, form
        Of `make_checkpoint`, and its changes.
    settings
        Of the engine.
    stored
        The type of a GGUF file's matrices; None: a checkpoint.
    has_states
        Whether it has recurrent states.
    has_adapter
        Whether every second request is of an adapter.
    brings_layer
        Whether its checkpoint brings a layer for further tokens, which computes as the model does.
    """

    family: str
    settings: Mapping[str, Any] = NOTHING
    form: Mapping[str, Any] = NOTHING
    stored: Type | None = None
    has_states: bool = False
    has_adapter: bool = False
    brings_layer: bool = False


_16 = {"model__dtype": "bfloat16"}
_SHORT = {name: SHORT_SIGHTED[name] for name in ("gemma3", "gpt_oss", "mixtral")}
SUBJECTS = {
    "llama": Subject("llama", has_adapter=True),
    "bfloat16": Subject("llama", _16, has_adapter=True),
    "int8": Subject("llama", _16 | {"model__quantization": "int8"}, has_adapter=True),
    "int4": Subject("llama", _16 | {"model__quantization": "int4"}, has_adapter=True),
    "gguf-q8_0": Subject("llama", _16, stored=Type.Q8_0),
    "gguf-q4_1": Subject("llama", {"model__dtype": "float32"}, stored=Type.Q4_1),
    "kv-int8": Subject("llama", {"cache__dtype": "int8"}),
    "kv-fp8": Subject("llama", _16 | {"cache__dtype": "fp8"}),
    "gemma3": Subject("gemma3", form=_SHORT["gemma3"], has_adapter=True),
    "gemma3-kv-int8": Subject("gemma3", {"cache__dtype": "int8"}, _SHORT["gemma3"]),
    "gpt_oss-kv-fp8": Subject("gpt_oss", _16 | {"cache__dtype": "fp8"}, _SHORT["gpt_oss"]),
    "qwen3": Subject("qwen3", has_adapter=True),
    "mixtral": Subject("mixtral", form=_SHORT["mixtral"], has_adapter=True),
    "mixtral-int8": Subject("mixtral", _16 | {"model__quantization": "int8"}),
    "deepseekv3": Subject("deepseekv3", brings_layer=True),
    "deepseekv3-16": Subject("deepseekv3", _16, brings_layer=True),
    "glm4_moe": Subject("glm4_moe", brings_layer=True),
    "gpt_oss": Subject("gpt_oss", form=_SHORT["gpt_oss"]),
    "qwen3next": Subject("qwen3next", has_states=True, brings_layer=True),
    "qwen3next-int8": Subject(
        "qwen3next",
        {"model__quantization": "int8"},
        # Of groups of 32.
        {"shared_expert_intermediate_size": 64, "moe_intermediate_size": 64},
        has_states=True,
        brings_layer=True,
    ),
    "granite_moehybrid": Subject("granite_moehybrid", has_states=True),
    "granite_moehybrid-16": Subject("granite_moehybrid", _16, has_states=True),
}
WAYS: dict[str, dict[str, Any]] = {
    "depth-1": {"scheduler__pipeline_depth": 1, "scheduler__max_num_seqs": 64},
    "depth-2": {"scheduler__max_num_seqs": 64},
    "chunked": {"scheduler__max_num_batched_tokens": 13, "scheduler__max_num_seqs": 12},
    "preempted": {"cache__num_blocks": 40, "model__max_model_len": 100},
    "uncached": {"cache__enable_prefix_caching": False, "scheduler__max_num_seqs": 16},
    "aborted": {"scheduler__max_num_seqs": 24},
    # A step samples as many positions as it may have rows: enough for the widest drafts of all.
    "wide": {
        "speculation__num_speculative_tokens": 64,
        "scheduler__max_num_seqs": 1024,
        "scheduler__max_num_batched_tokens": 1024,
    },
    **{f"rows-{rows}": {"scheduler__max_num_seqs": rows} for rows in range(1, 10)},
}
# Blocks of the pool in which requests are preempted: windows and a full group need more of them.
TIGHT = {"gemma3": 56, "gemma3-kv-int8": 56}
WITH_WINDOWS = ("gemma3", "gpt_oss")
# All of its layers have windows: a row that was admitted never needs more, and nobody is preempted.
NEVER_PREEMPTED = ("mixtral",)
WITH_LAYERS = ("eagle3", "draft", "itself", "mtp")
# With whom each real drafter is tried.
REAL_WAYS = ("depth-1", "depth-2", "chunked", "preempted", "uncached", "rows-3")
REAL = ("suffix", "ngram", "auto", "predicted", "medusa", "eagle3", "draft", "itself", "mtp")


def _goes_with(subject: Subject, source: str) -> bool:
    """A draft model has no recurrent states, and is a checkpoint; few checkpoints bring a layer."""
    if source == "itself":
        return not (subject.has_states or subject.stored is not None)
    return subject.brings_layer or source != "mtp"


PAIRS = [
    (name, source)
    for name, subject in SUBJECTS.items()
    for source in REAL
    if _goes_with(subject, source)
]


# Of a quarter: models that the adversary meets in every way, for adapters, windows and states, and
# those that differ from another one in a format alone, with the drafters that they keep.
_IN_EVERY_WAY = ("llama", "gemma3", "qwen3next")
_TWINS = ("mixtral-int8", "deepseekv3-16", "granite_moehybrid-16", "qwen3next-int8", "kv-fp8")
_OF_TWINS = ("suffix", "auto", "itself", "mtp")


def _is_in_quarter(name: str, source: str, way: str) -> bool:
    """Whether the quarter has a case; ``source`` is empty for the adversary.

    Each other model meets three ways with the adversary, and one way with each drafter, in turns.
    """
    number = list(SUBJECTS).index(name)
    if not source:
        turns = [(3 * number + turn) % len(WAYS) for turn in range(3)]
        return name in _IN_EVERY_WAY or list(WAYS).index(way) in turns
    if name in _TWINS and source not in _OF_TWINS:
        return False
    return REAL_WAYS.index(way) == (number + REAL.index(source)) % len(REAL_WAYS)


# Of transformers' own implementation; each for something that the others lack: a learned position,
# windows and experts, norms with biases, keys of other layers, chunks, latents, counted positions.
ARCHITECTURES = (
    *("gpt2", "gpt_oss", "stablelm", "gemma3n_text", "llama4_text", "deepseek_v3", "bart"),
    *("gpt_bigcode", "qwen2_moe"),
)

ADVERSARY = [(name, way) for name in SUBJECTS for way in WAYS]
DRAFTERS = [(name, source, way) for name, source in PAIRS for way in REAL_WAYS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The cases of both tests: all of them, or a quarter."""
    quarter = metafunc.config.getoption("--quarter")
    if metafunc.function is test_the_adversary_changes_nothing:
        pairs = [(n, w) for n, w in ADVERSARY if not quarter or _is_in_quarter(n, "", w)]
        metafunc.parametrize(("name", "way"), pairs)
    elif metafunc.function is test_no_drafter_changes_anything:
        triples = [each for each in DRAFTERS if not quarter or _is_in_quarter(*each)]
        metafunc.parametrize(("name", "source", "way"), triples)
    elif metafunc.function is test_a_crowd_is_answered_as_each_of_it_alone:
        # In 16 bits the likeliest tokens tie, and lists of them have no order.
        names = [n for n in SUBJECTS if SUBJECTS[n].settings.get("model__dtype") != "bfloat16"]
        metafunc.parametrize("crowded", _IN_EVERY_WAY if quarter else names)
    elif metafunc.function is test_drafts_for_transformers_change_what_rounding_does:
        metafunc.parametrize("name", ARCHITECTURES[:2] if quarter else ARCHITECTURES)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that tries grammars may start as late as it does beside much other work."""
    monkeypatch.setattr("src.engine.grammar.compiler._START_SECONDS", 600.0)


class Made(NamedTuple):
    """A subject on disk, what it says without drafts, and what is asked."""

    path: Path
    settings: dict[str, Any]
    asked: list[tuple[list[int], SamplingParams, str | None]]
    said: list[GenerationResult]


def answer(result: GenerationResult, *, ties: bool) -> Any:
    """As `test_exactness.answer`. With ``ties`` equal log-probabilities have no order.

    In 16 bits the likeliest tokens tie, and which of them a list has depends on how many all rows
    of the step ask for.
    """
    if not ties:
        return test_exactness.answer(result)

    def places(found: Any) -> Any:
        return [
            place and (place.token_id, place.logprob, sorted(value for _, value in place.top))
            for place in found or ()
        ]

    return (
        [
            (each.token_ids, each.text, each.finish_reason, each.stop_reason, places(each.logprobs))
            for each in result.completions
        ],
        places(result.prompt_logprobs),
        result.usage.completion_tokens,
    )


async def ask(
    engine: AsyncEngine,
    asked: Sequence[tuple[list[int], SamplingParams, str | None]],
    predictions: Sequence[list[int]] | None = None,
) -> list[GenerationResult]:
    def options(at: int) -> Any:
        told = {} if predictions is None else {"prediction": predictions[at]}
        return {"lora": asked[at][2], **told}

    return await asyncio.gather(
        *(
            engine.generate(prompt, params, **options(at))
            for at, (prompt, params, _) in enumerate(asked)
        )
    )


async def leave(engine: AsyncEngine, prompt: list[int], after: int) -> None:
    """A request that goes after some deltas."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    async with aclosing(engine.stream(prompt, params)) as deltas:
        async for _ in deltas:
            after -= 1
            if after <= 0:
                return


def make(subject: Subject, directory: Path) -> tuple[Path, dict[str, Any]]:
    """Write a subject's model; returns its path and the settings that it is served with."""
    if subject.brings_layer:
        path = make_mtp(directory, subject.family, copies=True, **subject.form).path
    else:
        path = make_checkpoint(directory / "model", subject.family, tokenizer=True, **subject.form)
    settings = dict(subject.settings)
    if subject.has_adapter:
        adapter = make_adapter(directory / "adapter", load_reference(path), seed=1)
        settings["lora__adapters"] = {"other": str(adapter)}
    if subject.stored is not None:
        stored = subject.stored
        path = write_gguf(directory / "model.gguf", path, subject.family, lambda _: stored)
    return path, settings


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Subject -> what stands on disk, and what it says without drafts; made when first asked."""
    known: dict[str, Made] = {}

    def find(name: str) -> Made:
        if name not in known:
            subject = SUBJECTS[name]
            path, settings = make(subject, tmp_path_factory.mktemp("subject"))
            adapters = ("other", None) if subject.has_adapter else (None,)
            asked = [
                (prompt, params, adapters[at % len(adapters)])
                for at, (prompt, params) in enumerate(zip(PROMPTS, ASKED.values(), strict=True))
            ]

            async def run() -> list[GenerationResult]:
                changes = settings | {"scheduler__max_num_seqs": 64}
                async with AsyncEngine.open(config(path, **changes)) as engine:
                    return await ask(engine, asked)

            known[name] = Made(path, settings, asked, asyncio.run(run()))
        return known[name]

    return find


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random heads and a random draft model, for models of 64 numbers and 320 tokens."""
    paths = {name: tmp_path_factory.mktemp(name) for name in ("medusa", "eagle3", "draft")}
    make_medusa(paths["medusa"])
    make_eagle3(paths["eagle3"], taps=[0, 1, 2])
    make_checkpoint(paths["draft"], num_hidden_layers=1, hidden_size=32, head_dim=8, seed=5)
    return paths


async def compare(
    name: str,
    found: Made,
    changes: dict[str, Any],
    *,
    way: str,
    predictions: Sequence[list[int]] | None = None,
) -> tuple[int, int, int]:
    """Ask twice, so that prompts are cached; returns drafts, right ones, and preemptions."""
    ties = found.settings.get("model__dtype") == "bfloat16"
    settings = found.settings | changes | WAYS[way]
    if way == "preempted":
        # A draft model with windows has groups of layers of its own.
        more = 1.0
        if changes.get("speculation__method") == "draft" and name.startswith(WITH_WINDOWS):
            more = 3.0 if changes["speculation__model"] == str(found.path) else 1.5
        settings["cache__num_blocks"] = round(more * TIGHT.get(name, 40))
    async with AsyncEngine.open(config(found.path, **settings)) as engine:
        for round_ in range(2):
            leaving = [
                asyncio.ensure_future(leave(engine, prompt, after))
                for after, prompt in enumerate(LONG if way == "aborted" else (), 1)
            ]
            results = await ask(engine, found.asked, predictions)
            await asyncio.gather(*leaving)
            for kind, got, wanted in zip(ASKED, results, found.said, strict=True):
                assert answer(got, ties=ties) == answer(wanted, ties=ties), (kind, round_)
        await asyncio.wait_for(engine._loop.wait_idle(), 30)
        assert_idle(engine)
        drafted, accepted = engine.metrics.draft_counts
        return int(drafted), int(accepted), engine.stats.preemptions


async def test_the_adversary_changes_nothing(
    name: str, way: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await asyncio.to_thread(made, name)
    known = texts([(prompt, params) for prompt, params, _ in found.asked], found.said)
    adversary = Adversary(known, seed=len(name) + len(way))
    drafted, accepted, preemptions = await compare(
        name, found, speculating(monkeypatch, adversary), way=way
    )
    assert 0 < accepted < drafted
    assert len(set(adversary.widths)) > 2
    if way == "wide":
        assert max(adversary.widths) > 17
    if way == "preempted":
        assert (preemptions > 0) == (name not in NEVER_PREEMPTED)


async def test_no_drafter_changes_anything(
    name: str,
    source: str,
    way: str,
    made: Callable[[str], Made],
    sources: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await asyncio.to_thread(made, name)
    monkeypatch.setattr(verification, "Widths", partial(Widths, always=True))
    method = {"predicted": "auto", "itself": "draft"}.get(source, source)
    changes: dict[str, Any] = {
        "speculation__method": method,
        "speculation__num_speculative_tokens": 5,
    }
    if source == "auto":
        changes["speculation__shared_history_bytes"] = 1 << 18
    if source in ("medusa", "eagle3", "draft", "itself"):
        changes["speculation__model"] = str(found.path if source == "itself" else sources[source])
    predictions = None
    if source == "predicted":
        # Right at first, and then no longer.
        predictions = [
            [*result.token_ids[:12], 7, 8, *result.token_ids[13:]] for result in found.said
        ]
    drafted, accepted, preemptions = await compare(
        name, found, changes, way=way, predictions=predictions
    )
    assert drafted > 0
    if way == "preempted":
        # Layers that draft see everything, or have blocks of their own.
        if name not in NEVER_PREEMPTED:
            assert preemptions > 0
        elif source not in WITH_LAYERS:
            assert preemptions == 0
        elif source != "itself":
            # Where the draft has windows too, sometimes nobody is preempted.
            assert preemptions > 0
    if source in ("auto", "predicted", "itself", "mtp"):
        assert accepted > 0


async def test_a_crowd_is_answered_as_each_of_it_alone(
    crowded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = SUBJECTS[crowded]
    path, settings = await asyncio.to_thread(make, subject, tmp_path)
    adapters = ("other", None) if subject.has_adapter else (None,)
    for seed in range(3):
        with monkeypatch.context() as patch:
            drafting = partial(speculating, patch)
            blocks = TIGHT.get(crowded, 40)
            drafted, accepted, _ = await crowd(
                path, seed, drafting, blocks=blocks, adapters=adapters, **settings
            )
            assert 0 < accepted < drafted


async def test_drafts_for_transformers_change_what_rounding_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await test_by_transformers.hostile(name, [*test_by_transformers.WAYS], tmp_path, monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_without_deterministic_drafts_differ_as_batches_do(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Answers that another number of rows changes, beside those that drafts change."""
    path = make_checkpoint(tmp_path, tokenizer=True, num_hidden_layers=4)
    params = [
        SamplingParams(temperature=heat, seed=at, max_tokens=32, ignore_eos=True)
        for at, heat in enumerate((0.0, 0.7, 1.0) * 12)
    ]
    asked = list(zip(random_prompts(len(params), longest=40, seed=3), params, strict=True))

    async def run(rows: int, changes: Mapping[str, Any] = NOTHING) -> list[GenerationResult]:
        settings = {
            "model__deterministic": False,
            "model__dtype": dtype,
            "scheduler__max_num_seqs": rows,
            **changes,
        }
        async with AsyncEngine.open(config(path, **settings)) as engine:
            return await test_exactness.ask(engine, asked)

    def different(some: Sequence[GenerationResult], others: Sequence[GenerationResult]) -> float:
        pairs = zip(some, others, strict=True)
        return sum(a.token_ids != b.token_ids for a, b in pairs) / len(asked)

    usual, few = await run(16), await run(3)
    adversary = Adversary(texts(asked, usual), seed=4)
    drafted = await run(16, speculating(monkeypatch, adversary))
    by_rows, by_drafts = different(usual, few), different(usual, drafted)
    record_property("by rows, by drafts", (by_rows, by_drafts))
    print(f"{dtype}: of {len(asked)} answers rows change {by_rows:.3f}, drafts {by_drafts:.3f}")
    # Counts of some ten scatter by three.
    assert by_drafts <= 1.5 * by_rows + 0.08
