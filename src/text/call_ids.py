"""Maps tool call ids to nine letters and digits, for templates that accept no others (Mistral's).

Ids of another form come from other providers, or from a conversation begun with another model.
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
    """Map the ids of calls and results in place to nine letters and digits.

    An id of this form stays. Other ids become a digest of themselves, so that later turns of a
    conversation repeat the earlier prompt. Different ids stay different. A call without an id gets
    one. A result without an id gets that of the first call that has no result yet.
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
    """The ids of one conversation, in order of appearance."""

    def __init__(self) -> None:
        # Given id, or the number of a call without one -> id of nine characters.
        self._shortened: dict[str | int, str] = {}
        self._taken: set[str] = set()
        # Shortened ids of calls that have no result yet, in order.
        self._waiting: dict[str, None] = {}
        self._numbers = itertools.count()

    def of_call(self, given: Any) -> str:
        """Return the shortened id of the next call."""
        named = isinstance(given, str) and given != ""
        shortened = self._shorten(given if named else next(self._numbers))
        self._waiting[shortened] = None
        return shortened

    def of_result(self, given: Any) -> str:
        """Return the shortened id of the call that the next result belongs to."""
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
