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
ENCODER = "encoder/"
"""What a model type begins with where it stands for an encoder."""
HEAD = "head/"
"""The same of an encoder with a head for labels of a text."""
# Begin the parts of the page that are about these.
_ENCODERS = "## Encoders that were compared"
_HEADS = "## Heads of encoders that were compared"
_CELLS = re.compile(r"(?:^| )(?<!\\)\|(?: |$)")
REFUSED = (
    "",
    "{title}",
    "",
    "What a start says of each, or why no tiny model of it could be made.",
    "",
    "| Model type | Class | Reason |",
    "|---|---|---|",
)


def model_types() -> list[str]:
    """Every entry of transformers' causal language models, and of its models of masked tokens."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    names = list(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    encoders = [f"{ENCODER}{name}" for name in names]
    with_head = [name for name in names if name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES]
    heads = [f"{HEAD}{name}" for name in with_head]
    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *encoders, *heads]


def lines_of(results: Path) -> dict[str, dict[str, Any]]:
    """The newest line of each model type."""
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {line["model_type"]: line for line in lines}


def lines_on(page: str) -> dict[str, dict[str, Any]]:
    """The lines that a page shows, by model type: what has not been checked again."""
    lines: dict[str, dict[str, Any]] = {}
    before = ""
    for row in page.partition(MARK)[2].splitlines():
        before = {_ENCODERS: ENCODER, _HEADS: HEAD}.get(row, before)
        if not row.startswith("| `"):
            continue
        kind, *cells = (cell.replace("\\|", "|") for cell in _CELLS.split(row)[1:-1])
        line: dict[str, Any] = {"model_type": before + kind.strip("`")}
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
    parts: dict[str, dict[str, Mapping[str, Any]]] = {"": {}, ENCODER: {}, HEAD: {}}
    for name, line in lines.items():
        before = next((each for each in (ENCODER, HEAD) if name.startswith(each)), "")
        parts[before][name] = line
    rows = [
        page.partition(MARK)[0] + MARK,
        *_tables(parts[""], versions, "## Not served"),
        "",
        _ENCODERS,
        *_tables(parts[ENCODER], versions, "## Encoders that are not served"),
        "",
        _HEADS,
        *_tables(parts[HEAD], versions, "## Heads of encoders that are not served"),
    ]
    return "\n".join(rows) + "\n"


def _tables(lines: Mapping[str, Mapping[str, Any]], versions: str, title: str) -> list[str]:
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
        f"| {_kind(line)} | `{line['class']}` | {_by(line)} | {line['error']:.1e} "
        f"| {line['date']} |"
        for line in served
    ]
    refused = [
        f"| {_kind(line)} | {_cell(_class(line))} | {_cell(_reason(line))} |" for line in others
    ]
    return [head, *rows, *(each.format(title=title) for each in REFUSED), *refused]


def _kind(line: Mapping[str, Any]) -> str:
    return f"`{line['model_type'].removeprefix(ENCODER).removeprefix(HEAD)}`"


def _by(line: Mapping[str, Any]) -> str:
    return "native" if line["implementation"] == "native" else "generic"


def _class(line: Mapping[str, Any]) -> str:
    return f"`{line['class']}`" if "class" in line else ""


def _reason(line: Mapping[str, Any]) -> str:
    reason: str = line.get("refused") or line["failed"]
    return reason.split(f"cannot serve {line.get('class')}: ", 1)[-1]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]
