"""vLLM's ``--speculative-config``, translated into settings."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from src.core.errors import ConfigError

_OPTION: Final = "--speculative-config"
# vLLM's method -> ours.
_METHODS: Final = {
    "ngram": "ngram",
    "suffix": "suffix",
    "draft_model": "draft",
    "medusa": "medusa",
    "eagle3": "eagle3",
    "mtp": "mtp",
    # Older names of it.
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
# Other methods of vLLM's; so are those for layers of further families, whose names end alike.
_NOT_BUILT: Final = ("eagle", "mlp_speculator", "ngram_gpu", "dflash", "dspark", "custom_class")
_OF_OTHER_FAMILIES: Final = "_mtp"
# Names of it, as method or as model.
_NGRAMS: Final = ("ngram", "[ngram]")
# Where neither bound of a match is given.
_MATCH: Final = 5
# vLLM's key -> the setting.
_SETTINGS: Final = {
    "method": "speculation.method",
    "model": "speculation.model",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    "prompt_lookup_min": "speculation.prompt_lookup_min",
    "prompt_lookup_max": "speculation.prompt_lookup_max",
}


def speculative_settings(text: str) -> list[tuple[str, str]]:
    """Settings and their values, as of ``--set``, for a JSON object of vLLM's.

    Raises
    ------
    ConfigError
        It is no JSON object, or has a key, a value or a method without a meaning here; the message
        names it.
    """
    try:
        given = msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{_OPTION}: expected a JSON object: {error}") from None
    for key, value in given.items():
        if key not in _SETTINGS:
            raise ConfigError(
                f"{_OPTION}: {key!r} has no meaning here, expected some of {', '.join(_SETTINGS)}"
            )
        if isinstance(value, dict | list):
            kind = "object" if isinstance(value, dict) else "array"
            raise ConfigError(f"{_OPTION}: {key} must be a plain value, got an {kind}")
    method = given.get("method")
    if method is None and given.get("model") in _NGRAMS:
        method = given.pop("model")
    if method in _NGRAMS:
        method = "ngram"
    if method is None:
        raise ConfigError(f"{_OPTION}: method must be named, expected {' or '.join(_METHODS)}")
    if method not in _METHODS:
        known = method in _NOT_BUILT or str(method).endswith(_OF_OTHER_FAMILIES)
        reason = "is not built" if known else "is no method"
        raise ConfigError(
            f"{_OPTION}: method = {method!r} {reason}, expected {' or '.join(_METHODS)}"
        )
    given["method"] = _METHODS[str(method)]
    least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    # vLLM takes the bound that is given for both, and has its own without any.
    if given["method"] == "ngram" and (least is None or most is None):
        one = most if least is None else least
        given["prompt_lookup_min"] = given["prompt_lookup_max"] = _MATCH if one is None else one
    return [(_SETTINGS[key], str(value)) for key, value in given.items() if value is not None]
