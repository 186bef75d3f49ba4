"""The operator's limits on request fields, which may be lower than the built-in bounds."""

from __future__ import annotations

from src.core.config import LimitsSection
from src.core.errors import InvalidRequestError
from src.core.sampling_params import SamplingParams


def check_limits(params: SamplingParams, limits: LimitsSection) -> None:
    """Refuse valid parameters that exceed a configured limit.

    Raises
    ------
    InvalidRequestError
        The message names the field, its size and the limit.
    """
    longest = max(map(len, params.stop), default=0)
    for field, size, most, what in (
        ("n", params.n, limits.max_n, ""),
        ("logprobs", params.logprobs or 0, limits.max_logprobs, ""),
        ("prompt_logprobs", params.prompt_logprobs or 0, limits.max_logprobs, ""),
        ("stop", len(params.stop), limits.max_stop_strings, "strings"),
        ("stop", longest, limits.max_stop_string_chars, "characters in a string"),
        ("stop_token_ids", len(params.stop_token_ids), limits.max_stop_token_ids, "ids"),
        ("bad_words", len(params.bad_words), limits.max_bad_words, "words"),
        ("logit_bias", len(params.logit_bias or ()), limits.max_logit_bias, "entries"),
    ):
        if size > most:
            bound = f"have at most {most} {what}" if what else f"be at most {most}"
            raise InvalidRequestError(f"{field} may {bound}, got {size}", param=field)
