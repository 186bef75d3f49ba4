"""Compiling is bounded, and a grammar that goes over the bounds is its own request's affair."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import IO, Any

import pytest

from src.core.config import StructuredOutputSection
from src.core.errors import (
    InvalidRequestError,
    QueueFullError,
    ShuttingDownError,
    UnavailableError,
)
from src.core.settings import CHECKOUT
from src.core.structured_output import StructuredOutput
from src.engine.grammar import compiler as module
from src.engine.grammar.compiler import GrammarCompiler
from src.engine.grammar.grammar_text import grammar_candidate
from src.text import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

BOUNDS = StructuredOutputSection(
    max_bytes=200_000, max_depth=8, max_choices=5, compile_seconds=30.0, cached_grammars=2
)
INTEGER = StructuredOutput.json({"type": "integer"})


def build(**changes: float) -> GrammarCompiler:
    values = {name: getattr(BOUNDS, name) for name in BOUNDS.__struct_fields__}
    tokenizer = Tokenizer.from_directory(CHECKOUT / "configs" / "demo")
    return GrammarCompiler(tokenizer, 2050, [1], StructuredOutputSection(**values | changes))


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = build()
    yield compiler
    compiler.close()


def rules(count: int) -> StructuredOutput:
    """Each derives the next: what reads it recurses."""
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return StructuredOutput.grammar(f'start: r0\n{chain}\nr{count}: "b"')


def slow_schema(more: int = 0) -> StructuredOutput:
    return StructuredOutput.json({"type": "integer", "multipleOf": 99999989 + more})


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (StructuredOutput.json("[" * 9 + "]" * 9), "at most 8 deep"),
        (StructuredOutput.json('{"a"'), "not valid JSON"),
        (StructuredOutput.json('"\\' * 90_000), "not valid JSON"),
        (StructuredOutput.json("5"), "object or a boolean"),
        (StructuredOutput.json(False), "Unsatisfiable"),
        (StructuredOutput.json({"$ref": "#"}), "no text conforms"),
        (StructuredOutput.json({"uniqueItems": True, "type": "array"}), "uniqueItems"),
        (StructuredOutput.json({"$ref": "http://127.0.0.1:1/x.json"}), "does not fetch"),
        (
            StructuredOutput.json({"if": {"pattern": "a"}, "then": {"minLength": 2}}),
            "schema at /if",
        ),
        (StructuredOutput.regex("(" * 300 + ")" * 300), "invalid regex"),
        (StructuredOutput.regex(r"(a)\1"), "backreferences"),
        (StructuredOutput.regex("(?=a)b"), "look-around"),
        (StructuredOutput.regex("a" * 200_001), "at most 200000 bytes"),
        (StructuredOutput.regex("\ud800"), "lone surrogate"),
        (StructuredOutput.regex(""), "must not be empty"),
        (StructuredOutput.regex("[^\\s\\S]"), "no text conforms"),
        (StructuredOutput.choice([]), "at least one"),
        (StructuredOutput.choice(list("abcdef")), "at most 5"),
        (StructuredOutput.choice(["a", ""]), "must not be empty"),
        (StructuredOutput.grammar("start: missing"), "unknown name"),
        (StructuredOutput.grammar("start: " + "(" * 5000 + '"a"' + ")" * 5000), "deeply nested"),
        (StructuredOutput.grammar("root ::= ("), "GBNF"),
        (rules(5000), "deep a stack"),
        (StructuredOutput(kind="regex", value=("a", "b")), "must be one text"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
async def test_what_cannot_be_compiled_is_refused(
    compiler: GrammarCompiler, output: StructuredOutput, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as raised:
        await compiler.compile(output)
    assert raised.value.param == "structured_output"
    assert len(str(raised.value)) < 400
    # Nobody else notices.
    assert await compiler.compile(INTEGER)


def test_as_much_as_is_allowed_is_taken() -> None:
    """Bounds are the most that there may be; one more of each is refused."""

    def nested(depth: int) -> StructuredOutput:
        return StructuredOutput.json('{"not": ' * (depth - 1) + "{}" + "}" * (depth - 1))

    def regex(size: int) -> StructuredOutput:
        return StructuredOutput.regex("a" * size)

    # Brackets within strings are no depth, behind an escaped quote either.
    texts = ["[{" * 9, '"' + "[{" * 9, "\\", "[" * 9]
    bracketed = StructuredOutput.json({"enum": texts, "not": {"const": '\\"[[[['}})
    choices = StructuredOutput.choice(list("abcde"))
    most = BOUNDS.max_bytes
    for output in (nested(8), bracketed, choices, regex(most)):
        assert grammar_candidate(output, BOUNDS).text
    for output, words in (
        (nested(9), "at most 8 deep, got 9"),
        (StructuredOutput.choice(list("abcdef")), "at most 5 texts, got 6"),
        (regex(most + 1), f"at most {most} bytes, got {most + 1}"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            grammar_candidate(output, BOUNDS)


async def test_what_takes_too_long_is_given_up() -> None:
    compiler = build(compile_seconds=3.0)
    await compiler.compile(INTEGER)
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="more than 3 s"):
        await compiler.compile(slow_schema())
    assert time.monotonic() - started < 20
    # It is really at an end: the process was killed, and another takes its place.
    assert await compiler.compile(StructuredOutput.regex("[a-z]+"))
    compiler.close()


async def test_one_that_is_killed_behind_its_answer_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = build()
    await compiler.compile(INTEGER)
    answered = module.read_frame

    def killing(stream: IO[bytes]) -> bytes | None:
        answer = answered(stream)
        (trial,) = compiler._trials
        trial._end()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_frame", killing)
        assert await compiler.compile(StructuredOutput.regex("a+"))
    (killed,) = compiler._trials
    assert await compiler.compile(StructuredOutput.regex("b+"))
    assert killed not in compiler._trials
    compiler.close()


async def test_what_takes_too_much_memory_is_given_up() -> None:
    compiler = build(compile_memory_bytes=64 * 2**20, max_bytes=10**7)
    await compiler.compile(INTEGER)
    many = {f"p{i}": {"type": "string"} for i in range(20_000)}
    with pytest.raises(InvalidRequestError, match="too much memory"):
        await compiler.compile(StructuredOutput.json({"type": "object", "properties": many}))
    assert await compiler.compile(StructuredOutput.regex("[a-z]+"))
    compiler.close()


async def test_one_that_hangs_does_not_hold_up_another() -> None:
    compiler = build(compile_seconds=20.0)
    await asyncio.gather(compiler.compile(INTEGER), compiler.compile(StructuredOutput.regex("a")))
    hangs = asyncio.ensure_future(compiler.compile(slow_schema()))
    await asyncio.sleep(0.05)
    assert await compiler.compile(StructuredOutput.regex("[a-z]+"))
    assert not hangs.done()
    # Closing does not wait for it either.
    compiler.close()
    with pytest.raises(ShuttingDownError):
        await hangs


async def test_whoever_waits_or_comes_as_it_closes_learns_that_it_closes() -> None:
    compiler = build(compile_seconds=20.0)
    await compiler.compile(INTEGER)
    # They hold up both workers, and the third one waits for them.
    outputs = [slow_schema(2 * i) for i in range(3)]
    waiting = [asyncio.ensure_future(compiler.compile(output)) for output in outputs]
    twice = asyncio.ensure_future(compiler.compile(outputs[2]))
    while len(compiler._trials) < 2 or not compiler._idle.empty():
        await asyncio.sleep(0.01)
    await asyncio.to_thread(compiler.close)
    # Of another one, and of one that is known.
    late = [compiler.compile(output) for output in (StructuredOutput.regex("a"), INTEGER)]
    ends = await asyncio.gather(*waiting, twice, *late, return_exceptions=True)
    assert [type(end) for end in ends] == [ShuttingDownError] * 6


async def compiled_in(
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[str, StructuredOutput]],
) -> list[StructuredOutput]:
    """In which order these are compiled where all wait, with the owners that ask for them."""
    go_on, order = threading.Event(), []

    def compile_now(output: StructuredOutput) -> Any:
        if output in held:
            assert go_on.wait(30)
        else:
            order.append(output)
        return original

    held = [StructuredOutput.regex(f"{letter}+") for letter in "xy"]
    original = await compiler.compile(INTEGER)
    monkeypatch.setattr(compiler, "_compile_now", compile_now)
    tasks = [asyncio.create_task(compiler.compile(each, "loud")) for each in held]
    tasks += [asyncio.create_task(compiler.compile(each, owner)) for owner, each in asked]
    await asyncio.sleep(0.05)
    go_on.set()
    await asyncio.gather(*tasks)
    return order


async def test_owners_take_turns(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = [StructuredOutput.regex(f"a{{{count}}}") for count in range(2, 8)]
    mine = StructuredOutput.regex("mine")
    asked = [("loud", each) for each in loud]
    order = await compiled_in(compiler, monkeypatch, [*asked, ("quiet", mine)])
    assert set(order) == {*loud, mine}
    # Two at a time are compiled.
    assert order.index(mine) <= 2


async def test_what_another_owner_waits_for_has_its_turn_too(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = [StructuredOutput.regex(f"a{{{count}}}") for count in range(2, 8)]
    asked = [("loud", each) for each in loud]
    order = await compiled_in(compiler, monkeypatch, [*asked, ("quiet", loud[-1])])
    assert sorted(map(loud.index, order)) == list(range(6))
    assert order.index(loud[-1]) <= 2


async def test_one_owner_leaves_room_to_others(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 8)
    go_on = threading.Event()
    monkeypatch.setattr(compiler, "_compile_now", lambda output: go_on.wait(30))
    outputs = [StructuredOutput.regex(f"a{{{count}}}") for count in range(2, 20)]
    waiting = []

    async def take(owner: str) -> int:
        """As many as this owner may have waiting."""
        for count in range(20):
            task = asyncio.create_task(compiler.compile(outputs.pop(), owner))
            await asyncio.sleep(0.01)
            if task.done():
                with pytest.raises(QueueFullError, match="grammars"):
                    await task
                return count
            waiting.append(task)
        raise AssertionError("all")

    assert await take("loud") == 4
    assert await take("quiet") == 2
    # Nobody is told apart where there are no owners.
    assert await take("") == 2
    go_on.set()
    await asyncio.gather(*waiting)


async def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_START_SECONDS", 0.0)
        with pytest.raises(UnavailableError, match="did not start"):
            await compiler.compile(INTEGER)
    assert not compiler._trials

    def refuse(*arguments: Any, **options: Any) -> None:
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(module.subprocess, "Popen", refuse)
        with pytest.raises(UnavailableError, match="did not start"):
            await compiler.compile(INTEGER)
    assert await compiler.compile(INTEGER)


async def test_the_last_grammars_are_kept_and_asked_for_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[StructuredOutput] = []
    compile_now = GrammarCompiler._compile_now

    def counting(self: GrammarCompiler, output: StructuredOutput) -> object:
        compiled.append(output)
        return compile_now(self, output)

    monkeypatch.setattr(GrammarCompiler, "_compile_now", counting)
    a, b, c = (StructuredOutput.regex(pattern) for pattern in ("a+", "b+", "c+"))
    together = await asyncio.gather(*(compiler.compile(a) for _ in range(5)))
    assert len(set(map(id, together))) == 1
    assert await compiler.compile(b) is not together[0]
    assert await compiler.compile(a) is together[0]
    await compiler.compile(c)  # two are kept, and b was used least recently
    assert await compiler.compile(a) is together[0]
    await compiler.compile(b)
    assert compiled == [a, b, c, b]


async def test_a_grammar_whose_lexer_is_used_up_is_compiled_anew(
    compiler: GrammarCompiler,
) -> None:
    output = StructuredOutput.regex("[a-z]+")
    first = await compiler.compile(output)
    assert first.begin(0) is not None
    first.is_worn = True
    # It has matchers left.
    assert first.begin(0) is None
    assert await compiler.compile(output) is first
    first.is_spent = True
    second = await compiler.compile(output)
    assert second is not first
    assert second.begin(0) is not None
    assert await compiler.compile(output) is second


async def test_who_goes_away_takes_nobody_along(compiler: GrammarCompiler) -> None:
    first = asyncio.ensure_future(compiler.compile(INTEGER))
    second = asyncio.ensure_future(compiler.compile(INTEGER))
    await asyncio.sleep(0)
    first.cancel()
    assert await second
    assert first.cancelled()


async def test_what_nobody_waits_for_any_more_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = build(cached_grammars=3)
    begun: list[StructuredOutput] = []
    may_end = threading.Event()
    compile_now = GrammarCompiler._compile_now

    def waiting(self: GrammarCompiler, output: StructuredOutput) -> object:
        begun.append(output)
        assert may_end.wait(60)
        return compile_now(self, output)

    monkeypatch.setattr(GrammarCompiler, "_compile_now", waiting)
    a, b, c, d = (StructuredOutput.regex(pattern) for pattern in ("a+", "b+", "c+", "d+"))
    busy = [asyncio.ensure_future(compiler.compile(output)) for output in (a, b)]
    gone = [asyncio.ensure_future(compiler.compile(output)) for output in (c, c, d)]
    while len(begun) < 2:
        await asyncio.sleep(0.01)
    for each in (*gone, busy[0]):
        each.cancel()
    await asyncio.wait([*gone, busy[0]])
    # One that another request asks for at that very moment is not the one that was given up.
    again = asyncio.ensure_future(compiler.compile(d))
    await asyncio.sleep(0)
    may_end.set()
    assert await again
    assert await busy[1]
    assert begun == [a, b, d]
    # What a thread had begun with is kept, as if somebody had waited for it.
    assert await compiler.compile(a)
    assert len(begun) == 3
    compiler.close()


async def test_a_crowd_is_told_to_come_back(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 1)
    first = asyncio.ensure_future(compiler.compile(INTEGER))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await compiler.compile(StructuredOutput.regex("a"))
    assert await first


async def test_a_model_without_an_end_cannot_be_constrained() -> None:
    tokenizer = Tokenizer.from_directory(CHECKOUT / "configs" / "demo")
    compiler = GrammarCompiler(tokenizer, 2048, [], BOUNDS)
    with pytest.raises(InvalidRequestError, match="no end token"):
        await compiler.compile(INTEGER)
    compiler.close()
