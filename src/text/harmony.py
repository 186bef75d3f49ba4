"""The messages of which gpt-oss makes an answer (OpenAI's harmony format).

``<|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>TEXT<|end|>``: what
the model thinks is in the channel ``analysis``, what it says in ``final`` and ``commentary``, and
what has a recipient is a call. The prompt ends with ``<|start|>assistant``, and the last message
with ``<|return|>`` or ``<|call|>``, which end the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from src.text.source import MismatchError, Source, Steps

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"

_BEGINNINGS: Final = (START, CHANNEL)
_ENDS: Final = (END, CALL, RETURN, *_BEGINNINGS)
_MAX_HEADER_PARTS: Final = 8
_PART_RUN = re.compile(r"[^<\r\n]*")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*([A-Za-z_]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Header(NamedTuple):
    """What a message's header says: its channel and its recipient, each perhaps empty."""

    channel: str
    recipient: str


class Sink(Protocol):
    """Receives the parts of an answer."""

    source: Source
    is_open: bool
    """Whether the prompt ends inside a message of reasoning."""

    def show(self, text: str) -> None:
        """Show more reasoning."""

    def hand_on(self, text: str) -> None:
        """Pass more of the answer, or of calls, to the next parser."""


def read_header(source: Source, opened: str) -> Steps[Header]:
    """Consume a header, from behind the tag that opened it to ``<|message|>``.

    Raises
    ------
    MismatchError
        It has another form.
    """
    parts = [opened]
    while len(parts) <= 2 * _MAX_HEADER_PARTS:
        parts.append((yield from source.run(_PART_RUN)))
        tag = yield from source.starts_with_any((CHANNEL, CONSTRAIN, MESSAGE))
        if not tag:
            break
        if tag == MESSAGE:
            text = "".join(parts)
            channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
            return Header(channel[1] if channel else "", recipient[1] if recipient else "")
        parts.append(tag)
    raise MismatchError


def read_messages(sink: Sink) -> Steps[None]:
    """Read a whole answer: each message goes where its header says; calls keep their headers.

    Text outside of messages is part of the answer.
    """
    source = sink.source
    thoughts, words = _Messages(sink.show), _Messages(sink.hand_on)
    opened = ""
    if sink.is_open:
        opened = yield from _read_text(sink, thoughts)
    while opened or (opened := (yield from source.until((START, CHANNEL), sink.hand_on))):
        try:
            header = yield from read_header(source, opened)
        except MismatchError:
            sink.hand_on(source.release())
            opened = ""
            continue
        if header.recipient:
            sink.hand_on(source.release())
            opened = yield from source.until(_ENDS, sink.hand_on)
            if opened not in _BEGINNINGS:
                sink.hand_on(source.release())
                opened = ""
            continue
        source.drop()
        opened = yield from _read_text(sink, thoughts if header.channel == "analysis" else words)
    sink.hand_on(source.release())


class _Messages:
    """Shows the texts of messages, with a line break between those that have any."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._before = ""
        self._break = ""

    def begin(self) -> None:
        """The next message begins."""
        self._before = self._break

    def show(self, text: str) -> None:
        """Show more of its text."""
        if text:
            self._show(self._before + text)
            self._before, self._break = "", "\n"


def _read_text(sink: Sink, messages: _Messages) -> Steps[str]:
    """Show a message's text; return the tag of the next message that ended it, if one did."""
    messages.begin()
    ended_by = yield from sink.source.until(_ENDS, messages.show)
    if ended_by in _BEGINNINGS:
        return ended_by
    sink.source.drop()
    return ""
