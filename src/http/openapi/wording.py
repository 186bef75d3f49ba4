"""Docstrings as the document's descriptions, which OpenAPI reads as Markdown."""

from __future__ import annotations

import inspect
import re
from html import escape
from typing import Any, Final

_ROLE: Final = re.compile(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`")
_LITERAL: Final = re.compile(r"``(.+?)``", re.DOTALL)
_CODE: Final = re.compile(r"`([^`]+)`")
_SECTION: Final = re.compile(r"\n*^Attributes\n-+\n", re.MULTILINE)
# Names at the margin, then lines that are indented.
_ATTRIBUTE: Final = re.compile(r"^(\w+(?:, \w+)*)\n((?:[ ]+\S.*\n?)+)", re.MULTILINE)


def markdown(text: str) -> str:
    """A docstring's text as Markdown, with one line for each paragraph."""
    text = _LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", inspect.cleandoc(text)))
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(filter(None, paragraphs))


def describe_fields(schema: dict[str, Any]) -> None:
    """Turn a schema's docstring into Markdown; what it says of attributes goes to their fields."""
    if "description" not in schema:
        return
    text = inspect.cleandoc(schema["description"])
    about, *rest = _SECTION.split(text, maxsplit=1)
    schema["description"] = markdown(about)
    properties = schema.get("properties", {})
    for names, said in _ATTRIBUTE.findall(rest[0] + "\n" if rest else ""):
        for name in names.split(", "):
            if name in properties:
                properties[name].setdefault("description", markdown(said))


def html(text: str) -> str:
    """Such Markdown as HTML: paragraphs by a line break, names in code."""
    paragraphs = (_CODE.sub(r"<code>\1</code>", escape(part)) for part in text.split("\n\n"))
    return "<br>".join(paragraphs)
