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
        self._opening = thinking.opening
        self._closing = thinking.closing
        self._stage: Literal["opening", "thinking", "space"] = "opening"
        if thinking.is_open:
            self._stage = "thinking"
        # Text that may yet turn out to be part of the answer, or to begin the tag.
        self._held = ""
        # The end of the thinking, in which the closing tag may have begun.
        self._end = ""
        self.is_over = False

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece: what comes before the answer, and what is of the answer."""
        before = ""
        if self._stage == "opening":
            self._held += text
            begun = self._held.lstrip(_SPACE)
            if len(begun) < len(self._opening) and self._opening.startswith(begun):
                return "", ""
            text, self._held = self._held, ""
            if not begun.startswith(self._opening):
                self.is_over = True
                return "", text
            before, text = text[: -len(begun)] + self._opening, begun[len(self._opening) :]
            self._stage = "thinking"
        if self._stage == "thinking":
            known = len(self._end)
            seen = self._end + text
            found = seen.find(self._closing)
            if found < 0:
                self._end = seen[max(0, len(seen) - len(self._closing) + 1) :]
                return before + text, ""
            end = found + len(self._closing) - known
            before, text = before + text[:end], text[end:]
            self._stage = "space"
        answer = text.lstrip(_SPACE)
        self.is_over = bool(answer)
        return before + text[: len(text) - len(answer)], answer

    def finish(self) -> str:
        """What is left at the end of the text: it is part of the answer."""
        held, self._held = self._held, ""
        return held
