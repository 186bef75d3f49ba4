"""Calls that a model makes while it thinks, and that it means, for its thinking never ends.

Some models go from thinking to a call without closing their thinking. A whole call of an offered
function in thinking that is never closed is therefore a call. What was only a thought, with more of
it behind, becomes certain when the thinking is closed: so what follows such a call waits for that.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from src.core.errors import InvalidRequestError
from src.core.thinking import Thinking
from src.text.answer import AnswerEvent, AnswerParser, ContentDelta, ReasoningDelta, ToolCallBegin
from src.text.before_answer import BeforeAnswer
from src.text.chat_template import ChatTemplate

# A turn in which the assistant thinks and calls, and says nothing.
_THOUGHT: Final = "why thought"
_NAME: Final = "function_of_thought"
_FUNCTION: Final[dict[str, Any]] = {"name": _NAME, "arguments": {"argument": 1}}
_TURNS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "question"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": _THOUGHT,
        "reasoning": _THOUGHT,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _FUNCTION}],
    },
]
_TOOL: Final = {"type": "function", "function": {"name": _NAME, "parameters": {"properties": {}}}}


class ThoughtCalls:
    """Reads an answer by ``parser``, and its reasoning by ``calls``.

    Parameters
    ----------
    parser
        Sets the reasoning apart.
    calls
        A fresh parser of text and calls.
    thinking
        How the reasoning is marked.
    """

    def __init__(self, parser: AnswerParser, calls: AnswerParser, thinking: Thinking) -> None:
        self._parser = parser
        self._calls = calls
        self._before = BeforeAnswer(thinking)
        self._is_reading = True
        # Reasoning that has not been shown: white space that may stand before a call, what the
        # parser of calls has not decided about, and from the first call on all there is.
        self._space = ""
        self._held: list[str] = []
        # What the parser makes of it from the first call on.
        self._made: list[AnswerEvent] = []

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the text; return what has become certain by it."""
        events = self._parser.feed(text)
        if not self._is_reading:
            return events
        self._before.feed(text)
        return self._read(events)

    def finish(self, *, cut_short: bool = False) -> list[AnswerEvent]:
        """Return the rest, at the end of the text."""
        events = self._parser.finish(cut_short=cut_short)
        if not self._is_reading:
            return events
        shown = self._read(events)
        self._take(self._calls.finish(cut_short=cut_short), shown)
        if any(isinstance(event, ToolCallBegin) for event in self._made):
            return shown + [_as_thought(event) for event in self._made]
        return shown + self._release()

    def _read(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        shown: list[AnswerEvent] = []
        has_ended = self._before.has_ended
        for event in events:
            if isinstance(event, ReasoningDelta) and not has_ended:
                self._held.append(event.text)
                self._take(self._calls.feed(event.text), shown)
            elif isinstance(event, ReasoningDelta):
                # The last of it: no call is made any more.
                self._held.append(event.text)
            else:
                shown += self._release()
                shown.append(event)
        if has_ended:
            shown += self._release()
            self._is_reading = False
        return shown

    def _take(self, made: list[AnswerEvent], shown: list[AnswerEvent]) -> None:
        """Show reasoning up to the first call."""
        for event in made:
            if self._made or not isinstance(event, ContentDelta):
                self._made.append(event)
                continue
            # Up to there what comes out is what went in.
            self._held = ["".join(self._held)[len(event.text) :]]
            text = self._space + event.text
            certain = text.rstrip()
            self._space = text[len(certain) :]
            if certain:
                shown.append(ReasoningDelta(certain))

    def _release(self) -> list[AnswerEvent]:
        text = self._space + "".join(self._held)
        self._space = ""
        self._held.clear()
        return [ReasoningDelta(text)] if text else []


def _as_thought(event: AnswerEvent) -> AnswerEvent:
    """Text between such calls, or behind them, is reasoning like that before them."""
    return ReasoningDelta(event.text) if isinstance(event, ContentDelta) else event


@functools.lru_cache(maxsize=16)
def leaves_thinking_open(
    template: ChatTemplate, opening: str, closing: str, call_opening: str
) -> bool:
    """Whether a chat template shows the model calls in thinking that it does not close.

    It is tried out on a short conversation, once.
    """
    try:
        text = template.render(_TURNS, tools=[_TOOL], add_generation_prompt=False)
    except InvalidRequestError:
        return False
    begun = text.rfind(_THOUGHT)
    called = text.find(call_opening, begun)
    opened = text.rfind(opening, 0, begun)
    return begun >= 0 and called >= 0 and opened >= 0 and closing not in text[opened:called]
