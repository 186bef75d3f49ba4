"""What a model thinks before it answers, set apart from its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from src.core.thinking import Thinking
from src.text.answer import AnswerEvent, AnswerParser, ReasoningDelta
from src.text.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    Sink,
    read_messages,
)
from src.text.source import Source, Steps


def read_tagged(sink: Sink, syntax: ReasoningSyntax) -> Steps[None]:
    """Read reasoning between tags, which stands at the beginning of the answer."""
    source = sink.source
    yield from source.run_space()
    opened = yield from source.starts_with_any(syntax.openings)
    if opened or sink.is_open:
        if opened:
            yield from source.run_space()
        source.drop()
        found = yield from source.until(syntax.closings, sink.show, syntax.ends_before)
        if found not in syntax.ends_before:
            yield from source.run_space()
        source.drop()
    if syntax.frame is not None:
        yield from _read_framed(sink, *syntax.frame)


def _read_framed(sink: Sink, opening: str, closing: str) -> Steps[None]:
    """Read an answer that may have tags around it, which are not shown."""
    source = sink.source
    if not (yield from source.starts_with(opening)):
        return
    yield from source.run_space()
    source.drop()
    trailing = ""

    def hand_on(text: str) -> None:
        nonlocal trailing
        text = trailing + text
        shown = text.rstrip()
        trailing = text[len(shown) :]
        sink.hand_on(shown)

    if (yield from source.until((closing,), hand_on)):
        yield from source.run_space()
        source.drop()
    else:
        sink.hand_on(trailing)


@dataclass(frozen=True, kw_only=True)
class ReasoningSyntax:
    """How a family of models marks its reasoning.

    Attributes
    ----------
    name
        The value of the setting ``chat.reasoning_parser``.
    models
        The families that use it, for the documentation.
    opening, closing
        The tags around it. The opening one may stand at the end of the prompt.
    shown_by
        Texts in a chat template that identify the syntax. One of them is enough; of a tuple, all
        texts must be there.
    implied
        Whether answers begin with reasoning though neither prompt nor answer has an opening tag.
    other_openings, other_closings
        Alternatives to the tags.
    ends_before
        Texts that end the reasoning and belong to the answer, such as the beginning of a call.
    frame
        Optional tags around the answer after the reasoning; they are not shown.
    marks
        Further tags that may be special tokens.
    resumes, answers
        The text after the closing tag, and before the answer's text, as grammars write them.
    first_openings, last_closings, first_answers
        What takes the place of ``openings``, ``closings`` and ``ends_before`` in `thinking`, where
        an answer may have several messages of reasoning.
    read
        Reads a whole answer, or its beginning up to the end of the reasoning.
    """

    name: str
    models: str
    opening: str
    closing: str
    shown_by: tuple[str | tuple[str, ...], ...] = ()
    implied: bool = False
    other_openings: tuple[str, ...] = ()
    other_closings: tuple[str, ...] = ()
    ends_before: tuple[str, ...] = ()
    frame: tuple[str, str] | None = None
    marks: tuple[str, ...] = ()
    resumes: str = ""
    answers: str = ""
    first_openings: tuple[str, ...] = ()
    last_closings: tuple[str, ...] = ()
    first_answers: tuple[str, ...] = ()
    read: Callable[[Sink, ReasoningSyntax], Steps[None]] = read_tagged

    @property
    def openings(self) -> tuple[str, ...]:
        """Every opening tag."""
        return (self.opening, *self.other_openings)

    @property
    def closings(self) -> tuple[str, ...]:
        """Every closing tag."""
        return (self.closing, *self.other_closings)

    @property
    def tags(self) -> tuple[str, ...]:
        """Every text that the parser must see though it be a special token."""
        return (*self.openings, *self.closings, *self.ends_before, *self.marks)

    def thinking(self, *, is_open: bool, budget: int | None = None) -> Thinking:
        """Return the bounds of all thinking, for stop strings, budgets and counts.

        ``is_open``: the prompt has opened it. ``budget``: tokens at most, or None.
        """
        return Thinking(
            openings=self.first_openings or self.openings,
            closings=self.last_closings or self.closings,
            ends_before=self.first_answers or self.ends_before,
            is_open=is_open,
            budget=budget,
        )

    def stage(self, prompt_end: str, *, continued: str | None) -> str:
        """Say what an answer after this prompt begins with.

        Parameters
        ----------
        prompt_end
            The last part of the rendered prompt, special tokens included.
        continued
            The text of the prompt's last message, if that is left open for the answer to continue
            it. Messages before it do not count: what is written there is not the model's.

        Returns
        -------
        ``open``: with reasoning whose tag has been opened; ``closed``: with no reasoning;
        ``undecided``: that is up to the model.
        """
        end = prompt_end.rstrip()
        if end.endswith(self.openings):
            return "open"
        if end.endswith(self.closings):
            return "closed"
        if continued is not None:
            text = continued.strip()
            opened, closed = (max(map(text.rfind, tags)) for tags in (self.openings, self.closings))
            if opened == closed:
                # It has no tag, but the template may have put one before it.
                before = end.removesuffix(text).rstrip()
                return "open" if before.endswith(self.openings) else "closed"
            return "open" if opened > closed else "closed"
        return "open" if self.implied else "undecided"


_HARMONY_MARKS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

REASONING_SYNTAXES: Final[dict[str, ReasoningSyntax]] = {
    syntax.name: syntax
    for syntax in (
        ReasoningSyntax(
            name="openai_gptoss",
            models="gpt-oss",
            opening=f"{CHANNEL}analysis{MESSAGE}",
            closing=END,
            shown_by=((CHANNEL, MESSAGE),),
            marks=_HARMONY_MARKS,
            resumes=f"{START}assistant",
            answers=f"{CHANNEL}final{MESSAGE}",
            # Several messages may be thought before the final one, whose header ends them all.
            first_openings=(CHANNEL,),
            last_closings=(
                f"{END}{START}assistant{CHANNEL}final{MESSAGE}",
                f"final{MESSAGE}",
            ),
            first_answers=(f"{START}assistant to=", f"{CHANNEL}commentary"),
            read=lambda sink, syntax: read_messages(sink),
        ),
        ReasoningSyntax(
            name="granite",
            models="Granite 3.2 and 3.3",
            opening="<think>",
            closing="</think>",
            shown_by=("Here is my thought process:", ("</think>", "</response>")),
            other_openings=("Here is my thought process:", "Here's my thought process:"),
            other_closings=("Here is my response:", "Here's my response:"),
            frame=("<response>", "</response>"),
        ),
        ReasoningSyntax(
            name="kimi",
            models="Kimi-VL-Thinking",
            opening="◁think▷",
            closing="◁/think▷",
            shown_by=("◁/think▷",),
        ),
        ReasoningSyntax(
            name="kimi_k2",
            models="Kimi K2 Thinking",
            opening="<think>",
            closing="</think>",
            shown_by=(("</think>", "<|tool_calls_section_begin|>"),),
            ends_before=("<|tool_calls_section_begin|>",),
        ),
        ReasoningSyntax(
            name="think",
            models="Qwen 3, DeepSeek V3.1, GLM-4.5 and many others",
            opening="<think>",
            closing="</think>",
            shown_by=("</think>",),
        ),
        ReasoningSyntax(
            name="deepseek_r1",
            models="those that begin to think without saying so",
            opening="<think>",
            closing="</think>",
            implied=True,
        ),
        ReasoningSyntax(
            name="mistral",
            models="Magistral",
            opening="[THINK]",
            closing="[/THINK]",
            shown_by=("[/THINK]",),
        ),
    )
}
"""By the names that the setting ``chat.reasoning_parser`` takes.

