"""Where the answer begins in the text of an output that may begin with thinking."""

from __future__ import annotations

from typing import Final, Literal

from src.core.thinking import Thinking

# What stands next to the tags and belongs to neither side.
_SPACE: Final = " \t\r\n"


class BeforeAnswer:
    """Divides a text that comes in pieces: thinking with its tags and white space, and the answer.

    Attributes
    ----------
    is_over
        Whether the answer has begun: all that comes is part of it.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._openings = thinking.openings
        self._closings = thinking.closings
        self._ends_before = thinking.ends_before
        self._longest = max(map(len, (*thinking.closings, *thinking.ends_before)))
        self._stage: Literal["opening", "thinking", "space"] = "opening"
        if thinking.is_open:
            self._stage = "thinking"
        # Text that may yet turn out to be part of the answer, or to begin the tag.
        self._held = ""
        # The end of the thinking, in which the closing tag may have begun.
        self._end = ""
        self.is_over = False

    @property
    def has_ended(self) -> bool:
        """Whether there is no thinking, or it has been closed."""
        return self.is_over or self._stage == "space"

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece: what comes before the answer, and what is of the answer."""
        before = ""
        if self._stage == "opening":
            self._held += text
            begun = self._held.lstrip(_SPACE)
            opening = next((tag for tag in self._openings if begun.startswith(tag)), None)
            if opening is None and any(tag.startswith(begun) for tag in self._openings):
                return "", ""
            text, self._held = self._held, ""
            if opening is None:
                self.is_over = True
                return "", text
            end = len(text) - len(begun) + len(opening)
            before, text = text[:end], text[end:]
            self._stage = "thinking"
        if self._stage == "thinking":
            known = len(self._end)
            seen = self._end + text
            end = self._find_end(seen)
            if end < 0:
                self._end = seen[max(0, len(seen) - self._longest + 1) :]
                return before + text, ""
            # What ends it without being a tag may have been shown in part.
            end = max(0, end - known)
            before, text = before + text[:end], text[end:]
            self._stage = "space"
        answer = text.lstrip(_SPACE)
        self.is_over = bool(answer)
        return before + text[: len(text) - len(answer)], answer

    def _find_end(self, text: str) -> int:
        """Where the thinking and its tag end; -1 where they do not."""
        found = [
            (begin, begin + (len(tag) if tag in self._closings else 0))
            for tag in (*self._closings, *self._ends_before)
            if (begin := text.find(tag)) >= 0
        ]
        return min(found)[1] if found else -1

    def finish(self) -> str:
        """What is left at the end of the text: it is part of the answer."""
        held, self._held = self._held, ""
        return held
