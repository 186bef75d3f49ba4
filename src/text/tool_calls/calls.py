"""The calls of one answer on their way to the client."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from src.text.answer import AnswerEvent, ContentDelta, ToolCallArguments, ToolCallBegin
from src.text.source import SPACE, MismatchError, Source, Steps
from src.text.tool_calls.json_values import is_object, read_string, read_text, read_value

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
    names
        The functions that may be called; a call of another one is text.
    new_id
        Returns an id for a call.
    parallel
        Whether calls after the first are shown.
    eager
        Show arguments as they come, where the name stands before them. Without it a call is shown
        when its arguments are whole, so that what turns out to be malformed can still become text.
    """

    def __init__(
        self,
        source: Source,
        names: Collection[str],
        new_id: Callable[[], str],
        *,
        parallel: bool = True,
        eager: bool = False,
    ) -> None:
        self.source = source
        self._names = frozenset(names)
        self._new_id = new_id
        self._parallel = parallel
        self._eager = eager
        self._count = 0
        self._open = False
        self._events: list[AnswerEvent] = []

    def take_events(self) -> list[AnswerEvent]:
        """What has become certain since the last time."""
        if self._open:
            self._show_captured()
        events, self._events = self._events, []
        return events

    def check_name(self, name: str) -> None:
        """Raise `MismatchError` unless a call of this function may follow."""
        if name not in self._names or self._count >= MAX_CALLS:
            raise MismatchError

    def content(self, text: str) -> None:
        """Show text."""
        if text:
            self._events.append(ContentDelta(text))

    def complete(self, name: str, arguments: str) -> None:
        """A call has been read whole; what is held was its text."""
        if self._open:
            self._close()
            return
        self._begin(name)
        self._argue(arguments)
        self._close()

    def abandon(self) -> None:
        """What is held is no call after all."""
        if self._open:
            self._close()
        else:
            self.content(self.source.release())

    def read_object(self, *, needs_arguments: bool) -> Steps[None]:
        """Read a call in the form of ``{"name": ..., "arguments": {...}}``, in any order.

        ``parameters`` is another name for ``arguments``; ``type`` and ``id`` are passed over.

        Raises
        ------
        MismatchError
            It has another form.
        """
        source = self.source
        name: str | None = None
        arguments: str | None = None
        seen: set[str] = set()
        yield from source.expect("{")
        while True:
            yield from source.run(SPACE)
            key = yield from read_text(source)
            kind = "arguments" if key in _ARGUMENTS else key
            if kind in seen:
                raise MismatchError
            seen.add(kind)
            yield from source.run(SPACE)
            yield from source.expect(":")
            yield from source.run(SPACE)
            if kind == "name":
                name = yield from read_text(source)
                self.check_name(name)
            elif kind == "arguments":
                arguments = yield from self.read_arguments(name)
            elif kind in _IGNORED:
                yield from read_string(source)
            else:
                raise MismatchError
            yield from source.run(SPACE)
            if (yield from source.peek()) != ",":
                break
            yield from source.take()
        yield from source.expect("}")
        if name is None or (needs_arguments and arguments is None):
            raise MismatchError
        self.complete(name, arguments or "{}")

    def read_arguments(self, name: str | None) -> Steps[str]:
        """Read the arguments of a call: an object, the text of one, or null.

        Returns their JSON text; it has been shown already where the call is open.
        """
        source = self.source
        first = yield from source.peek()
        if first == "{":
            captured: list[str] = []
            source.captured = captured
            if self._eager and name is not None:
                self._begin(name)
            try:
                yield from read_value(source)
            finally:
                self._show_captured()
                source.captured = None
            return "".join(captured)
        if first == '"':
            text = (yield from read_text(source)).strip()
            if not is_object(text):
                raise MismatchError
            return text
        yield from source.expect("null")
        return "{}"

    def _begin(self, name: str) -> None:
        self._open = True
        if self._shown:
            self._events.append(ToolCallBegin(self._count, self._new_id(), name))

    def _argue(self, text: str) -> None:
        if self._shown and text:
            self._events.append(ToolCallArguments(self._count, text))

    def _close(self) -> None:
        self._open = False
        self._count += 1
        self.source.drop()

    def _show_captured(self) -> None:
        captured = self.source.captured
        if self._open and captured:
            self._argue("".join(captured))
            captured.clear()

    @property
    def _shown(self) -> bool:
        return self._parallel or self._count == 0
