"""Reads what sentence-transformers puts beside models that score two texts.

`modules.json` may end in `LogitScore`: the score is the logit of one token, perhaps less that of
another one. `config_sentence_transformers.json` may name what makes the result of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from src.core.errors import ModelLoadError
from src.core.scoring import ResultActivation, ScoreTokens
from src.models.fields import read_json
from src.models.heads.head import named_activation

_MODULES: Final = "modules.json"
_OWN: Final = "config_sentence_transformers.json"


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def read_score_tokens(path: Path, vocab_size: int) -> ScoreTokens | None:
    """The tokens whose logits are a checkpoint's scores; None: its files name none.

    Raises
    ------
    ModelLoadError
        A file cannot be read, or asks for something else.
    """
    modules = _modules(path)
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if "LogitScore" not in kinds:
        return None
    source = path / _MODULES
    if kinds != ["Transformer", "LogitScore"]:
        raise ModelLoadError(
            f"{source}: expected Transformer and LogitScore, got {', '.join(kinds)}"
        )
    settings_file = path / modules[1].path / "config.json"
    settings = read_json(settings_file)

    def token(name: str, *, is_optional: bool) -> int | None:
        value = settings.get(name)
        if value is None and is_optional:
            return None
        if type(value) is not int or not 0 <= value < vocab_size:
            raise ModelLoadError(
                f"{settings_file}: {name} must be a token id up to {vocab_size - 1}, got {value!r}"
            )
        return value

    if settings.get("module_input_name") not in (None, "causal_logits"):
        raise ModelLoadError(
            f"{settings_file}: module_input_name must be causal_logits, got "
            f"{settings['module_input_name']!r}"
        )
    true_id = token("true_token_id", is_optional=False)
    assert true_id is not None
    return ScoreTokens(true_id, token("false_token_id", is_optional=True))


def has_modules(path: Path) -> bool:
    """Whether sentence-transformers' files say what is made of a checkpoint's hidden states."""
    return (path / _MODULES).is_file()


def read_activation(path: Path) -> ResultActivation | None:
    """What makes results of scores, where the files beside `config.json` say so.

    Raises
    ------
    ModelLoadError
        They name another than torch's usual ones.
    """
    source = path / _OWN
    given = read_json(source).get("activation_fn") if source.is_file() else None
    if given is None:
        return None
    found = named_activation(given)
    if found is None:
        raise ModelLoadError(
            f"{source}: activation_fn must be Identity, Sigmoid, Softmax or Tanh of torch.nn, got "
            f"{given!r}"
        )
    return found


def read_instruction(path: Path) -> str | None:
    """What a model is told about all pairs: the default prompt of the files; None: nothing.

    Raises
    ------
    ModelLoadError
        There is no prompt of the default's name.
    """
    source = path / _OWN
    own = read_json(source) if source.is_file() else {}
    name, prompts = own.get("default_prompt_name"), own.get("prompts")
    if name is None:
        return None
    found = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(found, str):
        raise ModelLoadError(
            f"{source}: default_prompt_name must be the name of a prompt, got {name!r}"
        )
    return found or None


def _modules(path: Path) -> list[_Module]:
    source = path / _MODULES
    if not source.is_file():
        return []
    try:
        return msgspec.json.decode(source.read_bytes(), type=list[_Module])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{source} cannot be read: {error}") from error
