"""What the text of an answer must conform to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

PARAM: Final = "structured_output"
"""Its name among the parameters of a request."""


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that the generated text must have, whole, from its first character to its last.

    The constructors (``json``, ``json_object``, ``regex``, ``choice``, ``grammar``) are the easy
    way to one.

    Attributes
    ----------
    kind
        Which language ``value`` is written in.
    value
        ``json_schema``: the schema as JSON text. ``regex``: the pattern, of which the whole text is
        a match. ``choice``: the texts of which one is written. ``grammar``: a grammar in
        llguidance's dialect of Lark. ``json_object``: empty.
    any_whitespace
        Whether free white space may stand between the tokens of JSON. Without it JSON is compact
        (``", "`` and ``": "`` separate), and the model has fewer ways to waste its budget.
    whitespace_pattern
        Regular expression of the white space between the tokens of JSON, in place of any.
    """

    kind: Kind
    value: str | tuple[str, ...] = ""
    any_whitespace: bool = True
    whitespace_pattern: str | None = None

    @classmethod
    def json(
        cls, schema: Mapping[str, Any] | bool | str, *, any_whitespace: bool = True
    ) -> StructuredOutput:
        """JSON that is valid under the schema, given as JSON text or as what ``json`` reads."""
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return cls(kind="json_schema", value=text, any_whitespace=any_whitespace)

    @classmethod
    def json_object(cls, *, any_whitespace: bool = True) -> StructuredOutput:
        """Any JSON object."""
        return cls(kind="json_object", any_whitespace=any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        r"""Text of which the whole is a match of the pattern: Rust's syntax, ``\d`` is 0 to 9."""
        return cls(kind="regex", value=pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> StructuredOutput:
        """One of the texts."""
        return cls(kind="choice", value=tuple(texts))

    @classmethod
    def grammar(cls, text: str) -> StructuredOutput:
        """Text that the Lark grammar's ``start`` rule derives."""
        return cls(kind="grammar", value=text)
