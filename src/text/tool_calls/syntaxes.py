"""How families of models write calls."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from src.text.source import SPACE, MismatchError, Steps
from src.text.tool_calls.calls import Calls
from src.text.tool_calls.python_values import NAME_RUN, next_item, read_arguments

_ALPHANUMERIC: Final = string.ascii_letters + string.digits


def _openai_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _mistral_id() -> str:
    """Mistral's chat templates take ids of nine letters and digits and no others."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True)
class Syntax:
    """One way to write calls into an answer.

    Attributes
    ----------
    name
        As the setting ``chat.tool_call_parser`` spells it.
    read
        Reads what stands after the opening tag.
    opening, closing
        The tags around a call, or around several.
    marks
        What else of the syntax may be a special token.
    untagged
        Whether an answer may begin with calls that have no opening tag.
    new_id
        Returns an id that the family's chat templates take.
    """

    name: str
    read: Callable[[Calls], Steps[None]]
    opening: str | None = None
    closing: str | None = None
    marks: tuple[str, ...] = ()
    untagged: bool = False
    new_id: Callable[[], str] = _openai_id

    @property
    def tags(self) -> tuple[str, ...]:
        """Every text that the parser must see though it be a special token."""
        return tuple(tag for tag in (self.opening, self.closing, *self.marks) if tag)


def read_answer(syntax: Syntax, calls: Calls) -> Steps[None]:
    """Read a whole answer: text with calls in it.

    White space before calls that begin an answer, and after calls, is not shown.
    """
    source = calls.source
    yield from source.run(SPACE)
    if syntax.untagged and (yield from source.peek()) in ("{", "[", "`"):
        yield from _attempt(syntax, calls)
    while (yield from source.until(syntax.opening, calls.content)):
        yield from _attempt(syntax, calls)
    calls.content(source.release())


def _attempt(syntax: Syntax, calls: Calls) -> Steps[None]:
    """Read calls, or give back as text what looked like one."""
    source = calls.source
    try:
        yield from syntax.read(calls)
    except MismatchError:
        calls.abandon()
        return
    yield from source.run(SPACE)
    if syntax.closing is not None:
        yield from source.starts_with(syntax.closing)
        yield from source.run(SPACE)
    source.drop()


def _read_one(calls: Calls) -> Steps[None]:
    yield from calls.source.run(SPACE)
    yield from calls.read_object(needs_arguments=False)


def _read_several(calls: Calls) -> Steps[None]:
    """A list of calls, or one call or several, with ``;``, a comma or white space between."""
    source = calls.source
    yield from source.run(SPACE)
    if (yield from source.peek()) == "[":
        yield from _read_list(calls)
        return
    yield from calls.read_object(needs_arguments=True)
    while True:
        yield from source.run(SPACE)
        following = yield from source.peek()
        if following in (";", ","):
            yield from source.take()
            yield from source.run(SPACE)
        elif following != "{":
            return
        yield from calls.read_object(needs_arguments=True)


def _read_list(calls: Calls) -> Steps[None]:
    source = calls.source
    yield from source.expect("[")
    while True:
        yield from source.run(SPACE)
        yield from calls.read_object(needs_arguments=True)
        if not (yield from next_item(source, "]")):
            break
    yield from source.expect("]")


def _read_fenced(calls: Calls) -> Steps[None]:
    """Calls, perhaps in a block of code."""
    source = calls.source
    fenced = yield from source.starts_with("```")
    if fenced:
        yield from source.starts_with("json")
    yield from _read_several(calls)
    if fenced:
        yield from source.run(SPACE)
        yield from source.starts_with("```")


def _read_mistral(calls: Calls) -> Steps[None]:
    """A list of calls, or ``name{...}`` of one call, with marks between in newer tokenizers."""
    source = calls.source
    yield from source.run(SPACE)
    if (yield from source.peek()) == "[":
        yield from _read_list(calls)
        return
    name = yield from source.run(NAME_RUN)
    calls.check_name(name)
    if (yield from source.starts_with("[CALL_ID]")):
        yield from source.run(NAME_RUN)
    yield from source.starts_with("[ARGS]")
    yield from source.run(SPACE)
    calls.complete(name, (yield from calls.read_arguments(name)))


def _read_pythonic(calls: Calls) -> Steps[None]:
    """``[name(argument=value, ...), ...]``."""
    source = calls.source
    yield from source.run(SPACE)
    yield from source.expect("[")
    while True:
        yield from source.run(SPACE)
        name = yield from source.run(NAME_RUN)
        calls.check_name(name)
        calls.complete(name, (yield from read_arguments(source)))
        if not (yield from next_item(source, "]")):
            break
    yield from source.expect("]")


SYNTAXES: Final[Mapping[str, Syntax]] = {
    syntax.name: syntax
    for syntax in (
        Syntax("hermes", _read_one, "<tool_call>", "</tool_call>"),
        Syntax("llama3_json", _read_several, "<|python_tag|>", untagged=True),
        Syntax("pythonic", _read_pythonic, "<|python_start|>", "<|python_end|>", untagged=True),
        Syntax(
            "mistral",
            _read_mistral,
            "[TOOL_CALLS]",
            marks=("[CALL_ID]", "[ARGS]"),
            new_id=_mistral_id,
        ),
        Syntax("json", _read_fenced, "<tool_call>", "</tool_call>", untagged=True),
    )
}
"""By the names that the setting ``chat.tool_call_parser`` takes."""
