"""Syntaxes that write each argument separately, as text between tags."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from src.text.source import MismatchError, Source, Steps
from src.text.tool_calls.calls import Calls
from src.text.tool_calls.json_calls import HERMES_FORM
from src.text.tool_calls.json_values import read_value
from src.text.tool_calls.python_values import NAME_RUN
from src.text.tool_calls.syntax import Form, Members, Slot, Syntax
from src.text.tool_calls.typed_values import ANY, TEXT, Kinds, json_of, quoted_inside
from src.text.tool_calls.value_ends import KEY_RUN, ValueEnd, ValueTags

_QWEN3_TAGS: Final = ValueTags(
    closers=("</parameter>", "</function>", "</tool_call>"),
    openers=("<parameter=", "<function=", "<tool_call>"),
    argument="<parameter=",
    behind_key=">",
    on_lines=True,
)
_GLM_TAGS: Final = ValueTags(
    closers=("</arg_value>", "</tool_call>"),
    openers=("<arg_value>", "<tool_call>"),
    argument="<arg_key>",
    behind_key="</arg_key>",
    on_lines=False,
)


class _ArgumentWriter:
    """Builds the JSON object of a call's arguments, argument by argument."""

    def __init__(self, calls: Calls, name: str, tags: ValueTags) -> None:
        calls.begin(name)
        self._calls = calls
        self._tags = tags
        self._kinds = calls.functions[name]
        self._keys: set[str] = set()
        # Whether the last value had its closing tag; whether the argument that is read is made up.
        self._is_closed = True
        self._is_made_up = False

    def read(self, key: str) -> Steps[None]:
        """Read the value of argument ``key``, and the closing tag behind it.

        Raises
        ------
        MismatchError
            The name is empty or was used before, or the value has no end.
        """
        if not key or key in self._keys:
            raise MismatchError
        calls, source = self._calls, self._calls.source
        if self._tags.on_lines:
            yield from source.starts_with("\n")
        calls.argue((", " if self._keys else "{") + f'"{quoted_inside(key)}": ')
        self._keys.add(key)
        self._is_made_up = not self._is_closed and key not in self._kinds
        kinds = self._kinds.get(key, ANY)
        if kinds == TEXT:
            yield from self._read_text()
        else:
            calls.argue(json_of((yield from self._read_value(kinds)), kinds))

    def end(self) -> None:
        """There are no more."""
        if self._keys:
            self._calls.argue("}")
        self._calls.complete()

    def _read_text(self) -> Steps[None]:
        calls = self._calls
        text = _Text()
        calls.argue('"')
        if not (yield from calls.copy(self._to_end(), text.spell)):
            raise MismatchError
        if not (yield from self._leaves_break_out()):
            calls.argue(quoted_inside(text.held))
        calls.argue('"')

    def _read_value(self, kinds: Kinds) -> Steps[str]:
        """Consume a value that may be JSON, and its closing tag; return the value's text."""
        source = self._calls.source
        assert source.captured is None
        captured: list[str] = []
        source.captured = captured
        try:
            if "string" not in kinds:
                # A string inside the JSON may contain the tag.
                with contextlib.suppress(MismatchError):
                    yield from read_value(source)
            has_end = yield from self._to_end()
        finally:
            source.captured = None
        if not has_end:
            raise MismatchError
        written = "".join(captured)
        return written.removesuffix("\n") if (yield from self._leaves_break_out()) else written

    def _to_end(self) -> Steps[bool]:
        """Consume the value; say whether there is a tag that ends it."""
        calls, tags = self._calls, self._tags
        is_wrapped = calls.opened == tags.openers[-1]
        end = ValueEnd(
            calls.source,
            tags,
            self._takes,
            is_wrapped=is_wrapped,
            is_made_up=self._is_made_up,
            is_exact=calls.certain,
        )
        return (yield from end.up_to())

    def _takes(self, key: str, begins_line: bool) -> bool:
        return bool(key) and key not in self._keys and (begins_line or key in self._kinds)

    def _leaves_break_out(self) -> Steps[bool]:
        """Consume the closing tag; say whether a line break before it is not part of the value."""
        self._is_closed = yield from self._calls.source.starts_with(self._tags.closer)
        return self._tags.on_lines or not self._is_closed


