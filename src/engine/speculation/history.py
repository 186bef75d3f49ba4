"""Guesses that a text goes on as one that this server said before."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from src.core.errors import ConfigError
from src.core.step_message import DeviceRequest, Scope
from src.engine.speculation.guess import Guess

# Tokens of an end that are looked for, the longest first.
_LENGTHS: Final = (16, 8, 4)
TOKEN_BYTES: Final = 4 * (2 + len(_LENGTHS))
"""Bytes of a token that is kept: itself, its scope, and an entry in the table of each length."""

_LEAST_TOKENS: Final = 1024
# Of a text that is kept: tokens of its prompt's end, and of its output's end.
_OF_PROMPT: Final = 32
_OF_OUTPUT: Final = 8192
# Tokens whose ends are entered into the tables behind a step: more than a step says, and far less
# work than a step is.
_ENTERED: Final = 512
# Texts that wait for that.
_MOST_LEFT: Final = 256
# Scopes that are told apart; texts of the one that came first are out of reach then.
_MOST_SCOPES: Final = 4096
# Between texts, and where there is none.
_NOTHING: Final = -1
_BASE: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def size_of(max_bytes: int) -> int:
    """Tokens that are kept in so many bytes: a power of two, as tables have it."""
    return 1 << (max(1, max_bytes // TOKEN_BYTES).bit_length() - 1)


def require_size(max_bytes: int) -> None:
    """Check that something can be kept in so many bytes.

    Raises
    ------
    ConfigError
        They are too few.
    """
    if size_of(max_bytes) < _LEAST_TOKENS:
        least = _LEAST_TOKENS * TOKEN_BYTES
        raise ConfigError(
            f"speculation.shared_history_bytes must be 0 or at least {least}, got {max_bytes}"
        )


class SharedHistory:
    """Keeps the last outputs, and finds in them the end of a row's tokens.

    A text is found by requests of its own scope only (tenant, salt, adapter). It is kept when its
    request has ended, with the end of its prompt. The memory is fixed: a ring of tokens, in which
    new texts overwrite old ones, and for each length of an end a table from its hash to the place
    behind the last such end. So nothing takes longer the more is kept. What a table says is
    compared with the tokens there, so collisions and overwritten texts give no guess. A text enters
    the tables by and by (`catch_up`), so that no step waits for it.

    Parameters
    ----------
    max_bytes
        Of memory that it takes, at most.

    Raises
    ------
    ConfigError
        That is too little for anything.
    """

    reads_texts = True

    def __init__(self, max_bytes: int) -> None:
        require_size(max_bytes)
        self._size = size = size_of(max_bytes)
        # [size] int32: token ids, and the number of their scope.
        self._tokens = np.full(size, _NOTHING, np.int32)
        self._scopes = np.full(size, _NOTHING, np.int32)
        # Length of an end -> [size] int32: hash -> index behind its last place; 0: none.
        self._tables = {length: np.zeros(size, np.int32) for length in _LENGTHS}
        self._next = 0
        self._numbers: dict[Scope, int] = {}
        self._count = 0
        # [begin, first, end, scope] of texts that are in the tables up to ``first`` only.
        self._left: deque[list[int]] = deque()
        # How many of their tokens are not.
        self._num_left = 0
        # Row -> number of its request's scope.
        self._rows: dict[int, int] = {}
        # Keys of requests grow: the largest so far, and the largest when all was forgotten.
        self._newest_key = self._forgotten_key = -1

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        arrays = (self._tokens, self._scopes, *self._tables.values())
        return sum(array.nbytes for array in arrays)

    def install(self, row: int, request: DeviceRequest) -> None:
        """The row has this request now."""
        self._newest_key = max(self._newest_key, request.key)
        if request.key > self._forgotten_key:
            self._rows[row] = self._number(request.scope)
        else:
            self._rows.pop(row, None)

    def leave(self, row: int, request: DeviceRequest, tokens: np.ndarray) -> None:
        """The row's request has ended: its output is kept."""
        number = self._rows.pop(row, None)
        begin = max(request.prompt_len - _OF_PROMPT, len(tokens) - _OF_OUTPUT, 0)
        text = tokens[begin:][-(self._size // 2) :]
        if number is None or len(tokens) <= request.prompt_len or len(text) <= _LENGTHS[-1]:
            return
        if self._next + len(text) + 1 > self._size:
            self._tokens[self._next :] = _NOTHING
            self._next = 0
        begin, end = self._next, self._next + len(text)
        self._tokens[begin:end] = text
        self._tokens[end] = _NOTHING
        self._scopes[begin : end + 1] = number
        self._next = end + 1
        self._left.append([begin, begin, end, number])
        # Where texts end faster than they are entered, the oldest are left out.
        self._num_left += end - begin
        while self._num_left > self._size or len(self._left) > _MOST_LEFT:
            _, first, last, _ = self._left.popleft()
            self._num_left -= last - first

    def forget(self) -> None:
        """From now on nothing is found that was kept, nor what requests say that have begun.

        Those find nothing either. Scopes get new numbers, so what the memory has of old ones is out
        of reach, and is overwritten in time: nothing takes longer where it is large.
        """
        self._numbers.clear()
        self._rows.clear()
        self._left.clear()
        self._num_left = 0
        self._forgotten_key = self._newest_key

    def catch_up(self) -> None:
        """Enter ends of texts into the tables, of some hundred tokens."""
        room = _ENTERED
        while self._left and room > 0:
            begin, first, end, number = self._left[0]
            last = min(end, first + room)
            self._enter(begin, first, last, end, number)
            room -= last - first
            self._num_left -= last - first
            if last == end:
                self._left.popleft()
            else:
                self._left[0][1] = last

    def _enter(self, begin: int, first: int, last: int, end: int, number: int) -> None:
        """Enter the ends at ``first`` to ``last`` of the text from ``begin`` to ``end``."""
        for length, table in self._tables.items():
            # Of the first token behind an end, and behind the last one: a token must follow it.
            low, high = max(first, begin + length - 1) + 1, min(last, end - 1) + 1
            if low < high:
                windows = np.lib.stride_tricks.sliding_window_view(
                    self._tokens[low - length : high - 1], length
                )
                # Of equal hashes the last place is kept.
                table[self._hashes(windows, number)] = np.arange(low, high)

    def may_guess(self, row: int, tokens: np.ndarray) -> bool:
        """See `Screening`."""
        return row in self._rows

    def propose(self, row: int, tokens: np.ndarray, most: int) -> Guess | None:
        """See `Drafter`."""
        number = self._rows.get(row)
        if number is None:
            return None
        for length, table in self._tables.items():
            end = tokens[-length:]
            if len(end) < length:
                continue
            place = int(table[self._hashes(end[None], number)[0]])
            if (
                place >= length
                and self._scopes[place - 1] == number
                and np.array_equal(self._tokens[place - length : place], end)
            ):
                found: list[int] = self._tokens[place : place + most].tolist()
                if _NOTHING in found:
                    found = found[: found.index(_NOTHING)]
                return Guess(found, length, "history") if found else None
        return None

    def _number(self, scope: Scope) -> int:
        """The number of a scope, which no other one ever has."""
        number = self._numbers.pop(scope, None)
        if number is None:
            number, self._count = self._count, self._count + 1
            if len(self._numbers) >= _MOST_SCOPES:
                del self._numbers[next(iter(self._numbers))]
        # The one that came last is the last to be forgotten.
        self._numbers[scope] = number
        return number

    def _hashes(self, ends: np.ndarray, number: int) -> np.ndarray:
        """Places in a table, [n] int64, of ends [n, length] int32 in a scope."""
        length = ends.shape[1]
        hashes = (ends.astype(np.uint64) + np.uint64(1)) @ _POWERS[length]
        hashes += np.uint64((number * _BASE) & _MASK)
        hashes ^= hashes >> np.uint64(29)
        hashes *= np.uint64(_BASE)
        hashes >>= np.uint64(64 - self._size.bit_length() + 1)
        found: np.ndarray = hashes.astype(np.int64)
        return found


_POWERS: Final = {
    length: np.array([pow(_BASE, place + 1, 1 << 64) for place in range(length)], np.uint64)
    for length in _LENGTHS
}
