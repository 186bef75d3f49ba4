"""Where thinking ends, told from the bytes of its tokens; and which token ends it when it must.

Tags need not be tokens of their own, and a model may spell one by other tokens than a tokenizer
would. So they are looked for in the bytes that the tokens stand for, by the automaton of Knuth,
Morris and Pratt ("Fast pattern matching in strings", 1977). Work is linear in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Final

from src.core.errors import InvalidRequestError
from src.core.sampling_params import THINKING_BUDGET
from src.core.thinking import Thinking

if TYPE_CHECKING:
    from src.text.tokenizer import Tokenizer

_SPACE: Final = b" \t\r\n"
# Bytes of a character of four without the last.
_LONGEST_BEGINNING: Final = 3


class _Tag:
    """One tag, and how many of its bytes the thinking ends with."""

    __slots__ = ("_failures", "_tag", "first", "num_matched")

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._failures = _failure_table(tag)
        self.first = tag[0]
        self.num_matched = 0

    def takes(self, byte: int) -> bool:
        """The thinking goes on with this byte; whether it completes the tag."""
        tag, state = self._tag, self.num_matched
        while state and tag[state] != byte:
            state = self._failures[state]
        self.num_matched = state = state + 1 if tag[state] == byte else 0
        return state == len(tag)


class ThinkingTracker:
    """How far the thinking of one output has come.

    Attributes
    ----------
    num_tokens
        Tokens of thinking so far. What has begun a closing tag counts until that is complete.
    has_begun, is_over
        Whether there is thinking, and whether none comes any more.
    """

    __slots__ = (
        "_begun",
        "_closings",
        "_num_bytes",
        "_openings",
        "_starts",
        "_tail",
        "has_begun",
        "is_over",
        "num_tokens",
    )

    def __init__(self, thinking: Thinking) -> None:
        self._openings = tuple(tag.encode() for tag in thinking.openings)
        ends = (*thinking.closings, *thinking.ends_before)
        self._closings = [_Tag(tag.encode()) for tag in ends]
        # What may become an opening tag.
        self._begun = b""
        self._num_bytes = 0
        # Where tokens begin that may be part of a closing tag.
        self._starts: list[int] = []
        self._tail = b""
        self.num_tokens = 0
        self.has_begun = thinking.is_open
        self.is_over = False

    def copy(self) -> ThinkingTracker:
        """Another one, as far as this one."""
        made = copy(self)
        made._closings = [copy(tag) for tag in self._closings]
        made._starts = list(self._starts)
        return made

    @property
    def num_matched(self) -> int:
        """Bytes of the first closing tag that the thinking ends with."""
        return self._closings[0].num_matched

    def take(self, piece: bytes) -> None:
        """The output goes on with a token of these bytes."""
        if self.is_over:
            return
        if not self.has_begun:
            self._await_opening(piece)
            return
        self.num_tokens += 1
        self._starts.append(self._num_bytes)
        self._tail = (self._tail + piece)[-_LONGEST_BEGINNING:]
        self._read(piece)

    def _await_opening(self, piece: bytes) -> None:
        begun = self._begun = self._begun + piece if self._begun else piece.lstrip(_SPACE)
        for opening in self._openings:
            if begun.startswith(opening):
                # The rest of a token in which the tag ends is thinking, but the token is the tag's.
                self.has_begun = True
                self._read(begun[len(opening) :])
                return
        self.is_over = not any(opening.startswith(begun) for opening in self._openings)

    @property
    def is_within_character(self) -> bool:
        """Whether the thinking ends with the beginning of a character."""
        for length, byte in enumerate(reversed(self._tail), 1):
            # A byte that begins a character says of how many it is the first.
            if byte & 0xC0 != 0x80:
                return byte >= 0xC0 and length < 2 + (byte >= 0xE0) + (byte >= 0xF0)
        return False

    def _read(self, piece: bytes) -> None:
        closings, begin = self._closings, self._num_bytes
        self._num_bytes += len(piece)
        if not any(tag.num_matched or tag.first in piece for tag in closings):
            self._starts.clear()
            return
        for index, byte in enumerate(piece, 1):
            # All of them go on, whichever is complete.
            if complete := [tag for tag in closings if tag.takes(byte)]:
                length = max(tag.num_matched for tag in complete)
                # A token that has something before the tag is thinking.
                self.num_tokens -= sum(start >= begin + index - length for start in self._starts)
                self.is_over = True
                self._starts.clear()
                return
        first = self._num_bytes - max(tag.num_matched for tag in closings)
        self._starts = [start for start in self._starts if start >= first]


class ThinkingGuide:
    """Ends the thinking of outputs when their budget is spent.

    Parameters
    ----------
    thinking
        With a budget.
    endings
        For each number of bytes of the closing tag that are there already, the token that goes on
        with it.
    piece
        The bytes of a token.
    """

    def __init__(
        self, thinking: Thinking, endings: Sequence[int], piece: Callable[[int], bytes]
    ) -> None:
        assert thinking.budget is not None
        self.budget = thinking.budget
        self._thinking = thinking
        self._endings = endings
        self._piece = piece

    def begin(self) -> ThinkingTracker:
        """At the beginning of an output."""
        return ThinkingTracker(self._thinking)

    def follow(self, tracker: ThinkingTracker, token_ids: Sequence[int]) -> None:
        """An output goes on with these tokens."""
        for token_id in token_ids:
            if tracker.is_over:
                return
            tracker.take(self._piece(token_id))

    def forced(self, tracker: ThinkingTracker, *, completes_characters: bool = False) -> int | None:
        """The only token that may come next, if there is one.

        With ``completes_characters`` a character that has begun is completed first, though its
        tokens be too many: what follows a grammar is valid Unicode.
        """
        if tracker.is_over or not tracker.has_begun or tracker.num_tokens < self.budget:
            return None
        if completes_characters and tracker.is_within_character:
            return None
        return self._endings[tracker.num_matched]


def endings_of(tokenizer: Tokenizer, closing: str, vocab_size: int) -> list[int]:
    """Tokens by which a closing tag can be written, whatever is there of it already.

    From its beginning they are those of the tokenizer. Looks at the whole vocabulary, unless the
    tag is a token of its own.

    Parameters
    ----------
    closing
        The tag.
    vocab_size
        Tokens that the model has.

    Returns
    -------
    For each number of bytes of the tag that are there already, a token that goes on with it.

    Raises
    ------
    InvalidRequestError
        There is none.
    """
    whole, tag = tokenizer.token_to_id(closing), closing.encode()
    if whole is not None and whole < vocab_size:
        return [whole] * len(tag)
    endings: dict[int, int] = {}
    known = tokenizer.encode(closing, add_special_tokens=False)
    if b"".join(map(tokenizer.token_bytes, known)) == tag and max(known) < vocab_size:
        begin = 0
        for token_id in known:
            endings[begin] = token_id
            begin += len(tokenizer.token_bytes(token_id))
    longest: dict[bytes, int] = {}
    for token_id in range(min(vocab_size, tokenizer.vocab_size)):
        piece = tokenizer.token_bytes(token_id)
        if piece and piece in tag and token_id not in tokenizer.special_ids:
            longest.setdefault(piece, token_id)
    for begin in range(len(tag)):
        for end in range(len(tag), begin, -1):
            if begin not in endings and tag[begin:end] in longest:
                endings[begin] = longest[tag[begin:end]]
        if begin not in endings:
            raise InvalidRequestError(
                f"{THINKING_BUDGET}: the model's tokens cannot spell {closing!r}, which ends its "
                "thinking",
                param=THINKING_BUDGET,
            )
    return [endings[begin] for begin in range(len(tag))]


def _failure_table(tag: bytes) -> list[int]:
    """``table[n]``: length of the longest proper prefix of ``tag[:n]`` that also ends it."""
    table = [0, 0]
    for i in range(1, len(tag)):
        state = table[i]
        while state and tag[state] != tag[i]:
            state = table[state]
        table.append(state + 1 if tag[state] == tag[i] else 0)
    return table
