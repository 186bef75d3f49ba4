"""The calls of one answer on their way to the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from src.text.answer import AnswerEvent, ContentDelta, ToolCallArguments, ToolCallBegin
from src.text.source import MismatchError, Source, Steps
from src.text.tool_calls.json_values import is_object, read_text, read_value
from src.text.tool_calls.typed_values import Kinds

T = TypeVar("T")

MAX_CALLS: Final = 128
"""Calls in an answer; what would be one more is text."""

_ARGUMENTS: Final = ("arguments", "parameters")
_IGNORED: Final = ("type", "id")


class Calls:
    """Turns what a syntax reads into events.

    Parameters
    ----------
    source
        The answer's text.
    functions
        The functions that may be called, and the types of their arguments for syntaxes that need
        them. A call of another function is text.
    new_id
        Returns an id for a call.
    parallel
        Whether calls after the first are shown.
    eager
        Show arguments as they come, where the name stands before them. Without it a call is shown
        when its arguments are whole, so that what turns out to be malformed can still become text.
    certain
        Whether a grammar guarantees that an opening tag begins a call. A call that is cut short is
        then dropped instead of becoming text.
    alone
        Whether a grammar allows nothing but calls. No text is shown then.
    """

    def __init__(
        self,
        source: Source,
        functions: Mapping[str, Mapping[str, Kinds]],
        new_id: Callable[[], str],
        *,
        parallel: bool = True,
        eager: bool = False,
        certain: bool = False,
        alone: bool = False,
    ) -> None:
        self.source = source
        self.functions = functions
        self.opened = ""
        """The opening tag of what is being read; empty if it began without one."""
        self._new_id = new_id
        self._parallel = parallel
        self.certain = certain
        self._eager = eager
        self._alone = alone
        self._count = 0
        self._ids: set[str] = set()
        # The call that is being read: whether it has been shown, and what is kept until then.
        self._shown = False
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: list[str] = []
        self._has_arguments = False
        # Whether what is being read has turned out not to be a call, before its end is reached.
        self._rejected = False
        self._spell: Callable[[str], str] | None = None
        self._events: list[AnswerEvent] = []

    def take_events(self) -> list[AnswerEvent]:
        """What has become certain since the last time."""
        self._flush()
        if self._rejected:
            self.content(self.source.release())
        events, self._events = self._events, []
        return events

    def attempt(self, reader: Steps[None], closings: Sequence[str]) -> Steps[bool]:
        """Read calls, or show what is not one as text; return False if it was malformed."""
        source = self.source
        before = self._count
        try:
            yield from reader
        except MismatchError:
            if source.is_cut_short and (self.certain or self._shown):
                # The rest belongs to the call that was cut short.
                source.drop()
                source.remainder()
            elif not source.holds:
                yield from source.take()
            self._abandon()
            return False
        yield from source.run_space()
        for closing in closings:
            yield from source.starts_with(closing)
            yield from source.run_space()
        if self._count > before:
            source.drop()
        else:
            self.content(source.release())
        return True

    def content(self, text: str) -> None:
        """Show text."""
        if text and not self._alone:
            self._events.append(ContentDelta(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call of this function; ``call_id`` is the id that the model gave it.

        Raises
        ------
        MismatchError
            There is no such function, or there are enough calls.
        """
        if name not in self.functions or self._count >= MAX_CALLS:
            raise MismatchError
        self._name, self._id = name, call_id
        if self._eager:
            self._show()

    def argue(self, text: str) -> None:
        """The arguments of the call go on with this JSON text."""
        if not text:
            return
        self._has_arguments = True
        if not self._shown:
            self._arguments.append(text)
        elif self._is_seen:
            self._events.append(ToolCallArguments(self._count, text))

    def copy(self, reader: Steps[T], spell: Callable[[str], str] = str) -> Steps[T]:
        """Run a reader; add what it consumes, as JSON made by ``spell``, to the arguments."""
        self.source.captured, self._spell = [], spell
        try:
            return (yield from reader)
        finally:
            self._flush()
            self.source.captured, self._spell = None, None

    def complete(self) -> None:
        """The call has been read whole: forget its text."""
        if self._rejected:
            self._abandon()
            return
        if not self._has_arguments:
            self.argue("{}")
        if not self._shown:
            self._show()
        self._end()
        self.source.drop()

    def reject(self) -> None:
        """Treat what is being read as text, although it has not been read to its end."""
        if self._shown:
            raise MismatchError
        self._rejected = True

    def read_object(self) -> Steps[None]:
        """Read a call in the form of ``{"name": ..., "arguments": {...}}``, in any order.

        ``parameters`` is another name for ``arguments``; ``type`` and ``id`` are passed over. An
        object that is no call is read to its end, and is text.

        Raises
        ------
        MismatchError
            It is no object, or is malformed.
        """
        source = self.source
        seen: set[str] = set()
        yield from source.expect("{")
        yield from source.run_space()
        goes_on = (yield from source.peek()) != "}"
        while goes_on:
            key = yield from read_text(source)
            kind = "arguments" if key in _ARGUMENTS else key
            if kind in seen:
                self.reject()
            seen.add(kind)
            yield from source.run_space()
            yield from source.expect(":")
            yield from source.run_space()
            yield from self._read_member(kind)
            yield from source.run_space()
            goes_on = yield from source.starts_with(",")
            if goes_on:
                yield from source.run_space()
        yield from source.expect("}")
        if self._name is None:
            self.reject()
        self.complete()

    def read_arguments(self, *ends: str) -> Steps[None]:
        """Read the arguments of a call: an object, the text of one, or null.

        One of ``ends``, which is then consumed, may stand there instead, or the end of an answer
        that is not cut short: there are none.
        """
        source = self.source
        if ends and (yield from source.starts_with_any(ends)):
            return
        first = yield from source.peek()
        if not first and not source.is_cut_short:
            return
        if first == "{":
            yield from self.copy(read_value(source))
        elif first == '"':
            text = (yield from read_text(source)).strip()
            if text and not is_object(text):
                self.reject()
            self.argue(text)
        else:
            yield from source.expect("null")

    def _read_member(self, kind: str) -> Steps[None]:
        """Read the value of a member of an object that is a call."""
        source = self.source
        if kind == "name" and not self._rejected and (yield from source.peek()) == '"':
            name = yield from read_text(source)
            try:
                self.begin(name)
            except MismatchError:
                self.reject()
        elif kind == "arguments" and not self._rejected and (yield from source.peek()) in '{"n':
            yield from self.read_arguments()
        else:
            if kind not in _IGNORED or (yield from source.peek()) != '"':
                self.reject()
            yield from read_value(source)

    def _show(self) -> None:
        """Show what is known of the call."""
        assert self._name is not None
        self._shown = True
        if self._is_seen:
            call_id = self._id or self._new_id()
            if call_id in self._ids:
                call_id = self._new_id()
            self._ids.add(call_id)
            self._events.append(ToolCallBegin(self._count, call_id, self._name))
        arguments, self._arguments = self._arguments, []
        self.argue("".join(arguments))

    def _abandon(self) -> None:
        """What is held is no call after all."""
        if self._shown:
            self._end()
            self.source.drop()
            return
        self.content(self.source.release())
        self._forget()

    def _end(self) -> None:
        self._count += 1
        self._forget()

    def _forget(self) -> None:
        self._shown = self._has_arguments = self._rejected = False
        self._name = self._id = None
        self._arguments = []

    def _flush(self) -> None:
        captured = self.source.captured
        if captured and self._spell is not None:
            text = self._spell("".join(captured))
            captured.clear()
            self.argue(text)

    @property
    def _is_seen(self) -> bool:
        return self._parallel or self._count == 0
