"""docs/models.md, from the lines of the checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOLERANCE = 1e-3


def model_types() -> list[str]:
    """Every entry of transformers' causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def lines_of(results: Path) -> dict[str, dict[str, Any]]:
    """The newest line of each model type."""
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {line["model_type"]: line for line in lines}


def passes(line: Mapping[str, Any]) -> bool:
    return "error" in line and line["error"] <= TOLERANCE


def summary(lines: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{sum(map(passes, lines.values()))} of {len(lines)} pass"


def text(lines: Mapping[str, Mapping[str, Any]]) -> str:
    raise NotImplementedError
