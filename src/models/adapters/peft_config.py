"""`adapter_config.json` of PEFT: what it says of ranks and scales, and what is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.core.errors import ModelLoadError
from src.models.fields import read_json

CONFIG_FILE = "adapter_config.json"
_MAX_BYTES = 1 << 20
# Fields that change nothing here: what an adapter is for, how it was trained, and how it is drawn
# before training. Which modules have an update, the file of tensors says itself.
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "lora_dropout", "runtime_config", "eva_config", "corda_config", "loftq_config",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "megatron_core", "qalora_group_size", "ensure_weight_tying",
})  # fmt: skip
_HONOURED = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "init_lora_weights", "bias",
})  # fmt: skip
# Of models that end in text, in hidden states, or in a head for labels.
_TASK_TYPES = ("CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_CLS", "TOKEN_CLS", None)
# Values of `init_lora_weights` that leave the base model's weights as they are. Others (PiSSA,
# OLoRA, LoftQ, CorDA, EVA) belong to a base model whose weights were changed or must be known.
_INITS = (True, False, "gaussian", "orthogonal", None)
_REASONS = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of its own",
    "modules_to_save": "whole modules beside the updates",
    "trainable_token_indices": "rows of the embedding",
    "target_parameters": "parameters that are no module's weight, such as experts'",
    "alora_invocation_tokens": "an update that begins within the prompt",
    "layer_replication": "layers that are repeated",
    "fan_in_fan_out": "weights that are stored transposed",
}
# Expressions in which nothing repeats, so that none takes long to match.
_PLAIN_PATTERN = re.compile(r"\^?(?:[\w.-]|\\[dw._-])+\$?", re.ASCII)
# A pattern for each module of a large model. All are tried for each module.
_MAX_PATTERNS = 4096


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What the configuration says of a module's update.

    Attributes
    ----------
    source
        The file, for errors.
    ranks, alphas
        Pairs of a pattern for modules' names and a value; the first one that matches counts.
    """

    source: str
    rank: int
    alpha: float
    rslora: bool
    ranks: tuple[tuple[re.Pattern[str], float], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]

    def rank_of(self, module: str) -> float:
        """The rank of a module's update."""
        return _first(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module's update.

        With `use_rslora` the rank's square root divides (Kalajdzievski 2023).
        """
        rank = self.rank_of(module)
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def _first(patterns: tuple[tuple[re.Pattern[str], float], ...], module: str, other: float) -> float:
    return next((value for pattern, value in patterns if pattern.fullmatch(module)), other)


def read_peft_config(directory: Path, max_rank: int) -> PeftConfig:
    """Read the configuration of an adapter.

    Raises
    ------
    ModelLoadError
        It cannot be read, a value is malformed or out of bounds, or it asks for something that is
        not supported; the message names the field.
    """
    path = directory / CONFIG_FILE
    check_file(path, _MAX_BYTES)
    raw = read_json(path)

    def wrong(name: str, expected: str) -> ModelLoadError:
        return ModelLoadError(f"{path}: {name} must be {expected}, got {_shown(raw.get(name))}")

    _refuse_unsupported(path, raw)
    if raw.get("peft_type") != "LORA":
        raise wrong("peft_type", "LORA")
    if raw.get("task_type") not in _TASK_TYPES:
        raise wrong("task_type", f"one of {', '.join(filter(None, _TASK_TYPES))}")
    if raw.get("bias", "none") != "none":
        raise wrong("bias", "none: biases that were trained are not supported")
    init = raw.get("init_lora_weights", True)
    if not isinstance(init, str | bool | None) or init not in _INITS:
        raise wrong(
            "init_lora_weights",
            "true, false, gaussian or orthogonal: others belong to a base model of their own; "
            "PEFT's save_pretrained with path_initial_model_for_weight_conversion makes one that "
            "does not",
        )
    if not isinstance(raw.get("use_rslora", False), bool):
        raise wrong("use_rslora", "true or false")
    rank = raw.get("r", 8)
    if not _is_rank(rank, max_rank):
        raise wrong("r", f"an integer from 1 to lora.max_rank = {max_rank}")
    alpha = raw.get("lora_alpha", 8)
    if not _is_number(alpha):
        raise wrong("lora_alpha", "a number")
    ranks, alphas = (_patterns(path, raw, name) for name in ("rank_pattern", "alpha_pattern"))
    for _, value in ranks:
        if not _is_rank(value, max_rank):
            raise wrong("rank_pattern", f"ranks from 1 to lora.max_rank = {max_rank}")
    return PeftConfig(str(path), rank, float(alpha), raw.get("use_rslora", False), ranks, alphas)


def check_file(path: Path, most: int) -> None:
    """Refuse what is no file, or a larger one.

    Raises
    ------
    ModelLoadError
        With the reason.
    """
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path.parent} has no file {path.name}: not a PEFT adapter")
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if size > most:
        raise ModelLoadError(f"{path} has {size} bytes, at most {most} are read")


def _refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    for name, value in raw.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT or not value:
            continue
        reason = _REASONS.get(name, "a field that is not known here")
        raise ModelLoadError(f"{path}: {name[:100]} ({reason}) is not supported")


def _patterns(
    path: Path, raw: Mapping[str, Any], name: str
) -> tuple[tuple[re.Pattern[str], float], ...]:
    """Patterns of modules' names. PEFT takes any expression; here they are names, perhaps cut off.

    Other expressions could take forever to match, and the file may be anybody's.
    """
    given = raw.get(name) or {}
    if not isinstance(given, dict):
        raise ModelLoadError(f"{path}: {name} must be an object, got {_shown(given)}")
    if len(given) > _MAX_PATTERNS:
        raise ModelLoadError(f"{path}: {name} has {len(given)} patterns, at most {_MAX_PATTERNS}")
    found = []
    for text, value in given.items():
        if not _PLAIN_PATTERN.fullmatch(text) or not _is_number(value):
            raise ModelLoadError(
                f"{path}: {name} must give numbers for names of modules or their ends, got "
                f"{_shown(text)}: {_shown(value)}"
            )
        # As PEFT matches it: a dot is any character, and `\d` a digit.
        found.append((re.compile(rf"(?:.*\.)?(?:{text})"), value))
    return tuple(found)


def _is_rank(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -1e30 < value < 1e30  # not NaN, and no integer that no float holds


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
