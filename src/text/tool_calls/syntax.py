"""What there is to say of a syntax of calls: how it is read, forced, found in a template, shown."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from src.text.source import Steps
from src.text.tool_calls.calls import Calls


class Slot(enum.Enum):
    """What differs between forced calls."""

    NAME = enum.auto()
    """The function's name, as it is."""
    QUOTED_NAME = enum.auto()
    """The function's name, as JSON."""
    ARGUMENTS = enum.auto()
    """The arguments: JSON text, or the form's `Members`."""
    NUMBER = enum.auto()
    """A number with which the model tells its calls apart."""


class Members(NamedTuple):
    """How arguments are written one by one: a string as it is, anything else as JSON.

    ``before`` the name, ``between`` the name and the value, ``after`` the value, where ``closing``
    is the part that ends it: no value has that in it.
    """

    before: str
    between: str
    after: str
    closing: str


class Form(NamedTuple):
    """How calls are written where they are forced.

    Attributes
    ----------
    call
        One call.
    begin, end
        What stands before the first call and after the last.
    separator
        What stands between two calls; ``None``: there is one only.
    members
        How arguments are written that are not JSON as a whole.
    needs
        A tag that must be a special token of the tokenizer.
    joins_text
        Whether calls may stand in an answer that is otherwise any text.
    """

    call: tuple[str | Slot, ...]
    begin: str = ""
    end: str = ""
    separator: str | None = None
    members: Members | None = None
    needs: str = ""
    joins_text: bool = True

    @property
    def beginning(self) -> str:
        """The text that every answer in this form begins with."""
        first = self.call[0]
        return self.begin or (first if isinstance(first, str) else "")


def openai_id() -> str:
    """An id as OpenAI writes them."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, kw_only=True)
class Syntax:
    """One way to write calls into an answer.

    Attributes
    ----------
    name
        As the setting ``chat.tool_call_parser`` spells it.
    models
        Who writes so, for people.
    example
        What a call looks like, for people.
    shown_by
        What in a chat template shows that a model writes so: texts, any of which is enough, or
        tuples of texts that must all be there.
    read
        Reads what stands after an opening tag (`Calls.opened` says which), or from a start on.
    openings, closings
        The tags before a call, any of which begins one, and those after it, each of which may be
        missing.
    marks
        What else of the syntax may be a special token.
    starts
        What a call without an opening tag begins with, at any place of the answer; see
        `Source.until`.
    siblings
        As ``starts``, from there on where something behind an opening tag was no call.
    forms
        How calls are forced, the best first: one that cannot spell a function is passed over.
    is_typed
        Whether what an argument is, a text or JSON, is told by the function's schema alone.
    new_id
        Returns an id that the family's chat templates take.
    """

    name: str
    models: str
    example: str
    shown_by: tuple[str | tuple[str, ...], ...] = ()
    read: Callable[[Calls], Steps[None]]
    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    siblings: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ()
    is_typed: bool = False
    new_id: Callable[[], str] = openai_id

    @property
    def tags(self) -> tuple[str, ...]:
        """Every text that the parser must see though it be a special token."""
        return (*self.openings, *self.closings, *self.marks)

    def is_tagged(self, form: Form) -> bool:
        """Whether a grammar can tell calls of this form from the rest of an answer, by a tag."""
        return form.beginning.startswith(self.openings)


def read_answer(syntax: Syntax, calls: Calls) -> Steps[None]:
    """Read a whole answer: text with calls in it.

    White space before calls that begin an answer, and after calls, is not shown.
    """
    source = calls.source
    starts = syntax.starts
    yield from source.run_space()
    while found := (yield from source.until(syntax.openings, calls.content, starts)):
        calls.opened = found if found in syntax.openings else ""
        is_sound = yield from calls.attempt(syntax.read(calls), syntax.closings)
        if not is_sound and calls.opened:
            starts = (*syntax.starts, *syntax.siblings)
    calls.content(source.release())
