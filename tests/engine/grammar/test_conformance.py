"""Every output of a constrained request parses and validates, whatever path it takes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from src import LLM, AsyncEngine, FinishReason, GenerationResult, SamplingParams
from src.core.settings import CHECKOUT
from src.core.structured_output import StructuredOutput
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle, small_config
from tests.support.schemas import SCHEMAS

DEMO = CHECKOUT / "configs" / "demo"
CONTEXT = 1024


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real architecture with weights that mean nothing: the worst that can sample."""
    directory = tmp_path_factory.mktemp("structured")
    return make_checkpoint(directory, tokenizer=True, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module", params=["random", "demo"])
def llm(request: pytest.FixtureRequest, random_model: Path) -> Iterator[LLM]:
    checkpoint = random_model if request.param == "random" else DEMO
    with LLM(small_config(checkpoint, cache__block_size=16)) as llm:
        yield llm


def conforms(text: str, schema: dict[str, Any]) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schemas=st.lists(SCHEMAS, min_size=1, max_size=4),
    temperatures=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
    compact=st.booleans(),
)
def test_every_output_validates(
    llm: LLM,
    schemas: list[dict[str, Any]],
    temperatures: list[float],
    seed: int,
    compact: bool,
) -> None:
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=300,
            structured_output=StructuredOutput.json(schema, any_whitespace=not compact),
        )
        for schema, temperature in zip(schemas, temperatures, strict=False)
    ]
    results = llm.generate(["Write:"] * len(params), params)
    for schema, result in zip(schemas, results, strict=True):
        (completion,) = result.completions
        if completion.finish_reason is FinishReason.LENGTH:
            # The one exception; without free white space these schemas have no long instances.
            assert not compact
        else:
            assert completion.finish_reason is FinishReason.STOP
            conforms(completion.text, schema)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "größer", "🙂"]}, "maxItems": 4},
        "size": {"type": "integer", "minimum": 0, "maximum": 500},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "ok"],
    "additionalProperties": False,
}
LARK = 'start: "<" item ("," item){0,4} ">"\nitem: /[a-z]{1,6}/ | "(" item ")"'


def _json(text: str) -> None:
    conforms(text, SCHEMA)


def _matches(pattern: str) -> Any:
    return lambda text: re.fullmatch(pattern, text) or pytest.fail(text)


FORMS: list[tuple[StructuredOutput, Any]] = [
    (StructuredOutput.json(SCHEMA, any_whitespace=False), _json),
    (StructuredOutput.json(SCHEMA), _json),
    (StructuredOutput.regex(r"[A-Z][a-z]{0,7}, \d{1,3}"), _matches(r"[A-Z][a-z]{0,7}, \d{1,3}")),
    (StructuredOutput.choice(["yes", "no", "größer 🙂"]), _matches("yes|no|größer 🙂")),
    (StructuredOutput.grammar(LARK), _matches(r"<.*>")),
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 2.0},
    {"top_k": 3, "repetition_penalty": 1.3},
    {"top_p": 0.5, "frequency_penalty": 1.5, "logit_bias": {5: 20.0, 300: -50.0}},
    {"min_p": 0.2, "bad_words": ("e", "re", "no"), "presence_penalty": 1.0},
    {"min_tokens": 25},
    {"ignore_eos": True},
    {"n": 3, "logprobs": 2},
    {"stop_token_ids": (0,)},
    {"stop": ("e", "1", ", ", "}"), "temperature": 0.7},
    {"allowed_token_ids": tuple(range(259)), "min_tokens": 3},
]

PATHS: dict[str, dict[str, Any]] = {
    "depth 2": {},
    "depth 1": {"scheduler__pipeline_depth": 1},
    "chunked": {"scheduler__max_num_batched_tokens": 8},
    "preempted": {"cache__num_blocks": 100, "model__max_model_len": 340},
    "preempted, depth 1, chunked": {
        "cache__num_blocks": 100,
        "model__max_model_len": 340,
        "scheduler__pipeline_depth": 1,
        "scheduler__max_num_batched_tokens": 8,
    },
    "uncached": {"cache__enable_prefix_caching": False},
}


async def outputs(checkpoint: Path, changes: dict[str, Any]) -> list[GenerationResult]:
    """All forms with all other parameters, among requests that are free.

    They round in one way, since of thousands of draws one may be so close that rounding decides it.
    """
    config = small_config(checkpoint, model__deterministic=True, **changes)
    async with AsyncEngine.open(config) as engine:
        asked = [
            SamplingParams(**{"max_tokens": 300, "seed": 5, **others}, structured_output=form)
            for others in OTHERS
            for form in (*(form for form, _ in FORMS), None)
        ]
        results = await asyncio.gather(
            *(
                engine.generate("Once upon a time" + " a" * (index % 7), params)
                for index, params in enumerate(asked)
                if params.structured_output is not None or params.ignore_eos is False
            )
        )
        if "cache__num_blocks" in changes:
            assert engine.stats.preemptions > 0
        # The step behind the one that ended the last output is still on the device.
        await engine.drain(timeout=20)
        assert_idle(engine)
        return results


@pytest.fixture(scope="module")
def oracle(random_model: Path) -> list[GenerationResult]:
    return asyncio.run(outputs(random_model, PATHS["depth 1"]))


def test_other_parameters_never_lead_out_of_the_form(oracle: list[GenerationResult]) -> None:
    results = iter(oracle)
    for others in OTHERS:
        for form, check in FORMS:
            for completion in next(results).completions:
                if completion.finish_reason is not FinishReason.LENGTH:
                    assert completion.finish_reason is FinishReason.STOP, (others, form)
                    check(completion.text)
                else:
                    assert len(completion.token_ids) == 300
        if not others.get("ignore_eos"):
            next(results)
    assert next(results, None) is None


@pytest.mark.parametrize("path", [path for path in PATHS if path != "depth 1"])
def test_every_path_gives_the_same_tokens(
    path: str, random_model: Path, oracle: list[GenerationResult]
) -> None:
    results = asyncio.run(outputs(random_model, PATHS[path]))
    for one, other in zip(oracle, results, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]
        assert [c.text for c in one.completions] == [c.text for c in other.completions]


@pytest.mark.parametrize("stop", [(), (" ",)])
def test_a_prompt_may_end_within_a_character(llm: LLM, stop: tuple[str, ...]) -> None:
    tokenizer = llm.engine.tokenizer
    prompt = tokenizer.encode("Write: \U0001f642")[:-1]
    assert tokenizer.decode(prompt).endswith("\ufffd")
    form = StructuredOutput.json({"enum": ["a", "b"]}, any_whitespace=False)
    params = SamplingParams(n=2, max_tokens=20, seed=1, stop=stop, structured_output=form)
    (result,) = llm.generate([prompt], [params])
    assert {completion.text for completion in result.completions} <= {'"a"', '"b"'}
