"""Predicted outputs: the token ids of a text that an output is expected to be."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final

from src.engine.requests.text_work import TextWork, chars_of_time

# How much longer than the output a prediction may be, in tokens: an output that leaves something
# out goes on behind it. Further ahead nobody looks for its place (`engine.speculation.prediction`).
_SLACK: Final = 8192
# Characters that are read for each token that is kept. A text with more of them loses its end.
_CHARS_PER_TOKEN: Final = 16

TOKEN_BYTES: Final = 4
"""Bytes of a token id in `Request.prediction`."""


class PredictedOutput:
    """What the outputs of some requests are expected to be; its text is tokenized once for all.

    Parameters
    ----------
    given
        A text, or token ids.
    """

    def __init__(self, given: str | Sequence[int]) -> None:
        self._given: str | Sequence[int] = given
        self._packed: bytes | None = None

    async def packed(
        self,
        max_tokens: int,
        tenant: str,
        work: TextWork,
        encode: Callable[[str], Sequence[int]],
        checked: Callable[[Sequence[int]], Sequence[int]],
    ) -> bytes:
        """Token ids as int32, side by side: as many as an output of ``max_tokens`` may need.

        The first call decides how many. The text is forgotten then.

        Parameters
        ----------
        tenant
            Whose turn it is to be tokenized.
        encode, checked
            Give a text's token ids, and check those of a caller; both may raise.
        """
        if self._packed is not None:
            return self._packed
        most, given = max_tokens + _SLACK, self._given
        if not isinstance(given, str):
            packed = _packed(checked(given[:most]) if given else ())
        else:
            text = given[: most * _CHARS_PER_TOKEN]

            def tokenize() -> bytes:
                return _packed(encode(text)[:most])

            packed = await work.soon(tenant, chars_of_time(len(text)), tokenize)
        self._packed, self._given = packed, ""
        return packed


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
