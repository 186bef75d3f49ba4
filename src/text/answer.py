"""What a model writes, taken apart as it comes: reasoning, text, and calls of tools.

Every protocol that shows tool calls or reasoning works from the same events: it asks
`plan_answer` for the plan of a request, hands the plan's structured output and kept tokens to the
sampler, and feeds the text of each choice to a parser of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec


class ContentDelta(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of what the model thought before it answered."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True):
    """A call begins: ``index`` counts the answer's calls from 0, ``id`` is unique."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the arguments of call ``index``, which has begun."""

    index: int
    text: str


AnswerEvent: TypeAlias = ContentDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments


class AnswerParser(Protocol):
    """Takes one choice's text apart. It never fails: what it cannot read is text."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the text; return what has become certain by it."""

    def finish(self, *, cut_short: bool = False) -> list[AnswerEvent]:
        """Return the rest, at the end of the text; ``cut_short``: the model had more to write."""


class PlainAnswer:
    """The parser of an answer that is text and nothing else."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the text as it is."""
        return [ContentDelta(text)] if text else []

    def finish(self, *, cut_short: bool = False) -> list[AnswerEvent]:
        """Return nothing: nothing was held back."""
        return []


class ToolOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that one request offers, and how free the model is to call them.

    Attributes
    ----------
    tools
        The tools that may be called, each as chat completions spell it: an object with
        ``function``, which has a ``name`` and may have ``parameters`` and ``strict``. For a call
        of one named function, that one alone.
    choice
        ``auto`` leaves the decision to the model; ``required`` has a grammar force a call;
        ``none`` takes everything for text.
    parallel
        Whether there may be several calls in an answer. Without it all but the first are dropped.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    parallel: bool = True


class ToolCall(msgspec.Struct, kw_only=True):
    """A whole call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, kw_only=True):
    """A whole answer; ``reasoning`` is empty where the model showed none."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)

    def add(self, events: Iterable[AnswerEvent]) -> None:
        """Take the next events of a parser."""
        # Joined once: a text in which many calls fail comes in tens of thousands of pieces.
        content: list[str] = []
        reasoning: list[str] = []
        arguments: defaultdict[int, list[str]] = defaultdict(list)
        for event in events:
            match event:
                case ContentDelta(text=text):
                    content.append(text)
                case ReasoningDelta(text=text):
                    reasoning.append(text)
                case ToolCallBegin(id=call_id, name=name):
                    self.tool_calls.append(ToolCall(id=call_id, name=name, arguments=""))
                case ToolCallArguments(index=index, text=text):
                    arguments[index].append(text)
        self.content += "".join(content)
        self.reasoning += "".join(reasoning)
        for index, texts in arguments.items():
            self.tool_calls[index].arguments += "".join(texts)


def whole_answer(parser: AnswerParser, text: str, *, cut_short: bool = False) -> Answer:
    """Take a whole text apart with a fresh parser."""
    answer = Answer()
    answer.add(parser.feed(text))
    answer.add(parser.finish(cut_short=cut_short))
    return answer
