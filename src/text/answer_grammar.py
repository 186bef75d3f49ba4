"""The grammar of a whole answer, where a request forces calls or a form upon it.

Written in llguidance's dialect of Lark, for `StructuredOutput.grammar`. Calls are written as the
model's own syntax has them, so that a forced call is one that the model was trained to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from src.core.errors import InvalidRequestError
from src.core.structured_output import StructuredOutput
from src.text.answer import ToolOffer
from src.text.reasoning import ReasoningSyntax
from src.text.tool_calls.syntaxes import SYNTAXES, Syntax

MAX_FORCED_CALLS: Final = 16
"""Calls in an answer that is forced to call: a model that found no end would go on for ever."""

_SPACE: Final = r"/[ \t\r\n]{0,16}/"
_ANYTHING: Final = r"/(.|\n)*/"
# In JSON where it is free, as everywhere else.
_WHITE_SPACE: Final = r"[ \t\r\n]{1,64}"
# What ends a regular expression in Lark, and what is escaped already.
_UNESCAPED: Final = re.compile(r"\\.|[/\n]", re.DOTALL)
# As Python's json, and so most training data, writes it.
_COMPACT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

TokenOf: TypeAlias = Callable[[str], int | None]
"""Returns the id of the special token that a tag is, or None for one that is text."""


def answer_grammar(
    token_of: TokenOf,
    wanted: StructuredOutput | None,
    calls: Syntax | None,
    offer: ToolOffer,
    reasoning: ReasoningSyntax | None,
    stage: str,
) -> StructuredOutput | None:
    """Return what the whole answer must conform to; ``None`` for no such thing.

    Parameters
    ----------
    token_of
        Returns the id of the special token that a tag is, or None for one that is text.
    wanted
        The form that the request asks of the answer's text.
    calls, offer
        How calls are written, and the tools.
    reasoning, stage
        How reasoning is marked, and what the answer begins with; see `ReasoningSyntax.stage`.

    Raises
    ------
    InvalidRequestError
        A call is forced of a function whose parameters are no object.
    """
    grammar = AnswerGrammar(token_of)
    parallel = offer.parallel
    if calls is not None and offer.choice == "required":
        answer = grammar.calls(calls, offer.tools, parallel=parallel)
    elif wanted is None or wanted.kind == "grammar":
        return wanted
    else:
        # A tag tells a call from JSON at its first character; from other text it may not.
        either = calls is not None and calls.name in _TAGGED and wanted.kind in _JSON
        if reasoning is None and not either:
            return wanted
        answer = grammar.form(wanted)
        if calls is not None and either:
            answer = f"({answer} | {grammar.calls(calls, offer.tools, parallel=parallel)})"
    thinking = "" if reasoning is None else grammar.thinking(reasoning, stage)
    return grammar.finish(f"{thinking} {answer}")


class AnswerGrammar:
    """Rules under way. ``token_of`` says which tags are special tokens: no text can be those."""

    def __init__(self, token_of: TokenOf) -> None:
        self._token_of = token_of
        self._rules: list[str] = []

    def finish(self, start: str) -> StructuredOutput:
        """The grammar whose answers are ``start``."""
        text = "\n".join([f"start: {start}", *self._rules]) + "\n"
        # Only strings and expressions can have it; it would be taken for the sign of another
        # language of grammars.
        return StructuredOutput.grammar(text.replace("::=", "\\u003a:="))

    def thinking(self, syntax: ReasoningSyntax, stage: str) -> str:
        """An expression for the reasoning before an answer; see `ReasoningSyntax.stage`."""
        closing = self._token_of(syntax.closing)
        if closing is None:
            self._rule(f"thought[stop={json.dumps(syntax.closing)}]", _ANYTHING)
            end = ""
        else:
            self._rule("thought", _ANYTHING)
            end = f" <[{closing}]>"
        self._rule("SPACE", _SPACE)
        thinking = f"thought{end} SPACE"
        return thinking if stage == "open" else f"({self._tag(syntax.opening)} {thinking})?"

    def calls(self, syntax: Syntax, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
        """An expression for one call or, in parallel, for several.

        Raises
        ------
        InvalidRequestError
            A function's parameters are no object.
        """
        form = _FORMS[syntax.name]
        calls = []
        for index, tool in enumerate(tools):
            schema = _parameters(index, tool["function"])
            self._rule(f"arguments_{index}", "%json " + json.dumps(schema, ensure_ascii=False))
            before, after = form.around(json.dumps(tool["function"]["name"], ensure_ascii=False))
            calls.append(f"{_text(before)} arguments_{index} {_text(after)}")
        self._rule("call", " | ".join(calls))
        opening = self._tag(syntax.opening if form.tagged else None)
        closing = self._tag(syntax.closing if form.tagged else None)
        first, last = f"{opening} {_text(form.first)}", f"{_text(form.last)} {closing}"
        if not parallel or form.separator is None:
            return f"{first} call {last}"
        more = f"{{0,{MAX_FORCED_CALLS - 1}}}"
        if form.repeats_tags:
            return f"{first} call {last} ({_text(form.separator)} {first} call {last}){more}"
        return f"{first} call ({_text(form.separator)} call){more} {last}"

    def form(self, output: StructuredOutput) -> str:
        """An expression for text of a form that is no grammar itself."""
        match output.kind:
            case "json_schema":
                assert isinstance(output.value, str)
                schema = json.loads(output.value)
            case "json_object":
                schema = {"type": "object"}
            case "choice":
                self._rule("FORM", " | ".join(map(_text, output.value)))
                return "FORM"
            case "regex":
                assert isinstance(output.value, str)
                self._rule("FORM", f"/{_UNESCAPED.sub(_escaped, output.value)}/")
                return "FORM"
            case "grammar":
                raise AssertionError("a grammar cannot be a part of another")
        self._rule("form", "%json " + json.dumps(_spaced(schema, output), ensure_ascii=False))
        return "form"

    def _tag(self, tag: str | None) -> str:
        token_id = None if tag is None else self._token_of(tag)
        return _text(tag or "") if token_id is None else f"<[{token_id}]>"

    def _rule(self, name: str, expression: str) -> None:
        self._rules.append(f"{name}: {expression}")


class _Form(NamedTuple):
    """How a syntax has a call that is forced, around the JSON text of its arguments.

    ``first`` and ``last`` stand next to the tags, ``before`` has the place of the function's name.
    Without a ``separator`` there is one call only.
    """

    before: str
    after: str = "}"
    first: str = ""
    last: str = ""
    separator: str | None = None
    tagged: bool = True
    repeats_tags: bool = False

    def around(self, name: str) -> tuple[str, str]:
        """What stands before and behind the arguments; ``name`` is JSON text or a bare name."""
        return self.before.replace("NAME", name), self.after


_OBJECT: Final = '{"name": NAME, "arguments": '
_FORMS: Final[Mapping[str, _Form]] = {
    "hermes": _Form(_OBJECT, first="\n", last="\n", separator="\n", repeats_tags=True),
    # Its templates refuse a message with several calls.
    "llama3_json": _Form('{"name": NAME, "parameters": ', tagged=False),
    "mistral": _Form(_OBJECT, first="[", last="]", separator=", "),
    "json": _Form(_OBJECT, first="[", last="]", separator=", ", tagged=False),
}


_TAGGED: Final = frozenset(name for name, form in _FORMS.items() if form.tagged)
_JSON: Final = ("json_schema", "json_object")


def forced_syntax(syntax: Syntax | None) -> Syntax:
    """The syntax in which calls are forced: there is no grammar of Python for JSON schemas."""
    return SYNTAXES["json"] if syntax is None or syntax.name not in _FORMS else syntax


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


def _escaped(match: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(match[0], match[0])


def _spaced(schema: Any, output: StructuredOutput) -> dict[str, Any]:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    spaces = {"whitespace_pattern": output.whitespace_pattern or _WHITE_SPACE}
    return {**schema, "x-guidance": spaces if output.any_whitespace else _COMPACT}


def _parameters(index: int, function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: an object, of the properties that it names alone.

    Functions are called with what they declare, so others are left out unless they are provided
    for by ``additionalProperties``.
    """
    schema = function.get("parameters") or {"properties": {}}
    if schema.get("type", "object") != "object":
        where = f"tools[{index}].function.parameters"
        raise InvalidRequestError(f"{where} must describe an object", param=where)
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **closed, **schema, "x-guidance": _COMPACT}
