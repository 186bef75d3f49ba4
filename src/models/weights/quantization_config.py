"""Reads which format a checkpoint is quantized in, from its `config.json` or the file beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from src.core.errors import ModelLoadError
from src.models.fields import read_json
from src.models.weights.checkpoint_formats import CheckpointFormats
from src.models.weights.schemes.compressed_tensors import read_compressed_tensors
from src.models.weights.schemes.of_methods import (
    read_awq,
    read_fbgemm,
    read_fp8,
    read_gptq,
    read_modelopt,
)

Section: TypeAlias = Mapping[str, Any]
Reader: TypeAlias = Callable[[Section], CheckpointFormats | None]

# `quant_method` -> what reads the section. A reader raises ValueError for what it cannot honour. It
# returns None where no weights are quantized.
READERS: dict[str, Reader] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
}

# Fields of `config.json`, and files of tools beside it, that describe a quantization.
_FIELDS = ("quantization_config", "compression_config")
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


def section_of(raw: Mapping[str, Any], directory: Path) -> tuple[str, Any] | None:
    """Where a checkpoint says how it is quantized, and what it says; None: nowhere.

    Raises
    ------
    ModelLoadError
        a file of an older tool is damaged.
    """
    for field in _FIELDS:
        if raw.get(field):
            return field, _flat(raw[field])
    for file in _FILES:
        if (directory / file).exists():
            return file, read_json(directory / file)
    return None


def _flat(section: Any) -> Any:
    """A section of compressed-tensors without the object within it that older tools write."""
    inner = section.get("quantization_config") if isinstance(section, Mapping) else None
    if not isinstance(inner, Mapping):
        return section
    outer = {name: value for name, value in section.items() if name != "quantization_config"}
    return {**outer, **{name: value for name, value in inner.items() if value is not None}}


def read_formats(name: str, section: Any, source: str) -> CheckpointFormats | None:
    """The formats that a section asks for; None if it quantizes no weights.

    Parameters
    ----------
    name
        Of the section, for messages.
    section
        As `section_of` returns it.
    source
        The file, for messages.

    Raises
    ------
    ModelLoadError
        The section is malformed, or asks for something that is not supported.
    """
    method = method_of(section)
    if method not in READERS:
        known = ", ".join(READERS) or "none"
        raise ModelLoadError(
            f"{source}: {name} ({method}) is not supported; quant_method may be {known}; "
            "or use the unquantized checkpoint"
        )
    try:
        return READERS[method](section)
    except ValueError as error:
        raise ModelLoadError(f"{source}: {name} ({method}): {error}") from None


def method_of(section: Any) -> str:
    """The `quant_method` of a section. Older tools' files have none, but fields of their own."""
    if not isinstance(section, Mapping):
        return str(section)
    if section.get("quant_method") is not None:
        return str(section["quant_method"])
    if "config_groups" in section:
        return "compressed-tensors"
    if "w_bit" in section:
        return "awq"
    if "quant_algo" in section or "quantization" in section:
        return "modelopt"
    return "gptq" if "bits" in section and "desc_act" in section else str(dict(section))
