"""Masks of rows: a function of the grammar and the output, for every kind of tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from src import LLM, FinishReason, SamplingParams
from src.core.config import StructuredOutputSection
from src.core.errors import DeadEndError, InvalidRequestError
from src.core.request import Request
from src.core.step_message import DeviceRequest
from src.core.structured_output import StructuredOutput
from src.engine.client import AsyncEngine
from src.engine.grammar import compiled, constraints, grammar_steps, row_grammars
from src.engine.grammar.compiled import CompiledGrammar, GrammarError, TimeBudget
from src.engine.grammar.compiler import Tokenizers, compile_grammar
from src.engine.grammar.grammar_steps import GrammarStepper, GrammarSteps
from src.engine.grammar.grammar_text import grammar_candidate
from src.engine.grammar.masks import RowMasks, packed_masks
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.grammar.vocabulary import Vocabulary
from src.text import Tokenizer
from src.text.detokenizer import detokenize
from src.text.output import OutputText
from tests.support.engines import small_config
from tests.support.tokenizers import BUILDERS

CPU = torch.device("cpu")
TEXT = StructuredOutput.regex("[a-z ]{4,12}: [0-9]{2}")
OBJECT = StructuredOutput.json(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "é": {"enum": ["日本", 1, True]},
        },
        "required": ["name", "é"],
        "additionalProperties": False,
    },
    any_whitespace=False,
)


class Rows:
    """Rows of one tokenizer, with some ids more than that has."""

    def __init__(
        self, tokenizer: Tokenizer, end_ids: Sequence[int], *, on_cpu: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size + 37
        self.end_ids = frozenset(end_ids)
        self._tokenizers = Tokenizers.of(Vocabulary.of(tokenizer, self.vocab_size, end_ids))
        self.rows = RowGrammars(4, self.vocab_size, on_cpu=on_cpu)

    def compile(self, output: StructuredOutput) -> CompiledGrammar:
        candidate = grammar_candidate(output, StructuredOutputSection())
        return compile_grammar(self._tokenizers, candidate.text)

    def install(
        self,
        row: int,
        output: StructuredOutput | None,
        done: list[int] | None = None,
        grammar: CompiledGrammar | None = None,
        **params: Any,
    ) -> None:
        if grammar is None and output is not None:
            grammar = self.compile(output)
        request = Request(
            key=100 + row,
            prompt_token_ids=[1],
            params=SamplingParams(structured_output=output, **params),
            max_tokens=99,
            end_token_ids=self.end_ids | set(params.get("stop_token_ids", ())),
            grammar=grammar,
        )
        if grammar is not None:
            self.rows.hold(request.key, grammar)
        self.rows.install(row, DeviceRequest.of(request), done or [])
        self.rows.begin()

    def masks(self, rows: Sequence[int]) -> RowMasks:
        awaited = self.rows.masks(rows, [0] * len(rows))
        assert awaited is not None
        return awaited.result()

    def allowed(self, row: int) -> list[int]:
        masks = self.masks([row])
        assert not masks.failures
        return (masks.to(CPU, self.vocab_size)[0] == 0).nonzero().flatten().tolist()


def tokenizer_of(name: str, *, on_cpu: bool = True) -> Rows:
    tokenizer = Tokenizer(BUILDERS[name](), special_tokens={"eos_token": "</s>"})
    assert tokenizer.eos_token_id is not None
    return Rows(tokenizer, [tokenizer.eos_token_id], on_cpu=on_cpu)


@pytest.fixture(params=["byte_level", "byte_fallback", "byte_fallback_no_strip", "python"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    if request.param == "python":
        # A wheel without the C interface.
        for module in (constraints, grammar_steps):
            monkeypatch.setattr(module, "c_interface", lambda: None)
        rows = tokenizer_of("byte_level")
    else:
        rows = tokenizer_of(request.param)
    yield rows
    rows.rows.close()


def walk(rows: Rows, output: StructuredOutput, seed: int) -> list[int]:
    """Any token that is allowed, to the end; the row is rebuilt at every other step."""
    source = random.Random(seed)
    done: list[int] = []
    rows.install(0, output)
    while True:
        allowed = rows.allowed(0)
        rows.install(1, output, done)
        assert rows.allowed(1) == allowed
        token_id = source.choice(allowed)
        if token_id in rows.end_ids:
            return done
        done.append(token_id)
        rows.rows.follow([0], partial(list, [token_id]))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_allowed_leads_to_what_conforms(rows: Rows, seed: int) -> None:
    prompt = rows.tokenizer.encode("fox")
    text = detokenize(rows.tokenizer, walk(rows, TEXT, seed), prompt)
    assert re.fullmatch("[a-z ]{4,12}: [0-9]{2}", text)
    value = json.loads(detokenize(rows.tokenizer, walk(rows, OBJECT, seed), prompt))
    assert set(value) == {"name", "é"}
    assert value["é"] in ["日本", 1, True]


def test_a_vocabulary_that_cannot_spell_it_is_a_refusal() -> None:
    rows = tokenizer_of("unigram")
    with pytest.raises(GrammarError, match="can spell"):
        rows.compile(StructuredOutput.choice(["ꙮ"]))


def test_masks_are_of_their_entries_and_free_rows_are_free() -> None:
    rows = tokenizer_of("byte_level")
    rows.install(2, StructuredOutput.choice(["yes", "no"]))
    assert rows.rows.masks([0, 1, 3], [0, 0, 0]) is None
    masks = rows.masks([3, 2])
    mask = masks.to(CPU, rows.vocab_size)
    assert mask.shape == (2, rows.vocab_size)
    assert set(mask.unique().tolist()) == {0.0, -float("inf")}
    assert not mask[0].any()
    texts = {rows.tokenizer.token_text(i) for i in (mask[1] == 0).nonzero().flatten().tolist()}
    assert {"y", "n"} <= texts <= {"y", "ye", "yes", "n", "no"}
    rows.install(2, None)
    assert rows.rows.masks([2], [0]) is None
    rows.install(2, StructuredOutput.choice(["yes", "no"]))
    assert rows.rows.num_held == 1
    rows.rows.forget(102)
    assert rows.rows.masks([2], [0]) is None
    assert rows.rows.num_held == 0
    rows.rows.close()


def test_end_tokens_are_where_the_text_may_end() -> None:
    rows = tokenizer_of("byte_level")
    end, other = rows.tokenizer.eos_token_id, rows.tokenizer.token_to_id("<|end|>")
    assert end is not None
    assert other is not None
    once = StructuredOutput.regex("a{1,2}")
    a = rows.tokenizer.encode("a", add_special_tokens=False)
    rows.install(0, once, stop_token_ids=(other,))
    assert not {end, other} & set(rows.allowed(0))
    rows.install(0, once, a, stop_token_ids=(other,))
    assert set(rows.allowed(0)) == {*a, end, other}
    rows.install(0, once, a, ignore_eos=True)
    assert rows.allowed(0) == a
    rows.install(0, once, a * 2, ignore_eos=True)
    assert rows.allowed(0) == [end]
    rows.install(0, once, a, allowed_token_ids=(*a, 5))
    assert rows.allowed(0) == a
    rows.install(0, once, a * 2, allowed_token_ids=(*a, 5))
    assert rows.allowed(0) == [end]
    rows.rows.close()


@pytest.mark.parametrize("rows", ["byte_level", "python"], indirect=True)
def test_a_dead_end_fails_its_row_alone(rows: Rows) -> None:
    b = rows.tokenizer.encode("b", add_special_tokens=False)
    rows.install(0, StructuredOutput.regex("a+"), allowed_token_ids=tuple(b))
    rows.install(1, StructuredOutput.regex("b+"), allowed_token_ids=tuple(b))
    masks = rows.masks([0, 1])
    assert masks.failures == [(100, "no token continues what the grammar asks for", True)]
    assert masks.rows == [-1, 1]
    assert rows.allowed(1) == b
    rows.rows.close()


@pytest.mark.parametrize("rows", ["byte_level", "python"], indirect=True)
def test_a_token_that_was_not_allowed_fails_its_row(rows: Rows) -> None:
    rows.install(0, StructuredOutput.regex("a+"))
    rows.install(1, StructuredOutput.regex("a+"))
    a, b = (rows.tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab")
    rows.rows.follow([0, 1], lambda: [b, a])
    ((key, _, is_own),) = rows.masks([0, 1]).failures
    assert (key, is_own) == (100, False)
    rows.rows.close()


def test_a_resumed_output_that_was_not_allowed_fails_its_row() -> None:
    """It is not taken up where the grammar could follow it last."""
    rows = tokenizer_of("byte_level")
    a, b = (rows.tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab")
    rows.install(0, StructuredOutput.regex("a+"), [a, b, a])
    rows.install(1, StructuredOutput.regex("a+"), [a, a, a])
    ((key, reason, is_own),) = rows.masks([0, 1]).failures
    assert (key, is_own) == (100, False)
    assert "dead end" in reason
    assert a in rows.allowed(1)
    rows.rows.close()


def test_a_row_for_which_no_token_could_be_sampled_fails_alone() -> None:
    rows = tokenizer_of("byte_level")
    for row in range(3):
        rows.install(row, StructuredOutput.regex("a+"))
    a = rows.tokenizer.encode("a", add_special_tokens=False)[0]
    rows.rows.follow([0, 1], lambda: [-1, a])
    assert rows.masks([0, 1, 2]).failures == [(100, "no token could be sampled", True)]
    assert a in rows.allowed(1)
    assert a in rows.allowed(2)
    rows.rows.close()


def test_tokens_that_cannot_be_fail_the_rows_of_the_step() -> None:
    rows = tokenizer_of("byte_level")
    for row in range(3):
        rows.install(row, StructuredOutput.regex("a+"))
    rows.rows.follow([0, 1], lambda: [5])
    expected = [(key, "the grammar could not be followed", False) for key in (100, 101)]
    assert rows.masks([0, 1, 2]).failures == expected
    assert rows.allowed(2)
    rows.rows.close()


# Ambiguous: the parser's work grows with the text.
AMBIGUOUS = [
    StructuredOutput.grammar("start: a\na: a a | /[a-z ]/ | /[a-z]+/"),
    StructuredOutput.grammar(
        "\n".join(
            [
                "start: " + " | ".join(f"s{i}" for i in range(8)),
                *(f"s{i}: s{i} s{i} | s{i} | /[a-z ]/" for i in range(8)),
            ]
        )
    ),
]


def nearly_spent(grammar: CompiledGrammar) -> None:
    """Others have followed it: what they left of its budget lasts for seconds.

    The budget's clock stands: what is forgiven depends on nothing that runs beside the test.
    """
    grammar.budget = TimeBudget(lambda: 0.0)
    for _ in range(9):
        assert grammar.budget.allows(0.2)


def follow_words(rows: Rows, output: StructuredOutput) -> tuple[str, float]:
    """Why rows 0 and 1 fail within a long text and ten seconds, and how long a step took at most.

    Seconds are of the grammar thread's own time: a machine that is busy with other things makes
    them no more.
    """

    def spent() -> float:
        return rows.rows._thread.submit(time.thread_time).result()

    words = "the quick brown fox jumps over the lazy dog " * 60
    grammar = rows.compile(output)
    nearly_spent(grammar)
    for row in (0, 1):
        rows.install(row, output, grammar=grammar)
    longest, last = 0.0, spent()
    for token_id in rows.tokenizer.encode(words, add_special_tokens=False):
        rows.rows.follow([0, 1], partial(list, [token_id] * 2))
        failures = {key: reason for key, reason, _ in rows.masks([0, 1]).failures}
        now = spent()
        longest, last = max(longest, now - last), now
        if failures.keys() == {100, 101}:
            return failures[100], longest
        assert now < 10
    raise AssertionError("they did not fail")


@pytest.mark.parametrize("output", AMBIGUOUS)
def test_an_ambiguous_grammar_comes_to_an_end(output: StructuredOutput) -> None:
    # Not on the CPU, so that the thread gives way to nobody: it would wait for who is busy.
    rows = tokenizer_of("byte_level", on_cpu=False)
    reason, longest = follow_words(rows, output)
    assert "Too many items" in reason or "too long" in reason
    assert longest < 1.0
    rows.rows.close()


def test_a_row_over_its_budget_of_time_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The items' bound is out of the way: time alone ends it."""
    for module in (compiled, constraints):
        monkeypatch.setattr(module, "STEP_MAX_ITEMS", 50_000)
    rows = tokenizer_of("byte_level", on_cpu=False)
    rows.install(2, StructuredOutput.regex("a+"))
    reason, _ = follow_words(rows, AMBIGUOUS[0])
    assert "takes too long" in reason
    assert set(rows.tokenizer.encode("a", add_special_tokens=False)) <= set(rows.allowed(2))
    rows.rows.close()


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", ["integer", ["string", "integer", "null"]])
def test_a_large_schema_is_followed(kind: Any, *, closed: bool) -> None:
    """Three hundred properties, any of which may be left out."""
    rows = tokenizer_of("byte_level")
    names = [f"property_{i}" for i in range(300)]
    schema = {"type": "object", "properties": {name: {"type": kind} for name in names}}
    output = StructuredOutput.json(schema | ({"additionalProperties": False} if closed else {}))
    rows.install(0, output)
    text = json.dumps({name: 7 * i for i, name in enumerate(names)})
    for token_id in rows.tokenizer.encode(text, add_special_tokens=False):
        rows.rows.follow([0], partial(list, [token_id]))
    assert rows.end_ids <= set(rows.allowed(0))
    rows.rows.close()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows whose matchers are advanced from now on, one entry for each time."""
    computed: list[int] = []
    make = GrammarStepper.make

    def counting(self: GrammarStepper, parts: Sequence[GrammarSteps]) -> Any:
        computed.extend(row for part in parts for row in part.rows)
        return make(self, parts)

    monkeypatch.setattr(GrammarStepper, "make", counting)
    return computed


def test_an_ended_request_of_a_batch_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rows of the batch stay the same."""
    rows = tokenizer_of("byte_level")
    (a,) = rows.tokenizer.encode("a", add_special_tokens=False)
    for row in range(2):
        rows.install(row, StructuredOutput.regex("a{9}"))
    rows.rows.follow([0, 1], partial(list, [a, a]))
    assert rows.allowed(0) == rows.allowed(1) == [a]
    computed = counted(monkeypatch)
    rows.rows.abandon(100)
    rows.rows.follow([0, 1], partial(list, [a, a]))
    assert rows.allowed(1) == [a]
    assert computed == [1]
    # Both had one token by then, and the one that goes on has them all.
    assert [rows.rows._followers[row].token_ids for row in range(2)] == [[a], [a]]
    rows.rows.close()


