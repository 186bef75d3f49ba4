"""What a model thinks before it answers, set apart from its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from src.text.answer import AnswerEvent, AnswerParser, ReasoningDelta
from src.text.source import SPACE, Source, Steps


@dataclass(frozen=True)
class ReasoningSyntax:
    """How a family of models marks its reasoning.

    Attributes
    ----------
    name
        As the setting ``chat.reasoning_parser`` spells it.
    opening, closing
        The tags around it. The opening one may stand at the end of the prompt.
    implied
        Whether answers begin with reasoning though neither prompt nor answer has an opening tag.
    """

    name: str
    opening: str
    closing: str
    implied: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """Every text that the parser must see though it be a special token."""
        return self.opening, self.closing

    def stage(self, prompt_end: str, *, continued: bool) -> str:
        """Say what an answer after this prompt begins with.

        Parameters
        ----------
        prompt_end
            The last part of the rendered prompt, special tokens included.
        continued
            Whether the prompt's last message is left open, for the answer to continue it.

        Returns
        -------
        ``open``: with reasoning whose tag has been opened; ``closed``: with no reasoning;
        ``undecided``: that is up to the model.
        """
        end = prompt_end.rstrip()
        if end.endswith(self.opening):
            return "open"
        if end.endswith(self.closing):
            return "closed"
        if continued:
            return "open" if end.rfind(self.opening) > end.rfind(self.closing) else "closed"
        return "open" if self.implied else "undecided"


REASONING_SYNTAXES: Final[Mapping[str, ReasoningSyntax]] = {
    syntax.name: syntax
    for syntax in (
        ReasoningSyntax("think", "<think>", "</think>"),
        ReasoningSyntax("deepseek_r1", "<think>", "</think>", implied=True),
        ReasoningSyntax("mistral", "[THINK]", "[/THINK]"),
    )
}
"""By the names that the setting ``chat.reasoning_parser`` takes."""


class ReasoningParser:
    """Sets the reasoning at the beginning of an answer apart, and hands on the rest.

    White space next to the tags belongs to neither. Reasoning that is not closed goes on to the
    end of the text.

    Parameters
    ----------
    syntax
        How the model marks it.
    rest
        The parser of what follows.
    is_open
        Whether the prompt has opened it.
    """

    def __init__(self, syntax: ReasoningSyntax, rest: AnswerParser, *, is_open: bool) -> None:
        self._syntax = syntax
        self._rest = rest
        self._is_open = is_open
        self._source = Source()
        self._space = ""
        self._events: list[AnswerEvent] = []
        self._reader = self._read()
        self._reading = True

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the text; return what has become certain by it."""
        if not self._reading:
            return self._rest.feed(text)
        self._source.feed(text)
        return self._step()

    def finish(self) -> list[AnswerEvent]:
        """Return the rest, at the end of the text."""
        self._source.end()
        events = self._step() if self._reading else []
        return events + self._rest.finish()

    def _step(self) -> list[AnswerEvent]:
        try:
            next(self._reader)
        except StopIteration:
            self._reading = False
            self._events += self._rest.feed(self._source.release() + self._source.remainder())
        events, self._events = self._events, []
        return events

    def _read(self) -> Steps[None]:
        source, syntax = self._source, self._syntax
        yield from source.run(SPACE)
        opened = yield from source.starts_with(syntax.opening)
        if not opened and not self._is_open:
            return
        if opened:
            source.drop()
            yield from source.run(SPACE)
        source.drop()
        if (yield from source.until(syntax.closing, self._show)):
            yield from source.run(SPACE)
        source.drop()

    def _show(self, text: str) -> None:
        """Show reasoning; the white space at its end waits for what follows."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._events.append(ReasoningDelta(shown))