Where the setting is ``auto``, the first that a chat template shows is taken.
"""


class ReasoningParser:
    """Sets the reasoning at the beginning of an answer apart, and hands on the rest.

    White space next to the tags belongs to neither. Reasoning that is not closed goes on to the
    end of the text. The syntax's reader uses `source`, `show` and `hand_on`.

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
        self.source = Source()
        self.is_open = is_open
        self._rest = rest
        self._spaces: list[str] = []
        self._events: list[AnswerEvent] = []
        self._reader = syntax.read(self, syntax)
        self._reading = True

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the text; return what has become certain by it."""
        if not self._reading:
            return self._rest.feed(text)
        self.source.feed(text)
        return self._step()

    def finish(self, *, cut_short: bool = False) -> list[AnswerEvent]:
        """Return the rest, at the end of the text."""
        self.source.end(cut_short=cut_short)
        events = self._step() if self._reading else []
        return events + self._rest.finish(cut_short=cut_short)

    def show(self, text: str) -> None:
        """Show reasoning; the white space at its end waits for what follows."""
        shown = text.rstrip()
        if shown:
            self._events.append(ReasoningDelta("".join(self._spaces) + shown))
            self._spaces.clear()
        self._spaces.append(text[len(shown) :])

    def hand_on(self, text: str) -> None:
        """Give the parser of the rest more text."""
        if text:
            self._events += self._rest.feed(text)

    def _step(self) -> list[AnswerEvent]:
        try:
            next(self._reader)
        except StopIteration:
            self._reading = False
            self.hand_on(self.source.release() + self.source.remainder())
        events, self._events = self._events, []
        return events
