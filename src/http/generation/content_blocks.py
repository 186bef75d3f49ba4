"""An answer as blocks, one after another: reasoning, text, calls of tools.

Protocols other than chat completions show an answer as a list of such blocks, and a stream of it as
blocks that open, grow and close.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from src.text.answer import (
    AnswerEvent,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
)

Kind: TypeAlias = Literal["reasoning", "text", "call"]


class Block(msgspec.Struct, kw_only=True):
    """One block; ``text`` is that of a call's arguments. ``id`` and ``name`` are a call's."""

    kind: Kind
    index: int
    text: str = ""
    id: str = ""
    name: str = ""


class BlockBegin(msgspec.Struct, frozen=True):
    """A block begins."""

    block: Block


class BlockDelta(msgspec.Struct, frozen=True):
    """More of the text of the block that is open."""

    block: Block
    text: str


class BlockEnd(msgspec.Struct, frozen=True):
    """The block is complete."""

    block: Block


BlockEvent: TypeAlias = BlockBegin | BlockDelta | BlockEnd


class ContentBlockReader:
    """Turns a parser's events into those of blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def feed(self, events: Iterable[AnswerEvent]) -> list[BlockEvent]:
        """Take the next events."""
        read: list[BlockEvent] = []
        for event in events:
            match event:
                case ContentDelta(text=text):
                    self._grow("text", text, read)
                case ReasoningDelta(text=text):
                    self._grow("reasoning", text, read)
                case ToolCallBegin(id=call_id, name=name):
                    self._begin("call", read, call_id, name)
                case ToolCallArguments(text=text):
                    # A parser ends one call before it begins the next.
                    self._grow("call", text, read)
        return read

    def finish(self) -> list[BlockEvent]:
        """Close what is open; an answer without anything is an empty text."""
        read: list[BlockEvent] = []
        if not self.blocks:
            self._begin("text", read)
        self._close(read)
        return read

    def _grow(self, kind: Kind, text: str, read: list[BlockEvent]) -> None:
        if not text:
            return
        block = self._open
        if block is None or block.kind != kind:
            block = self._begin(kind, read)
        block.text += text
        read.append(BlockDelta(block, text))

    def _begin(
        self, kind: Kind, read: list[BlockEvent], call_id: str = "", name: str = ""
    ) -> Block:
        self._close(read)
        block = Block(kind=kind, index=len(self.blocks), id=call_id, name=name)
        self.blocks.append(block)
        self._open = block
        read.append(BlockBegin(block))
        return block

    def _close(self, read: list[BlockEvent]) -> None:
        if self._open is not None:
            read.append(BlockEnd(self._open))
            self._open = None
