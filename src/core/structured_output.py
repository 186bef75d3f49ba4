"""Constraints on the generated text: JSON, regular expression, choice or grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

PARAM: Final = "structured_output"
"""The name of the sampling parameter."""


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint that the whole generated text must satisfy.

    Make one by ``json``, ``json_object``, ``regex``, ``choice`` or ``grammar``.

    Attributes
    ----------
    kind
        Which language ``value`` is written in.
    value
        ``json_schema``: the schema as JSON text. ``regex``: the pattern, which must match the whole
        text. ``choice``: the allowed texts. ``grammar``: a grammar in llguidance's dialect of Lark.
        ``json_object``: empty.
    any_whitespace
        Whether any white space is allowed between JSON tokens. Otherwise JSON is compact, with the
        separators ``", "`` and ``": "``, so that the model cannot waste tokens on white space.
    whitespace_pattern
        Regular expression for the white space between JSON tokens; ``None``: as above.
    """

    kind: Kind
    value: str | tuple[str, ...] = ""
    any_whitespace: bool = True
    whitespace_pattern: str | None = None

    @classmethod
    def json(
        cls, schema: Mapping[str, Any] | bool | str, *, any_whitespace: bool = True
    ) -> StructuredOutput:
        """JSON that is valid under ``schema``, which is JSON text or a decoded schema."""
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return cls(kind="json_schema", value=text, any_whitespace=any_whitespace)

    @classmethod
    def json_object(cls, *, any_whitespace: bool = True) -> StructuredOutput:
        """Any JSON object."""
        return cls(kind="json_object", any_whitespace=any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        r"""Text that the pattern matches as a whole; Rust's syntax, with ``\d`` for 0 to 9."""
        return cls(kind="regex", value=pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> StructuredOutput:
        """One of the texts."""
        return cls(kind="choice", value=tuple(texts))

    @classmethod
    def grammar(cls, text: str) -> StructuredOutput:
        """Text that matches the ``start`` rule of the Lark grammar."""
        return cls(kind="grammar", value=text)
