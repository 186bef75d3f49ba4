"""Text that arrives in pieces, read character by character as if it were there already.

Readers are generators: one that needs more text than there is yields, and is resumed when more has
come. So a syntax is written as if its whole text were there, and what it reads does not depend on
where the pieces were cut. Every character is consumed once: work is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""A reader that returns a ``T`` and yields where it needs more text."""

SPACE = re.compile(r"[ \t\r\n]*")


class MismatchError(Exception):
    """Something else stands there: what began like a call, say, is none."""


class Source:
    """The text of one answer.

    What is consumed is *held* until the reader knows what it was: `drop` forgets it, `release`
    returns it to be shown.
    """

    def __init__(self) -> None:
        self.captured: list[str] | None = None
        """Where it is a list, it takes what is consumed."""
        self._buffer = ""
        self._at = 0
        self._ended = False
        self._held: list[str] = []

    def feed(self, text: str) -> None:
        """Append the next piece."""
        self._buffer = self._buffer[self._at :] + text if self._at < len(self._buffer) else text
        self._at = 0

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True

    def drop(self) -> None:
        """Forget what is held."""
        self._held.clear()

    def release(self) -> str:
        """Return what is held, which is then held no more."""
        if not self._held:
            return ""
        text = "".join(self._held)
        self._held.clear()
        return text

    def remainder(self) -> str:
        """Return what has not been consumed, and leave nothing."""
        text, self._buffer, self._at = self._buffer[self._at :], "", 0
        return text

    def peek(self) -> Steps[str]:
        """Return the next character; empty at the end."""
        while self._at >= len(self._buffer):
            if self._ended:
                return ""
            yield
        return self._buffer[self._at]

    def take(self) -> Steps[str]:
        """Consume the next character; empty at the end."""
        character = yield from self.peek()
        self._consume(self._at + len(character))
        return character

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume the longest run of characters; ``pattern`` is a repeated character class."""
        taken: list[str] = []
        while True:
            match = pattern.match(self._buffer, self._at)
            if match is not None and match.end() > self._at:
                taken.append(match[0])
                self._consume(match.end())
            if self._at < len(self._buffer) or self._ended:
                return "".join(taken)
            yield

    def expect(self, text: str) -> Steps[None]:
        """Consume exactly ``text``.

        Raises
        ------
        MismatchError
            Something else stands there.
        """
        for character in text:
            if (yield from self.peek()) != character:
                raise MismatchError
            self._consume(self._at + 1)

    def starts_with(self, text: str) -> Steps[bool]:
        """Consume ``text`` if it is what comes next; say whether it was."""
        while True:
            there = self._buffer[self._at : self._at + len(text)]
            if there == text:
                self._consume(self._at + len(text))
                return True
            if not text.startswith(there) or self._ended:
                return False
            yield

    def until(self, tag: str | None, show: Callable[[str], None]) -> Steps[bool]:
        """Show what is held and what comes, up to the next ``tag``, which is consumed.

        Returns whether there was one; the text has ended otherwise. What may yet become the tag
        waits, and so does what is held where nothing stands between it and the tag.
        """
        while True:
            found = -1 if tag is None else self._buffer.find(tag, self._at)
            certain = found
            if found < 0:
                certain = len(self._buffer)
                if tag is not None and not self._ended:
                    certain -= self._beginning_of(tag)
            if certain > self._at:
                show(self.release() + self._buffer[self._at : certain])
                self._at = certain
            if tag is not None and found >= 0:
                self._consume(found + len(tag))
                return True
            if self._ended:
                return False
            yield

    def _beginning_of(self, tag: str) -> int:
        """Length of the longest end of the text with which ``tag`` begins."""
        buffer = self._buffer
        start = buffer.find(tag[0], max(self._at, len(buffer) - len(tag) + 1))
        while start >= 0 and not tag.startswith(buffer[start:]):
            start = buffer.find(tag[0], start + 1)
        return len(buffer) - start if start >= 0 else 0

    def _consume(self, end: int) -> None:
        if end > self._at:
            text = self._buffer[self._at : end]
            self._at = end
            self._held.append(text)
            if self.captured is not None:
                self.captured.append(text)
