"""Splits a delta into parts that can each be encoded at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from src.core.outputs import Delta
from src.http.generation.json_chunks import SLICE

# Tokens without log-probabilities that are read at a time.
_TOKENS: Final = 1024


def split_delta(delta: Delta) -> Iterator[Delta]:
    """The delta, or several that join to it where it has many tokens or log-probabilities.

    A slow reader's deltas have joined while it was slow, and the first may bring a whole prompt's.
    """
    scored, logprobs = delta.prompt_logprobs or [], delta.logprobs or []
    if len(scored) + len(logprobs) <= SLICE and len(delta.token_ids) <= _TOKENS:
        yield delta
        return
    for begin in range(0, len(scored), SLICE):
        of_prompt = scored[begin : begin + SLICE]
        none: dict[str, Any] = {"token_ids": [], "logprobs": None, "step_starts": []}
        yield _part(delta, text="", prompt_logprobs=of_prompt, **none)
    size = SLICE if logprobs else _TOKENS
    number = max(1, -(-max(len(logprobs), len(delta.token_ids)) // size))
    for index in range(number):
        is_last = index == number - 1
        own = slice(index * size, None if is_last else (index + 1) * size)
        token_ids = delta.token_ids[own]
        # About as much of the text as these tokens have.
        begin, end = (len(delta.text) * i // number for i in (index, index + 1))
        yield _part(
            delta,
            text=delta.text[begin:end],
            token_ids=token_ids,
            # A step may go on in the next part, which none begins with then.
            step_starts=[
                start - own.start
                for start in delta.begins_steps
                if own.start <= start < own.start + len(token_ids)
            ],
            logprobs=None if delta.logprobs is None else logprobs[own],
            prompt_logprobs=None,
            is_last=is_last,
        )


def _part(delta: Delta, *, is_last: bool = False, **fields: object) -> Delta:
    ends = {} if is_last else {"finish_reason": None, "stop_reason": None}
    return msgspec.structs.replace(delta, **fields, **ends)
