"""From a request's fields to sampling parameters. The engine checks their bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from src.core.errors import InvalidRequestError, RequestError
from src.core.sampler_parameters import SAMPLER_NAMES
from src.core.sampling_params import MAX_LOGPROBS, SamplingParams, shown
from src.core.structured_output import PARAM, StructuredOutput
from src.http.generation.structured import given_field
from src.http.protocol.generation import NEUTRAL, GenerationRequest

# OpenAI's and vLLM's default where a completion does not say.
COMPLETION_MAX_TOKENS: Final = 16

# A key of `logit_bias`; one of more digits is no token of any model.
_TOKEN_KEY: Final = re.compile(r"-?[0-9]{1,10}", re.ASCII)
_LARGE: Final = 1e300

# Fields of a request that are those of SamplingParams, by the same names.
_SAME: Final = (
    "n",
    *SAMPLER_NAMES,
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_LISTS: Final = ("allowed_token_ids", "bad_words", "stop_token_ids", "logits_processors")


def sampling_params(
    request: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured_output: StructuredOutput | None,
) -> SamplingParams:
    """What the request asks for, on top of the checkpoint's ``defaults``.

    ``prompt_logprobs`` stands in where the request does not ask for them itself.
    """
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    for name in _LISTS:
        value = getattr(request, name)
        given[name] = None if value is None else tuple(value)
    if request.logit_bias is not None:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    given |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "structured_output": structured_output,
    }
    if request.prompt_logprobs is None:
        given["prompt_logprobs"] = prompt_logprobs
    return SamplingParams(
        **{**defaults, **{name: value for name, value in given.items() if value is not None}}
    )


def _logit_bias(given: Mapping[str, Any]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        name = f"logit_bias[{key[:50]!r}]"
        if _TOKEN_KEY.fullmatch(key) is None:
            raise InvalidRequestError(f"{name}: keys must be token ids", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequestError(
                f"{name} must be a number, got {type(value).__name__}", param="logit_bias"
            )
        # What a float cannot hold is out of range anyway.
        bias[int(key)] = float(min(max(value, -_LARGE), _LARGE))
    return bias


def num_logprobs(asked: int | None) -> int:
    """Log-probabilities of each position; what is out of range is refused elsewhere."""
    return 0 if asked is None else min(max(asked, 0), MAX_LOGPROBS) + 1


def refuse_unsupported(request: GenerationRequest) -> None:
    """Refuse what would change the answer and cannot be done.

    Raises
    ------
    InvalidRequestError
        Naming the field.
    """
    check_neutral(request, NEUTRAL)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", " other than n")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "stream_options may only be given with stream = true", param="stream_options"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs"
        )


def check_neutral(request: object, neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a request with a field of ``neutral`` that has none of the values given there.

    Raises
    ------
    InvalidRequestError
        Naming the field.
    """
    for name, values in neutral.items():
        value = getattr(request, name)
        # By type too: to Python, 0 is False and True is 1.
        if value is not None and not any(
            type(value) is type(same) and value == same for same in values
        ):
            raise unsupported(name)


def unsupported(name: str, what: str = "") -> InvalidRequestError:
    """The refusal of a field by name; ``what`` says which use of it, where some are supported."""
    return InvalidRequestError(
        f"{name}{what} is not supported by this server", param=name, code="unsupported_parameter"
    )


class FieldNames(NamedTuple):
    """What a client calls the parameters that have another name in the engine.

    They outlive the request, which may be large: errors may come as long as there is an answer.
    """

    structured_output: str
    max_tokens: str

    @classmethod
    def of(cls, request: GenerationRequest) -> FieldNames:
        """The names that a request uses."""
        newer = request.max_completion_tokens is not None
        return cls(given_field(request), "max_completion_tokens" if newer else "max_tokens")

    def apply(self, error: RequestError) -> None:
        """Name in an error as the client did: the limit of tokens, and the form of the text."""
        if error.param == PARAM:
            error.param = self.structured_output
            error.message = error.message.replace(PARAM, error.param, 1)
        elif error.param == "max_tokens":
            error.param = self.max_tokens
            error.message = error.message.replace("max_tokens", error.param)


def check_top_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """SamplingParams.logprobs from the two fields of a chat.

    Raises
    ------
    InvalidRequestError
        ``top_logprobs`` without ``logprobs``, or out of range.
    """
    if top_logprobs is not None:
        if not 0 <= top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {shown(top_logprobs)}",
                param="top_logprobs",
            )
        if top_logprobs and not logprobs:
            raise InvalidRequestError(
                "top_logprobs may only be given with logprobs = true", param="top_logprobs"
            )
    return (top_logprobs or 0) if logprobs else None