class _Text:
    """Escapes a streamed text for JSON; a line break at its end is held back."""

    def __init__(self) -> None:
        self.held = ""

    def spell(self, text: str) -> str:
        text = self.held + text
        shown = text.removesuffix("\n")
        self.held = text[len(shown) :]
        return quoted_inside(shown)


def _ends(source: Source, tag: str, others: Sequence[str]) -> Steps[bool]:
    """Consume the tag after the last argument.

    It may be missing where one of the other tags comes next, or at the end of an answer.
    """
    if (yield from source.starts_with(tag)):
        return True
    if (yield from source.ahead(source.starts_with_any(others))):
        return True
    return not (yield from source.peek()) and not source.is_cut_short


def _read_qwen3_coder(calls: Calls) -> Steps[None]:
    """``<function=name>``, ``<parameter=key>`` with its value for each argument."""
    source = calls.source
    if calls.opened == "<tool_call>":
        yield from source.run_space()
        if (yield from source.peek()) == "{":
            yield from calls.read_object()
            return
        yield from source.expect("<function=")
    name = yield from source.run(NAME_RUN)
    yield from source.expect(">")
    arguments = _ArgumentWriter(calls, name, _QWEN3_TAGS)
    while True:
        yield from source.run_space()
        if (yield from _ends(source, "</function>", ("</tool_call>", *_QWEN3_TAGS.calls))):
            break
        yield from source.expect("<parameter=")
        key = yield from source.run(KEY_RUN)
        yield from source.expect(">")
        yield from arguments.read(key.strip())
    arguments.end()


def _read_glm(calls: Calls) -> Steps[None]:
    """The name, ``<arg_key>`` and ``<arg_value>`` for each argument."""
    source = calls.source
    yield from source.run_space()
    if (yield from source.peek()) == "{":
        yield from calls.read_object()
        return
    arguments = _ArgumentWriter(calls, (yield from source.run(NAME_RUN)), _GLM_TAGS)
    while True:
        yield from source.run_space()
        if (yield from _ends(source, "</tool_call>", _GLM_TAGS.calls)):
            break
        yield from source.expect("<arg_key>")
        key = yield from source.run(KEY_RUN)
        yield from source.expect("</arg_key>")
        yield from source.run_space()
        # Some of these models leave this one out.
        yield from source.starts_with("<arg_value>")
        yield from arguments.read(key.strip())
    arguments.end()


QWEN3_CODER: Final = Syntax(
    name="qwen3_coder",
    models="Qwen3-Coder, Qwen 3.5, Nemotron 3",
    example=(
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    ),
    shown_by=(("<function=", "<parameter="),),
    read=_read_qwen3_coder,
    openings=("<tool_call>", "<function="),
    closings=("</tool_call>",),
    marks=("</function>", "<parameter=", "</parameter>"),
    is_typed=True,
    forms=(
        Form(
            (
                "<tool_call>\n<function=",
                Slot.NAME,
                ">\n",
                Slot.ARGUMENTS,
                "</function>\n</tool_call>",
            ),
            separator="\n",
            members=Members("<parameter=", ">\n", "\n</parameter>\n", "</parameter>"),
        ),
        HERMES_FORM,
    ),
)
GLM45: Final = Syntax(
    name="glm45",
    models="GLM-4.5 to 4.7",
    example="<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    shown_by=("<arg_key>",),
    read=_read_glm,
    openings=("<tool_call>",),
    closings=("</tool_call>",),
    marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    is_typed=True,
    forms=(
        Form(
            ("<tool_call>", Slot.NAME, "\n", Slot.ARGUMENTS, "</tool_call>"),
            separator="\n",
            members=Members(
                "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>"
            ),
        ),
        HERMES_FORM,
    ),
)
