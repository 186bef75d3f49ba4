"""Bounds of fields that the engine checks and not the decoder, as JSON schema.

By the field's name: they are the same wherever it stands. Every constraint is put where its type
fits, so the bound of a list's items and that of a single text may stand side by side.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from src.core.sampler_parameters import SAMPLER_PARAMETERS, SamplerParameter
from src.core.sampling_params import (
    INT64_MAX,
    INT64_MIN,
    MAX_BAD_WORD_CHARS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
)
from src.http.protocol.cohere import NEUTRAL_IN_COHERE, UnsupportedByCohere
from src.http.protocol.embeddings import (
    NEUTRAL_IN_EMBEDDINGS,
    AcceptedByEmbeddings,
    UnsupportedByEmbeddings,
)
from src.http.protocol.generation import NEUTRAL, Accepted, Unsupported
from src.http.protocol.inference import (
    NEUTRAL_IN_INFERENCE,
    NEUTRAL_IN_PREDICTIONS,
    UnsupportedByInference,
    UnsupportedByPredictions,
)
from src.http.protocol.messages import (
    NEUTRAL_IN_MESSAGES,
    AcceptedByMessages,
    UnsupportedByMessages,
)
from src.http.protocol.ranks import NEUTRAL_IN_RANKS, AcceptedByRanks, UnsupportedByRanks
from src.http.protocol.responses import (
    NEUTRAL_IN_RESPONSES,
    AcceptedByResponses,
    UnsupportedByResponses,
)

_STOP: Final = {"minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
_TOKENS: Final = {"minimum": 0, "maximum": INT64_MAX}
_LOGPROBS: Final = {"minimum": 0, "maximum": MAX_LOGPROBS}


def _sampler_bounds(parameter: SamplerParameter) -> dict[str, dict[str, Any]]:
    if parameter.above_low:
        return {"number": {"exclusiveMinimum": int(parameter.low)}}
    kind = "integer" if parameter.kind is int else "number"
    return {kind: {"minimum": int(parameter.low), "maximum": int(parameter.high)}}


# Field -> JSON type -> constraints
BOUNDS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "n": {"integer": {"minimum": 1, "maximum": MAX_N}},
    **{each.name: _sampler_bounds(each) for each in SAMPLER_PARAMETERS},
    "max_tokens": {"integer": _TOKENS},
    "max_completion_tokens": {"integer": _TOKENS},
    "min_tokens": {"integer": _TOKENS},
    "seed": {"integer": {"minimum": INT64_MIN, "maximum": INT64_MAX}},
    "priority": {"integer": {"minimum": INT64_MIN, "maximum": INT64_MAX}},
    "logprobs": {"integer": _LOGPROBS},
    "top_logprobs": {"integer": _LOGPROBS},
    "prompt_logprobs": {"integer": _LOGPROBS},
    "stop": {"string": _STOP, "array": {"items": {"type": "string", **_STOP}}},
    "bad_words": {
        "array": {"items": {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS}}
    },
    "logit_bias": {
        "object": {
            "propertyNames": {"pattern": "^[0-9]{1,18}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    },
    "stop_token_ids": {"array": {"items": {"type": "integer", **_TOKENS}}},
    "allowed_token_ids": {"array": {"minItems": 1, "items": {"type": "integer", **_TOKENS}}},
    "tokens": {"array": {"items": {"type": "integer", **_TOKENS}}},
    "prompt": {"array": {"minItems": 1}},
}


def bound(name: str, schema: dict[str, Any]) -> None:
    """Write a field's bounds into its schema."""
    constraints = BOUNDS.get(name, {})
    for branch in schema.get("anyOf", [schema]):
        branch.update(constraints.get(branch.get("type"), {}))


# What no request can have, and what may be sent nevertheless; what has no effect.
_FAMILIES: Final = (
    (Unsupported, NEUTRAL, Accepted),
    (UnsupportedByResponses, NEUTRAL_IN_RESPONSES, AcceptedByResponses),
    (UnsupportedByMessages, NEUTRAL_IN_MESSAGES, AcceptedByMessages),
    (UnsupportedByEmbeddings, NEUTRAL_IN_EMBEDDINGS, AcceptedByEmbeddings),
    (UnsupportedByRanks, NEUTRAL_IN_RANKS, AcceptedByRanks),
    # Nothing is accepted without an effect.
    (UnsupportedByCohere, NEUTRAL_IN_COHERE, UnsupportedByCohere),
    (UnsupportedByPredictions, NEUTRAL_IN_PREDICTIONS, UnsupportedByPredictions),
    (UnsupportedByInference, NEUTRAL_IN_INFERENCE, UnsupportedByInference),
)


def refused_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """The fields of a request that are refused, and with which values they are not."""
    for refused, neutral, _ in _FAMILIES:
        if issubclass(kind, refused):
            return neutral
    return {}


def accepted_fields(kind: type[msgspec.Struct]) -> set[str]:
    """The fields of a request that are accepted without an effect."""
    for refused, _, accepted in _FAMILIES:
        if issubclass(kind, accepted):
            return set(accepted.__struct_fields__) - set(refused.__struct_fields__)
    return set()


def describe_use(kind: type[msgspec.Struct], name: str, schema: dict[str, Any]) -> None:
    """Say of a field whether it is refused, or accepted without an effect."""
    refused = refused_fields(kind)
    if name in refused:
        schema["enum"] = [None, *refused[name]]
        schema["description"] = "Refused by name with any other value."
    elif name in accepted_fields(kind):
        schema["description"] = "Accepted without an effect."