def test_keys_that_are_forgotten_are_forgotten_without_any_row() -> None:
    rows = tokenizer_of("byte_level")
    rows.rows.abandon(7)
    rows.rows.forget(7)
    rows.rows.begin()
    assert not rows.rows._ended
    rows.rows.close()


def test_those_behind_a_matcher_that_took_long_are_advanced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch stops behind a slow matcher, so that a request which ended meanwhile is left out."""
    for module in (constraints, grammar_steps):
        monkeypatch.setattr(module, "c_interface", lambda: None)
    monkeypatch.setattr(grammar_steps, "ORDINARY_CALL", -1.0)
    rows = tokenizer_of("byte_level")
    (a,) = rows.tokenizer.encode("a", add_special_tokens=False)
    grammar = rows.compile(StructuredOutput.regex("a{3}"))
    for row in range(3):
        rows.install(row, None, grammar=grammar)
    rows.masks([0, 1, 2])
    computed = counted(monkeypatch)
    for _ in range(3):
        assert [rows.allowed(row) for row in range(3)] == [[a]] * 3
        rows.rows.follow([0, 1, 2], partial(list, [a] * 3))
    assert all(rows.end_ids <= set(rows.allowed(row)) for row in range(3))
    assert computed == [0, 1, 2, 1, 2, 2] * 3
    rows.rows.close()


def test_what_is_queued_for_an_ended_request_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tokenizer_of("byte_level")
    (a,) = rows.tokenizer.encode("a", add_special_tokens=False)
    for row in range(3):
        rows.install(row, StructuredOutput.regex("a{9}"))
    rows.masks([0])
    computed = counted(monkeypatch)
    queued = threading.Event()
    rows.rows.follow([0, 1], lambda: [a, a] if queued.wait(10) else [])
    rows.rows.follow([0, 1], partial(list, [a, a]))
    rows.install(2, StructuredOutput.regex("b"), [a] * 5)
    awaited = rows.rows.masks([0, 1, 2], [0, 0, 0])
    rows.rows.abandon(100)
    rows.rows.abandon(102)
    queued.set()
    assert awaited is not None
    masks = awaited.result()
    assert computed == [1, 1]
    # They may sample anything, so that the sampler has something to choose from.
    assert not masks.failures
    assert (packed_masks(masks.table.numpy(), masks.rows)[[0, 2]] == -1).all()
    assert rows.allowed(1) == [a]
    for key in (100, 101, 102):
        rows.rows.forget(key)
    rows.rows.begin()
    rows.rows.close()
    assert not rows.rows._ended
    assert not rows.rows._followers


def test_one_that_cannot_arrive_leaves_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tokenizer_of("byte_level")
    begin = RowGrammars._arrive

    def failing(self: RowGrammars, arrival: Any) -> None:
        if arrival.row == 0:
            raise RuntimeError("a panic")
        begin(self, arrival)

    monkeypatch.setattr(RowGrammars, "_arrive", failing)
    with monkeypatch.context() as together:
        together.setattr(rows.rows, "begin", lambda: None)
        rows.install(0, StructuredOutput.regex("a+"))
        rows.install(1, StructuredOutput.regex("b"))
    rows.rows.begin()
    assert rows.masks([0, 1]).failures == [(100, "the grammar could not be begun", False)]
    assert rows.tokenizer.token_text(rows.allowed(1)[0]) == "b"
    rows.rows.close()


def test_a_step_that_failed_leaves_the_other_rows_alone() -> None:
    rows = tokenizer_of("byte_level")
    rows.install(0, StructuredOutput.regex("a+"))

    def read() -> list[int]:
        raise RuntimeError("the device failed")

    rows.rows.follow([0], read)
    rows.install(1, StructuredOutput.regex("b"))
    assert rows.tokenizer.token_text(rows.allowed(1)[0]) == "b"
    rows.rows.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a niceness of threads is Linux's")
def test_masks_are_computed_by_the_cpus_that_a_forward_pass_leaves() -> None:
    def niceness() -> dict[int, int]:
        found = {}
        for number in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):
                found[number] = os.getpriority(os.PRIO_PROCESS, number)
        return found

    rows = tokenizer_of("byte_level")
    rows.compile(StructuredOutput.regex("a+"))
    before = niceness()
    for row in range(3):
        rows.install(row, StructuredOutput.regex("a+"))
    rows.masks([0, 1, 2])
    after = niceness()
    expected = min(before[threading.get_native_id()] + 10, 19)
    (grammar_thread,) = rows.rows._thread._threads
    assert after[grammar_thread.native_id] == expected
    assert all(after[number] == nice for number, nice in before.items() if number in after)
    rows.rows.close()


def test_where_niceness_is_forbidden_grammars_are_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(os, "setpriority", forbidden)
    rows = tokenizer_of("byte_level")
    rows.install(0, TEXT)
    assert rows.allowed(0)
    rows.rows.close()


@pytest.mark.parametrize("output", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_its_own_request(
    output: StructuredOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain stream beside it goes on."""
    # It would wait for whoever is busy, and the stream for it.
    monkeypatch.setattr(row_grammars, "_give_way", lambda: None)
    path = Path(__file__).parents[3] / "configs" / "demo"
    plain = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    # Not every text takes long to follow; these do.
    hostile = SamplingParams(max_tokens=900, ignore_eos=True, structured_output=output, n=4, seed=8)

    async def attack(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequestError, match=r"Too many items|too long") as raised:
            await engine.generate("a", hostile)
        assert raised.value.param == "structured_output"

    async def beside() -> tuple[float, int]:
        async with AsyncEngine.open(small_config(path, cache__block_size=16)) as engine:
            attacking = asyncio.ensure_future(attack(engine))
            longest, last, num_tokens = 0.0, time.monotonic(), 0
            async for delta in engine.stream("b", plain):
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                num_tokens += len(delta.token_ids)
            await attacking
            return longest, num_tokens

    longest, num_tokens = asyncio.run(beside())
    assert num_tokens == 200
    assert longest < 3.0


