"""How a message is encoded: its blocks as they come, and the whole."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import msgspec

from src.core.outputs import Completion, Delta, FinishReason, Usage
from src.http.chat.handlers import ChatJob
from src.http.generation.content_blocks import (
    Block,
    BlockBegin,
    BlockDelta,
    BlockEvent,
    ContentBlockReader,
)
from src.http.generation.generation import is_cut_short
from src.http.protocol.messages import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    MessageBody,
    MessageUsage,
)

_encode: Final = msgspec.json.Encoder().encode

# A type and its fields
Event: TypeAlias = tuple[str, dict[str, Any]]


class MessageEncoder:
    """One message on its way."""

    def __init__(self, chat: ChatJob) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = chat.model
        self._parser = chat.plan.parser()
        self._reader = ContentBlockReader()
        self._begun = False
        self._last: Delta | None = None

    def events(self, prompt: int, delta: Delta) -> bytes:
        """The events of the next delta; the message begins with the first."""
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            usage = msgspec.structs.replace(delta.usage, completion_tokens=0)
            events += [("message_start", {"message": self._empty(usage)}), ("ping", {})]
        read = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            self._last = delta
            read += self._parser.finish(cut_short=is_cut_short(delta))
        events += self._block_events(self._reader.feed(read))
        return _encoded(events)

    def ending(self, usage: Usage) -> bytes:
        """The last events."""
        events = self._block_events(self._reader.finish())
        assert self._last is not None
        reason, sequence = self._stop(self._last)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        events += [
            ("message_delta", {"delta": delta, "usage": _usage(usage)}),
            ("message_stop", {}),
        ]
        return _encoded(events)

    def body(self, completion: Completion, usage: Usage) -> bytes:
        """The whole message."""
        self._reader.feed(self._parser.feed(completion.text))
        self._reader.feed(self._parser.finish(cut_short=is_cut_short(completion)))
        self._reader.finish()
        message = self._empty(usage)
        message.content = [_answer_block(block) for block in self._reader.blocks]
        message.stop_reason, message.stop_sequence = self._stop(completion)
        return _encode(message)

    def _empty(self, usage: Usage) -> MessageBody:
        return MessageBody(
            id=self.id, model=self._model, content=[], stop_reason=None, usage=_usage(usage)
        )

    def _block_events(self, events: Iterable[BlockEvent]) -> list[Event]:
        encoded: list[Event] = []
        for event in events:
            block = event.block
            place: dict[str, Any] = {"index": block.index}
            if isinstance(event, BlockBegin):
                begun = {**place, "content_block": _empty_block(block)}
                encoded.append(("content_block_start", begun))
            elif isinstance(event, BlockDelta):
                delta = {**place, "delta": _delta(block, event.text)}
                encoded.append(("content_block_delta", delta))
            else:
                encoded.append(("content_block_stop", place))
        return encoded

    def _stop(self, piece: Completion | Delta) -> tuple[str, str | None]:
        """Why it ended, and the stop sequence that ended it."""
        if piece.finish_reason is not FinishReason.STOP:
            return "max_tokens", None
        if isinstance(piece.stop_reason, str):
            return "stop_sequence", piece.stop_reason
        calls = any(block.kind == "call" for block in self._reader.blocks)
        return ("tool_use" if calls else "end_turn"), None


def _empty_block(block: Block) -> AnswerBlock:
    if block.kind == "text":
        return AnswerText(text="")
    if block.kind == "reasoning":
        return AnswerThinking(thinking="")
    return AnswerToolUse(id=block.id, name=block.name, input={})


def _answer_block(block: Block) -> AnswerBlock:
    if block.kind == "text":
        return AnswerText(text=block.text)
    if block.kind == "reasoning":
        return AnswerThinking(thinking=block.text)
    return AnswerToolUse(id=block.id, name=block.name, input=_arguments(block.text))


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as an object. A call that was cut short has none that can be read."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _delta(block: Block, text: str) -> dict[str, str]:
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _usage(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _encoded(events: Iterable[Event]) -> bytes:
    return b"".join(
        b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **fields}) + b"\n\n"
        for kind, fields in events
    )
