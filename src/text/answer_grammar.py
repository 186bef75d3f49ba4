"""The grammar of a whole answer, where a request forces calls or a form upon it.

Written in llguidance's dialect of Lark, for `StructuredOutput.grammar`. Calls are written as the
model's own syntax has them, so that a forced call is one that the model was trained to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from src.core.errors import InvalidRequestError
from src.core.structured_output import PARAM, StructuredOutput
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

# A tenth of the time that it takes to spell them for a grammar.
_encode: Final = msgspec.json.Encoder().encode

Tools: TypeAlias = Sequence[Mapping[str, Any]]
TokenOf: TypeAlias = Callable[[str], int | None]
"""Returns the id of the special token that a tag is, or None for one that is text."""


class AnswerForm(NamedTuple):
    """What an answer must conform to, if anything; whether all calls in it are then whole."""

    output: StructuredOutput | None
    has_calls: bool = False


def answer_form(
    token_of: TokenOf,
    wanted: StructuredOutput | None,
    calls: Syntax | None,
    offer: ToolOffer,
    reasoning: ReasoningSyntax | None,
    stage: str,
    max_bytes: int | None = None,
) -> AnswerForm:
    """Return what the whole answer must conform to.

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
    max_bytes
        What the parameters of functions may have in all, where a grammar is made of them.

    Raises
    ------
    InvalidRequestError
        The parameters of a function are no object or are too large, and a grammar is made of them.
    """
    grammar = AnswerGrammar(token_of, max_bytes)
    parallel = offer.parallel
    if calls is not None and offer.choice != "required" and not _may_join(calls, wanted):
        # They can be read, but no grammar tells them from the rest of the answer.
        calls = None
    if calls is not None and offer.choice == "required":
        answer = grammar.calls(calls, offer.tools, parallel=parallel)
    elif wanted is not None:
        if wanted.kind == "grammar" or (reasoning is None and calls is None):
            return AnswerForm(wanted)
        answer = grammar.form(wanted)
        if calls is not None:
            answer = f"({answer} | {grammar.calls(calls, offer.tools, parallel=parallel)})"
    elif calls is not None and any(tool["function"].get("strict") for tool in offer.tools):
        answer = grammar.text_and_calls(calls, offer.tools, parallel=parallel)
    else:
        return AnswerForm(None)
    thinking = "" if reasoning is None else grammar.thinking(reasoning, stage)
    return AnswerForm(grammar.finish(f"{thinking} {answer}"), has_calls=calls is not None)


class AnswerGrammar:
    """Rules under way. ``token_of`` says which tags are special tokens: no text can be those."""

    def __init__(self, token_of: TokenOf, max_bytes: int | None = None) -> None:
        self._token_of = token_of
        self._max_bytes = max_bytes
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

    def calls(self, syntax: Syntax, tools: Tools, *, parallel: bool) -> str:
        """An expression for one call or, in parallel, for several.

        Raises
        ------
        InvalidRequestError
            A function's parameters are no object, or all together are too large.
        """
        self._call(syntax, tools)
        form = self._form_of(syntax)
        block = f"{self._opening(syntax)} {self._behind_opening(syntax, parallel=parallel)}"
        if not (parallel and form.repeats_tags):
            return block
        return f"{block} ({_text(form.separator or '')} {block}){{0,{MAX_FORCED_CALLS - 1}}}"

    def text_and_calls(self, syntax: Syntax, tools: Tools, *, parallel: bool) -> str:
        """An expression for any text, in which the opening tag begins a call.

        Only the arguments of ``strict`` functions conform to their parameters; the others' are
        objects.

        Raises
        ------
        InvalidRequestError
            The parameters of a strict function are no object, or all together are too large.
        """
        assert syntax.opening is not None
        self._call(syntax, tools, only_strict=True)
        times = f"{{0,{MAX_FORCED_CALLS}}}" if parallel else "?"
        block = self._behind_opening(syntax, parallel=parallel)
        if self._token_of(syntax.opening) is not None:
            self._rule("text", _ANYTHING)
            return f"text ({self._opening(syntax)} {block} text){times}"
        self._rule(f"text_and_tag[stop={json.dumps(syntax.opening)}]", _ANYTHING)
        tag = re.escape(syntax.opening)
        self._rule("TEXT", rf"{_ANYTHING} & ~/(.|\n)*{tag}(.|\n)*/")
        return f"(text_and_tag {block}){times} TEXT"

    def _call(self, syntax: Syntax, tools: Tools, *, only_strict: bool = False) -> None:
        """Add the rule of a call, without what stands around it."""
        form = self._form_of(syntax)
        functions = [tool["function"] for tool in tools]
        schemas = [
            _parameters(index, function)
            if function.get("strict") or not only_strict
            else {"type": "object", "x-guidance": _COMPACT}
            for index, function in enumerate(functions)
        ]
        self._check_size(schemas)
        calls = []
        for index, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
            self._rule(f"arguments_{index}", "%json " + json.dumps(schema, ensure_ascii=False))
            head = f"{_text(form.head(function['name']))} {self._tag(form.mark)}"
            calls.append(f"{head} arguments_{index} {_text(form.after)}")
        self._rule("call", " | ".join(calls))

    def _check_size(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Refuse what the engine would: spelling a large grammar keeps all threads waiting."""
        size = sum(len(_encode(schema)) for schema in schemas)
        if self._max_bytes is not None and size > self._max_bytes:
            raise InvalidRequestError(
                f"{PARAM}: may have at most {self._max_bytes} bytes, got {size}",
                param=PARAM,
                code="invalid_grammar",
            )

    def _opening(self, syntax: Syntax) -> str:
        return self._tag(syntax.opening if self._form_of(syntax).tagged else None)

    def _behind_opening(self, syntax: Syntax, *, parallel: bool) -> str:
        form = self._form_of(syntax)
        closing = self._tag(syntax.closing if form.tagged else None)
        more = ""
        if parallel and form.separator is not None and not form.repeats_tags:
            more = f"({_text(form.separator)} call){{0,{MAX_FORCED_CALLS - 1}}}"
        return f"{_text(form.first)} call {more} {_text(form.last)} {closing}"

    def _form_of(self, syntax: Syntax) -> _Form:
        is_marked = syntax.name == "mistral" and self._token_of("[ARGS]") is not None
        return _FORMS["mistral_marked" if is_marked else syntax.name]

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

    ``first`` and ``last`` stand next to the tags, ``before`` has the place of the function's name
    (``None``: it stands there alone, and not as JSON); ``mark`` is another tag, behind it. Without
    a ``separator`` there is one call only.
    """

    before: str | None
    mark: str | None = None
    after: str = "}"
    first: str = ""
    last: str = ""
    separator: str | None = None
    tagged: bool = True
    repeats_tags: bool = False

    def head(self, name: str) -> str:
        """What stands before the arguments of a call of this function."""
        if self.before is None:
            return name
        return self.before.replace("NAME", json.dumps(name, ensure_ascii=False))


_OBJECT: Final = '{"name": NAME, "arguments": '
_FORMS: Final[Mapping[str, _Form]] = {
    "hermes": _Form(_OBJECT, first="\n", last="\n", separator="\n", repeats_tags=True),
    # Its templates refuse a message with several calls.
    "llama3_json": _Form('{"name": NAME, "parameters": ', tagged=False),
    "mistral": _Form(_OBJECT, first="[", last="]", separator=", "),
    # Of tokenizers that have the mark.
    "mistral_marked": _Form(None, "[ARGS]", after="", separator="", repeats_tags=True),
    "json": _Form(_OBJECT, first="[", last="]", separator=", ", tagged=False),
}


_JSON: Final = ("json_schema", "json_object")


def forced_syntax(syntax: Syntax | None) -> Syntax:
    """The syntax in which calls are forced: there is no grammar of Python for JSON schemas."""
    return SYNTAXES["json"] if syntax is None or syntax.name not in _FORMS else syntax


def _may_join(syntax: Syntax, wanted: StructuredOutput | None) -> bool:
    """Whether a grammar can tell a call from the rest: by its tag, and at its first character."""
    form = _FORMS.get(syntax.name)
    return form is not None and form.tagged and (wanted is None or wanted.kind in _JSON)


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
    # Of a function that is not strict, what cannot be enforced is left out.
    options = _COMPACT if function.get("strict") else {**_COMPACT, "lenient": True}
    return {"type": "object", **closed, **schema, "x-guidance": options}
