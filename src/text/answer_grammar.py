"""The grammar of a whole answer, where a request forces calls or a form upon it.

Written in llguidance's dialect of Lark, for `StructuredOutput.grammar`. Calls are written as the
model's own syntax has them, so that a forced call is one that the model was trained to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from src.core.errors import InvalidRequestError
from src.core.structured_output import PARAM, StructuredOutput
from src.text.answer import ToolOffer
from src.text.reasoning import ReasoningSyntax
from src.text.tool_calls.forcing import (
    COMPACT,
    ForcedCalls,
    Member,
    TokenOf,
    forced_calls,
    joining_calls,
    members_of,
)
from src.text.tool_calls.syntax import Form, Members, Slot, Syntax
from src.text.tool_calls.value_ends import GAP_PATTERN

MAX_FORCED_CALLS: Final = 16
"""Calls in an answer that is forced to call: a model that found no end would go on for ever."""

_SPACE: Final = r"/[ \t\r\n]{0,16}/"
_ANYTHING: Final = r"/(.|\n)*/"
# In JSON where it is free, as everywhere else.
_WHITE_SPACE: Final = r"[ \t\r\n]{1,64}"
_TAG: Final = re.compile(r"<[^<>]*>")
# What ends a regular expression in Lark, and what is escaped already.
_UNESCAPED: Final = re.compile(r"\\.|[/\n]", re.DOTALL)
# A tenth of the time that it takes to spell them for a grammar.
_encode: Final = msgspec.json.Encoder().encode

_JSON: Final = ("json_schema", "json_object")


class AnswerForm(NamedTuple):
    """What an answer must conform to, if anything, and the calls that it may then have.

    With ``calls`` an opening tag always begins a call, and the call is whole unless the answer is
    cut short.
    """

    output: StructuredOutput | None
    calls: ForcedCalls | None = None


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
    forced = None
    if calls is not None and offer.choice == "required":
        forced = forced_calls(calls, offer.tools, token_of)
        answer = grammar.calls(forced, parallel=parallel)
    elif wanted is not None:
        if wanted.kind in _JSON and calls is not None:
            forced = joining_calls(calls, offer.tools, token_of)
        if wanted.kind == "grammar" or (reasoning is None and forced is None):
            return AnswerForm(wanted)
        answer = grammar.form(wanted)
        if reasoning is not None:
            answer = f"{grammar.answers(reasoning)} {answer}"
        if forced is not None:
            answer = f"({answer} | {grammar.calls(forced, parallel=parallel)})"
    elif calls is not None and any(tool["function"].get("strict") for tool in offer.tools):
        forced = joining_calls(calls, offer.tools, token_of, only_strict=True)
        if forced is None:
            # Calls are still read, but no grammar can be made of them and free text.
            return AnswerForm(None)
        answer = grammar.text_and_calls(forced, parallel=parallel)
    else:
        return AnswerForm(None)
    thinking = "" if reasoning is None else grammar.thinking(reasoning, stage)
    return AnswerForm(grammar.finish(f"{thinking} {answer}"), forced)


class _Ending(NamedTuple):
    """The end of a call: the tags that are looked at, their text, and what stands behind that."""

    tags: tuple[str, ...]
    text: str
    behind: str


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
        behind = self._expression(syntax.resumes, syntax.tags) if syntax.resumes else "SPACE"
        thinking = f"thought{end} {behind}"
        opening = self._expression(syntax.opening, syntax.tags)
        return thinking if stage == "open" else f"({opening} {thinking})?"

    def answers(self, syntax: ReasoningSyntax) -> str:
        """An expression for what stands before the text of an answer."""
        return self._expression(syntax.answers, syntax.tags)

    def calls(self, calls: ForcedCalls, *, parallel: bool) -> str:
        """An expression for one call or, in parallel, for several."""
        self._call(calls)
        form, tags = calls.form, calls.syntax.tags
        begin, end = self._expression(form.begin, tags), self._expression(form.end, tags)
        return f"{begin} {self._several(form, parallel=parallel)} {end}"

    def text_and_calls(self, calls: ForcedCalls, *, parallel: bool) -> str:
        """An expression for any text, in which the opening tag begins a call."""
        form, syntax = calls.form, calls.syntax
        opening = next(tag for tag in syntax.openings if form.beginning.startswith(tag))
        others = [tag for tag in syntax.openings if tag != opening and self._token_of(tag) is None]
        self._call(calls, without=opening)
        times = f"{{0,{MAX_FORCED_CALLS}}}" if parallel else "?"
        block = "call"
        if form.begin:
            begin = self._expression(form.begin.removeprefix(opening), syntax.tags)
            several = self._several(form, parallel=parallel)
            block = f"{begin} {several} {self._expression(form.end, syntax.tags)}"
        token_id = self._token_of(opening)
        if token_id is not None:
            self._rule("text", _without(others))
            return f"text (<[{token_id}]> {block} text){times}"
        self._rule(f"text_and_tag[stop={json.dumps(opening)}]", _without(others))
        self._rule("TEXT", _without([opening, *others]))
        return f"(text_and_tag {block}){times} TEXT"

    def _several(self, form: Form, *, parallel: bool) -> str:
        if not parallel or form.separator is None:
            return "call"
        return f"call ({_text(form.separator)} call){{0,{MAX_FORCED_CALLS - 1}}}"

    def _call(self, calls: ForcedCalls, *, without: str = "") -> None:
        """Add the rule of a call, without the text ``without`` at its beginning."""
        form = calls.form
        self._check_size(schema for _, schema in calls.functions)
        if form.members is not None:
            # Definitions are written again for each argument that refers to them.
            self._check_size(
                member.schema
                for _, schema in calls.functions
                for member in members_of(schema)
                if member.schema is not None
            )
        parts = list(form.call)
        if without and not form.begin and isinstance(parts[0], str):
            parts[0] = parts[0].removeprefix(without)
        if Slot.NUMBER in parts:
            self._rule("number", "/[0-9]{1,4}/")
        tags = calls.syntax.tags
        expressions = []
        for index, (name, schema) in enumerate(calls.functions):
            of_call = parts
            if form.members is None:
                rule = "%json " + json.dumps(schema, ensure_ascii=False)
            elif (ending := self._ending(form, schema, tags)) is not None:
                rule = self._members_and_end(index, schema, form.members, ending)
                of_call = parts[: parts.index(Slot.ARGUMENTS) + 1]
            else:
                rule = self._members(index, schema, form.members, tags)
            self._rule(f"arguments_{index}", rule)
            written = {
                Slot.NAME: _text(name),
                Slot.QUOTED_NAME: _text(json.dumps(name, ensure_ascii=False)),
                Slot.ARGUMENTS: f"arguments_{index}",
                Slot.NUMBER: "number",
            }
            expressions.append(
                " ".join(
                    self._expression(part, tags) if isinstance(part, str) else written[part]
                    for part in of_call
                )
            )
        self._rule("call", " | ".join(expressions))

    def _members(
        self, function: int, schema: Mapping[str, Any], members: Members, tags: Sequence[str]
    ) -> str:
        """An expression for arguments that are written one by one, and end at a special token."""
        _, closing, behind = members.after.partition(members.closing)
        # A text stops at the tag and includes it, unless the tag is a special token.
        is_token = self._token_of(closing) is not None
        stop = "" if is_token else f"[stop={json.dumps(closing)}]"
        end_of_text = self._expression((closing if is_token else "") + behind, tags)
        end = self._expression(members.after, tags)
        expressions = []
        for index, member in enumerate(members_of(schema)):
            value = f"value_{function}_{index}"
            is_text = _is_free(member)
            if is_text:
                self._rule(value + stop, _ANYTHING)
            else:
                self._rule(value, _value_of(member))
            head = self._expression(f"{members.before}{member.name}{members.between}", tags)
            expression = f"{head} {value} {end_of_text if is_text else end}"
            expressions.append(expression if member.is_required else f"({expression})?")
        return " ".join(expressions) or '""'

    def _ending(self, form: Form, schema: Mapping[str, Any], tags: Sequence[str]) -> _Ending | None:
        """How such a call ends, where text of a string is known from tags by what follows alone."""
        assert form.members is not None
        if not any(map(_is_free, members_of(schema))):
            return None
        behind = "".join(
            part
            for part in form.call[form.call.index(Slot.ARGUMENTS) + 1 :]
            if isinstance(part, str)
        )
        looked_at = [tag for tag in _TAG.findall(behind) if self._token_of(tag) is None]
        bare = (form.members.closing, form.members.before)
        if not looked_at or any(self._token_of(tag) is not None for tag in bare):
            return None
        place = behind.rindex(looked_at[-1]) + len(looked_at[-1])
        if any(self._token_of(tag) is not None for tag in _TAG.findall(behind[:place])):
            return None
        return _Ending(tuple(looked_at), behind[:place], self._expression(behind[place:], tags))

    def _texts_to_tags(self, members: Members, ending: _Ending) -> None:
        """Rules of a text with the tags behind it, which are the same for all functions."""
        closing = _pattern(members.closing)
        to_next = f"{closing}{GAP_PATTERN}{_pattern(members.before)}"
        to_end = GAP_PATTERN.join([closing, *map(_pattern, ending.tags)])
        for name, end, other in (
            ("text_to_next", to_next, to_end),
            ("text_to_end", to_end, to_next),
        ):
            if not any(rule.startswith(name) for rule in self._rules):
                without = f"~/(.|\\n)*{other}(.|\\n)*/"
                self._rule(f"{name}[lazy]", f"/(.|\\n)*{end}/ & {without}")

    def _members_and_end(
        self, function: int, schema: Mapping[str, Any], members: Members, ending: _Ending
    ) -> str:
        """An expression for such arguments and the rest of the call.

        A text goes on to its closing tag with the next argument's tag behind it, or with the end of
        the call: one of two expressions, of which the first to match has the tags too.
        """
        name = f"{function}"
        self._texts_to_tags(members, ending)
        every = list(members_of(schema))
        for index, member in reversed(list(enumerate(every))):
            later = every[index + 1 :]
            ways = []
            if _is_free(member):
                if later:
                    ways.append(f"text_to_next named_{name}_{index + 1}")
                if not any(one.is_required for one in later):
                    ways.append(f"text_to_end {ending.behind}")
            else:
                self._rule(f"value_{name}_{index}", _value_of(member))
                ways.append(f"value_{name}_{index} {_text(members.after)} next_{name}_{index + 1}")
            head = f"{_text(member.name + members.between)} ({' | '.join(ways)})"
            named, follows = [head], [f"{_text(members.before)} named_{name}_{index}"]
            if not member.is_required:
                if later:
                    named.append(f"named_{name}_{index + 1}")
                follows = [f"{_text(members.before)} {head}", f"next_{name}_{index + 1}"]
            self._rule(f"named_{name}_{index}", " | ".join(named))
            self._rule(f"next_{name}_{index}", " | ".join(follows))
        self._rule(f"next_{name}_{len(every)}", f"{_text(ending.text)} {ending.behind}")
        return f"next_{name}_0"

    def _check_size(self, schemas: Iterable[Mapping[str, Any]]) -> None:
        """Refuse what the engine would: spelling a large grammar keeps all threads waiting."""
        if self._max_bytes is None:
            return
        size = 0
        for schema in schemas:
            size += len(_encode(schema))
            if size > self._max_bytes:
                raise InvalidRequestError(
                    f"{PARAM}: may have at most {self._max_bytes} bytes, got {size} or more",
                    param=PARAM,
                    code="invalid_grammar",
                )

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

    def _expression(self, text: str, tags: Sequence[str]) -> str:
        """An expression for this text, in which some of these tags may be special tokens."""
        special = {tag: token_id for tag in tags if (token_id := self._token_of(tag)) is not None}
        if not special or not text:
            return _text(text)
        parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
        written = [
            f"<[{special[part]}]>" if part in special else _text(part) for part in parts if part
        ]
        return " ".join(written) or '""'

    def _rule(self, name: str, expression: str) -> None:
        self._rules.append(f"{name}: {expression}")


def _without(tags: Sequence[str]) -> str:
    """An expression for any text that has none of these tags in it."""
    if not tags:
        return _ANYTHING
    return rf"{_ANYTHING} & ~/(.|\n)*({'|'.join(map(_pattern, tags))})(.|\n)*/"


def _is_free(member: Member) -> bool:
    """Whether an argument is any text."""
    return member.schema is None and member.texts is None


def _value_of(member: Member) -> str:
    if member.texts is not None:
        return " | ".join(map(_text, member.texts))
    return "%json " + json.dumps(member.schema, ensure_ascii=False)


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


def _escaped(match: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(match[0], match[0])


def _spaced(schema: Any, output: StructuredOutput) -> dict[str, Any]:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    spaces = {"whitespace_pattern": output.whitespace_pattern or _WHITE_SPACE}
    return {**schema, "x-guidance": spaces if output.any_whitespace else COMPACT}
