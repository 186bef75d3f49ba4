"""Validation by a client's own types, which read leniently when the client itself uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter


def strictly(kind: Any, text: str | bytes) -> Any:
    """JSON as the type, with nothing converted, missing or unknown."""
    value = TypeAdapter(kind).validate_json(text, strict=True)
    unknown = list(_unknown(value))
    assert unknown == []
    return value


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for item in value.__dict__.values():
            yield from _unknown(item)
    elif isinstance(value, list):
        for item in value:
            yield from _unknown(item)


def events_of(text: str) -> list[tuple[str, str]]:
    """Name and data of each server-sent event."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        events.append((lines.get("event", ""), lines["data"]))
    return events
