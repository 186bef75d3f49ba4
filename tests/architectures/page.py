"""docs/models.md, from the lines of the checks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOLERANCE = 1e-3
MARK = "<!-- What follows is written by `nox -s architectures`. -->"
SERVED = """
**{passing} of {all} pass**: {native} native, {generic} generic. {versions}.

| Model type | Class | Served | Error | Date |
|---|---|---|---|---|"""
_CELLS = re.compile(r"(?:^| )(?<!\\)\|(?: |$)")
REFUSED = (
    "",
    "## Not served",
    "",
    "What a start says of each, or why no tiny model of it could be made.",
    "",
    "| Model type | Class | Reason |",
    "|---|---|---|",
)


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


def lines_on(page: str) -> dict[str, dict[str, Any]]:
    """The lines that a page shows, by model type: what has not been checked again."""
    lines: dict[str, dict[str, Any]] = {}
    for row in page.partition(MARK)[2].splitlines():
        if not row.startswith("| `"):
            continue
        kind, *cells = (cell.replace("\\|", "|") for cell in _CELLS.split(row)[1:-1])
        line: dict[str, Any] = {"model_type": kind.strip("`")}
        if cells[0]:
            line["class"] = cells[0].strip("`")
        if len(cells) == len(("class", "served", "error", "date")):
            by = "native" if cells[1] == "native" else "transformers"
            line |= {"implementation": by, "error": float(cells[2]), "date": cells[3]}
        else:
            line["refused"] = cells[1]
        lines[line["model_type"]] = line
    return lines


def passes(line: Mapping[str, Any]) -> bool:
    return "error" in line and line["error"] <= TOLERANCE


def summary(lines: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{sum(map(passes, lines.values()))} of {len(lines)} pass"


def text(page: str, lines: Mapping[str, Mapping[str, Any]], versions: str) -> str:
    """The page, with its tables written anew; ``versions`` are those of what was compared."""
    # A model that is served from now on changes its table.
    ordered = sorted(lines.values(), key=lambda line: str(line["model_type"]))
    served = [line for line in ordered if "error" in line]
    others = [line for line in ordered if "error" not in line]
    native = sum(line["implementation"] == "native" for line in served)
    head = SERVED.format(
        passing=sum(map(passes, lines.values())),
        all=len(lines),
        native=native,
        generic=len(served) - native,
        versions=versions,
    )
    rows = [
        f"| `{line['model_type']}` | `{line['class']}` | {_by(line)} | {line['error']:.1e} "
        f"| {line['date']} |"
        for line in served
    ]
    refused = [
        f"| `{line['model_type']}` | {_cell(_class(line))} | {_cell(_reason(line))} |"
        for line in others
    ]
    prose = page.partition(MARK)[0]
    return "\n".join([prose + MARK, head, *rows, *REFUSED, *refused]) + "\n"


def _by(line: Mapping[str, Any]) -> str:
    return "native" if line["implementation"] == "native" else "generic"


def _class(line: Mapping[str, Any]) -> str:
    return f"`{line['class']}`" if "class" in line else ""


def _reason(line: Mapping[str, Any]) -> str:
    reason: str = line.get("refused") or line["failed"]
    return reason.split(f"cannot serve {line.get('class')}: ", 1)[-1]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]
