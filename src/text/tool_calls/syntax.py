"""The description of one syntax of calls: how it is read, forced and found in a chat template."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from src.text.source import Steps
from src.text.tool_calls.calls import Calls


class Slot(enum.Enum):
    """A part of a form that differs between calls."""

    NAME = enum.auto()
    """The function's name, as it is."""
    QUOTED_NAME = enum.auto()
    """The function's name, as JSON."""
    ARGUMENTS = enum.auto()
    """The arguments: JSON text, or as the form's `Members` say."""
    NUMBER = enum.auto()
    """A number that the model gives each of its calls."""


class Members(NamedTuple):
    """How arguments are written one by one: a string as it is, anything else as JSON.

    ``before`` stands before the argument's name, ``between`` before its value, ``after`` behind it.
    ``closing`` is the part of ``after`` that ends the value. A string may contain it, but not with
    what may follow it there; where it is a special token, no string can have it.
    """

    before: str
    between: str
    after: str
    closing: str


class Form(NamedTuple):
    """How a grammar writes calls.

    Attributes
    ----------
    call
        The parts of one call, in order.
    begin, end
        The text before the first call and after the last.
    separator
        The text between two calls; ``None``: the answer has a single call.
    members
        How the arguments are written, where they are not one JSON object.
    needs
        The form is used only if this tag is a special token of the tokenizer.
    joins_text
        Whether a grammar can allow free text around the calls.
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
        """The text with which the first call begins."""
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
        The value of the setting ``chat.tool_call_parser``.
    models
        The families that use it, for the documentation.
    example
        A call, for the documentation.
    shown_by
        Texts in a chat template that identify the syntax. One of them is enough; of a tuple, all
        texts must be there.
    read
        Reads what follows an opening tag (`Calls.opened` says which one), or a start.
    openings, closings
        The tags before and after calls. Any opening tag begins a call. Closing tags are optional.
    marks
        Further tags that may be special tokens.
    starts
        Patterns at which a call without an opening tag may begin, anywhere in the answer; see
        `Source.until`.
    siblings
        Further starts, looked for after the text behind an opening tag turned out malformed.
    forms
        How a grammar writes calls, in order of preference. The first that can express all the
        functions of a request is used.
    is_typed
        Whether only the function's schema tells if an argument is a string or JSON.
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
        """The texts that the parser must see even if they are special tokens."""
        return (*self.openings, *self.closings, *self.marks)

    def is_tagged(self, form: Form) -> bool:
        """Whether calls of this form begin with an opening tag."""
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
