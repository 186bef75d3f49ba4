"""Ids of calls for templates that take nine letters and digits, as Mistral's do.

A conversation may have been begun with another model, and its ids are that one's.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_ALPHANUMERIC: Final = string.digits + string.ascii_letters
_LENGTH: Final = 9
_FITS: Final = re.compile(rf"[0-9A-Za-z]{{{_LENGTH}}}")


def shorten_ids(chat: Sequence[Mapping[str, Any]]) -> None:
    """Give in place each id of a call, and of what it came to, nine letters and digits.

    An id that has this form stays. Others become what is computed of them alone, so that a later
    turn of the same conversation has the same prompt; two ids never become one. A call without an
    id gets one, and a result without an id is that of the first call that still waits for one.
    """
    ids = _Ids()
    for message in chat:
        for call in _calls(message):
            call["id"] = ids.of_call(call.get("id"))
        if message.get("role") == "tool" and isinstance(message, dict):
            message["tool_call_id"] = ids.of_result(message.get("tool_call_id"))


def _calls(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            yield call


class _Ids:
    """The ids of one conversation, in the order in which they come."""

    def __init__(self) -> None:
        # Id as given, or the number of one that was not -> the one of nine characters.
        self._shortened: dict[str | int, str] = {}
        self._taken: set[str] = set()
        # Ids of calls, as shortened, whose results have not come.
        self._waiting: dict[str, None] = {}
        self._numbers = itertools.count()

    def of_call(self, given: Any) -> str:
        """The id of the next call."""
        named = isinstance(given, str) and given != ""
        shortened = self._shorten(given if named else next(self._numbers))
        self._waiting[shortened] = None
        return shortened

    def of_result(self, given: Any) -> str:
        """The id of the call that the next result belongs to."""
        if isinstance(given, str) and given:
            shortened = self._shorten(given)
        else:
            shortened = next(iter(self._waiting), None) or self.of_call(None)
        self._waiting.pop(shortened, None)
        return shortened

    def _shorten(self, given: str | int) -> str:
        if given not in self._shortened:
            fits = isinstance(given, str) and _FITS.fullmatch(given)
            shortened = str(given) if fits else _digest(given, 0)
            for attempt in itertools.count(1):
                if shortened not in self._taken:
                    break
                shortened = _digest(given, attempt)
            self._taken.add(shortened)
            self._shortened[given] = shortened
        return self._shortened[given]


def _digest(given: str | int, attempt: int) -> str:
    data = f"{attempt}:{given!r}".encode()
    number = int.from_bytes(hashlib.sha256(data).digest(), "big")
    characters = []
    for _ in range(_LENGTH):
        number, index = divmod(number, len(_ALPHANUMERIC))
        characters.append(_ALPHANUMERIC[index])
    return "".join(characters)
