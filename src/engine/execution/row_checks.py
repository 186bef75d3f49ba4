"""What the device half makes sure of before it takes a request into a row.

Requests are validated where they are built. This is the second lock: on the device one bad number
fails a whole kernel, and with it everybody who is in the step, or the process.
"""

from __future__ import annotations

from src.core.plan import RowInstall
from src.core.sampling_params import MAX_LOGPROBS, SamplingParams


def check_install(
    install: RowInstall, params: SamplingParams, vocab_size: int, max_model_len: int
) -> None:
    """Refuse what would fail in a kernel; what only fails on the host fails there.

    Raises
    ------
    ValueError
        A token is none of the model's, there are too many of them, or too many log-probabilities
        are asked for.
    """
    token_ids = install.token_ids
    # In C, since a context may be long.
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        strange = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise ValueError(f"token ids must be from 0 to {vocab_size - 1}, got {strange}")
    if len(token_ids) > max_model_len:
        raise ValueError(f"a row holds {max_model_len} tokens, got {len(token_ids)}")
    for count in (params.logprobs, params.prompt_logprobs):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise ValueError(f"log-probabilities may be 0 to {MAX_LOGPROBS}, got {count}")
