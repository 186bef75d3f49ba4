"""The device half's last check of a request before it gets a row.

Requests are validated where they are built. This is a second check, because on the device one bad
number fails a whole kernel, and so every request of the step, or even the process.
"""

from __future__ import annotations

from src.core.plan import RowInstall
from src.core.sampling_params import MAX_LOGPROBS, SamplingParams


def check_install(
    install: RowInstall, params: SamplingParams, vocab_size: int, max_model_len: int
) -> None:
    """Refuse values that would fail in a kernel. Values that fail on the host need no check here.

    Raises
    ------
    ValueError
        A token id is not in the vocabulary, there are too many tokens, or too many
        log-probabilities are asked for.
    """
    token_ids = install.token_ids
    # `min` and `max` run in C, since a context may be long.
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        strange = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise ValueError(f"token ids must be from 0 to {vocab_size - 1}, got {strange}")
    if len(token_ids) > max_model_len:
        raise ValueError(f"a row holds {max_model_len} tokens, got {len(token_ids)}")
    for count in (params.logprobs, params.prompt_logprobs):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise ValueError(f"log-probabilities may be 0 to {MAX_LOGPROBS}, got {count}")