def test_a_dead_end_is_the_error_of_one_request_in_the_engine(demo: LLM) -> None:
    digits = tuple(demo.engine.tokenizer.encode("1", add_special_tokens=False))
    stuck = SamplingParams(
        max_tokens=20, structured_output=StructuredOutput.regex("[a-z]+"), allowed_token_ids=digits
    )
    fine = SamplingParams(
        temperature=0, max_tokens=20, structured_output=StructuredOutput.choice(["yes", "no"])
    )
    with pytest.raises(InvalidRequestError, match="no token continues") as raised:
        demo.generate(["a", "b"], [stuck, stuck])
    assert raised.value.param == "structured_output"
    (result,) = demo.generate(["b"], fine)
    assert result.text in ("yes", "no")
    assert result.completions[0].finish_reason is FinishReason.STOP


def test_a_dead_end_of_the_grammar_itself_is_no_fault_of_the_request(demo: LLM) -> None:
    # Behind "ab" comes a rule that derives nothing.
    lark = 'start: A dead | C\nA: /ab/\nC: /xyz/\ndead: dead "y"'
    bias = dict.fromkeys(demo.engine.tokenizer.encode("ab", add_special_tokens=False), 100.0)
    stuck = SamplingParams(
        temperature=0,
        max_tokens=20,
        structured_output=StructuredOutput.grammar(lark),
        logit_bias=bias,
    )
    with pytest.raises(DeadEndError, match="a dead end of the grammar"):
        demo.generate("a", stuck)
    bias = dict.fromkeys(demo.engine.tokenizer.encode("x", add_special_tokens=False), 100.0)
    (result,) = demo.generate("a", msgspec.structs.replace(stuck, logit_bias=bias))
    assert result.text == "xyz"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_stop_string_counts_where_what_it_leaves_is_complete(name: str) -> None:
    rows = tokenizer_of(name)
    grammar = rows.compile(StructuredOutput.regex("x( [a-z]+)+;?"))

    def text(given: str, stop: str, *, include: bool) -> tuple[str, str | None]:
        output = OutputText(
            rows.tokenizer,
            rows.tokenizer.encode("fox"),
            stop=[stop],
            include_stop=include,
            judge=grammar.judge(),
        )
        # What stands before it keeps tokenizers from putting a space in front.
        ids = rows.tokenizer.encode("|" + given, add_special_tokens=False)
        pieces = [output.push([token_id]).text for token_id in _behind(rows, ids, given)]
        return "".join(pieces) + output.finish(), output.stop

    # After a word, not within the beginning, nor where a space is left over.
    assert text("x ab end", " end", include=False) == ("x ab", " end")
    assert text("x ab end", "end", include=False) == ("x ab end", None)
    assert text("x ab end", "end", include=True) == ("x ab end", "end")
    assert text("x ab end", "x", include=False) == ("x ab end", None)
    assert text("x ab;", " ", include=False) == ("x ab;", None)
    assert text("x a b c", " ", include=False) == ("x a", " ")
    rows.rows.close()


def _behind(rows: Rows, ids: list[int], text: str) -> list[int]:
    """The last of the tokens, those that spell the text."""
    for start in range(len(ids)):
        if b"".join(map(rows.tokenizer.token_bytes, ids[start:])) == text.encode():
            return ids[start:]
    raise AssertionError(text)


def test_an_ordinary_token_cannot_stop_a_constrained_output(demo: LLM) -> None:
    params = SamplingParams(
        structured_output=StructuredOutput.choice(["yes"]), stop_token_ids=(300,)
    )
    with pytest.raises(InvalidRequestError, match="only special tokens"):
        demo.generate("a", params)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    path = Path(__file__).parents[3] / "configs" / "demo"
    with LLM(small_config(path, cache__block_size=16)) as llm:
        yield llm
