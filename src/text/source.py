"""Text that arrives in pieces, read character by character as if it were there already.

Readers are generators: one that needs more text than there is yields, and is resumed when more has
come. So a syntax is written as if its whole text were there, and what it reads does not depend on
where the pieces were cut. Every character is consumed once: work is linear in the text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""A reader that returns a ``T`` and yields where it needs more text."""

SPACE = re.compile(r"[ \t\r\n]*")
_NO_LIMIT: Final = 1 << 40


class _Sought(NamedTuple):
    """What finds the first of some tags, and what finds one that the text may end within."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]
    longest: int

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(tags: tuple[str, ...], starts: tuple[str, ...] = ()) -> _Sought:
        """Return that of these tags and starts; see `Source.until`."""
        by_length = sorted(tags, key=len, reverse=True)
        whole = "|".join((*map(re.escape, by_length), *starts))
        parts = {tag[:end] for tag in tags for end in range(1, len(tag))}
        begun = "|".join(map(re.escape, sorted(parts, key=len, reverse=True)))
        return _Sought(
            re.compile(whole or r"(?!)"),
            re.compile(rf"(?:{begun})\Z" if begun else r"(?!)"),
            max(map(len, tags), default=0),
        )


def shows(template: str, marks: Sequence[str | tuple[str, ...]]) -> bool:
    """Whether a chat template has any of these marks; all of those that stand in a tuple."""
    return any(
        all(part in template for part in ((mark,) if isinstance(mark, str) else mark))
        for mark in marks
    )


class MismatchError(Exception):
    """Something else stands there: what began like a call, say, is none."""


def finished(reader: Steps[T]) -> T:
    """Run a reader whose text is all there; return what it returns."""
    try:
        next(reader)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a reader waits for more of a text that has ended")


class Source:
    """The text of one answer.

    What is consumed is *held* until the reader knows what it was: `drop` forgets it, `release`
    returns it to be shown.
    """

    def __init__(self) -> None:
        self.captured: list[str] | None = None
        """Where it is a list, it takes what is consumed."""
        self.is_cut_short = False
        """Whether the text has ended before its writer had."""
        self.begins_line = False
        """Whether what has been consumed ends with a line break."""
        self._buffer = ""
        self._at = 0
        # Where a reader began that looks ahead; what it consumes is put back.
        self._mark: int | None = None
        self._ended = False
        self._held: list[str] = []

    def feed(self, text: str) -> None:
        """Append the next piece."""
        kept = self._at if self._mark is None else self._mark
        self._buffer = self._buffer[kept:] + text if kept < len(self._buffer) else text
        self._at -= kept
        if self._mark is not None:
            self._mark = 0

    def end(self, *, cut_short: bool = False) -> None:
        """Nothing more will come; ``cut_short``: though more would have."""
        self._ended = True
        self.is_cut_short = cut_short

    @property
    def holds(self) -> bool:
        """Whether something is held."""
        return bool(self._held)

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

    def run(self, pattern: re.Pattern[str], limit: int = _NO_LIMIT) -> Steps[str]:
        """Consume the longest run of characters; ``pattern`` is a repeated character class.

        No more than ``limit`` characters are taken.
        """
        taken: list[str] = []
        while True:
            match = pattern.match(self._buffer, self._at, self._at + limit)
            if match is not None and match.end() > self._at:
                taken.append(match[0])
                limit -= len(match[0])
                self._consume(match.end())
            if self._at < len(self._buffer) or self._ended or not limit:
                return "".join(taken)
            yield

    def ahead(self, reader: Steps[T]) -> Steps[T]:
        """Run a reader, and put back what it consumes; it must be one that takes a bounded text."""
        assert self._mark is None
        self._mark = self._at
        try:
            return (yield from reader)
        finally:
            self._at, self._mark = self._mark, None

    def run_space(self) -> Steps[str]:
        """Consume white space."""
        return (yield from self.run(SPACE))

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
        return bool((yield from self.starts_with_any((text,))))

    def starts_with_any(self, texts: Sequence[str]) -> Steps[str]:
        """Consume the longest of these texts that comes next; return it, empty where none does."""
        while True:
            there = self._buffer[self._at : self._at + max(map(len, texts), default=0)]
            undecided = not self._ended and any(
                len(there) < len(text) and text.startswith(there) for text in texts
            )
            if not undecided:
                text = max((text for text in texts if there.startswith(text)), key=len, default="")
                self._consume(self._at + len(text))
                return text
            yield

    def ends_within(self, texts: Sequence[str]) -> bool:
        """Whether the text has ended, and what is left of it is the beginning of one of these."""
        longest = max(map(len, texts), default=0)
        left = self._buffer[self._at : self._at + longest + 1]
        return self._ended and any(text.startswith(left) for text in texts)

    def until(
        self, tags: Sequence[str], show: Callable[[str], None], starts: Sequence[str] = ()
    ) -> Steps[str]:
        """Show what is held and what comes, up to the first of ``tags``, which is consumed.

        Up to where one of ``starts`` matches too, which is not consumed: patterns of one character
        and what must follow it, if there is more. Returns what was found; empty where the text has
        ended without. What may yet become a tag waits, and so does what is held where nothing
        stands between it and the tag.
        """
        sought = _Sought.of(tuple(tags), tuple(starts))
        while True:
            found, certain = self._find(sought)
            if certain > self._at:
                show(self.release() + self._buffer[self._at : certain])
                self._at = certain
            if found:
                if found in tags:
                    self._consume(self._at + len(found))
                return found
            if self._ended:
                return ""
            yield

    @property
    def looked_ahead(self) -> int:
        """How many characters the reader that looks ahead has consumed."""
        return 0 if self._mark is None else self._at - self._mark

    def up_to(self, tags: Sequence[str], limit: int = _NO_LIMIT) -> Steps[str]:
        """Consume what stands before the first of ``tags``, and not the tag; return the tag.

        It is empty where there is none: that is the rest of the text, or its next ``limit``
        characters.
        """
        sought = _Sought.of(tuple(tags))
        while limit > 0:
            found, certain = self._find(sought)
            end = min(certain, self._at + limit)
            limit -= end - self._at
            self._consume(end)
            # A tag behind the last character may not have come yet, so it is never looked at.
            if end == certain and limit > 0 and (found or self._ended):
                return found
            if limit > 0:
                yield
        return ""

    def _find(self, sought: _Sought) -> tuple[str, int]:
        """Return the first of what is sought in the text, and where it stands.

        Where that is undecided, it is empty, and the place is where the undecided text begins.
        """
        buffer = self._buffer
        match = sought.whole.search(buffer, self._at)
        found, place = (match[0], match.start()) if match else ("", len(buffer))
        near_end = len(buffer) - sought.longest + 1
        if not self._ended and place >= near_end:
            # One that has only begun may still become the first, or a longer one.
            begun = sought.begun.search(buffer, max(self._at, near_end))
            if begun is not None and begun.start() <= place:
                return "", begun.start()
        return found, place

    def _consume(self, end: int) -> None:
        if end > self._at:
            text = self._buffer[self._at : end]
            self._at = end
            if self._mark is not None:
                return
            self.begins_line = text[-1] == "\n"
            self._held.append(text)
            if self.captured is not None:
                self.captured.append(text)
