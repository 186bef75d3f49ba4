"""Syntaxes that write each argument separately, as text between tags."""

from __future__ import annotations

import contextlib
import re
from typing import Final

from src.text.source import MismatchError, Source, Steps
from src.text.tool_calls.calls import Calls
from src.text.tool_calls.json_calls import HERMES_FORM
from src.text.tool_calls.json_values import read_value
from src.text.tool_calls.python_values import NAME_RUN
from src.text.tool_calls.syntax import Form, Members, Slot, Syntax
from src.text.tool_calls.typed_values import ANY, TEXT, Kinds, json_of, quoted_inside

_KEY_RUN = re.compile(r"[^<>\r\n]*")


class _ArgumentWriter:
    """Builds the JSON object of a call's arguments, argument by argument."""

    def __init__(self, calls: Calls, name: str) -> None:
        calls.begin(name)
        self._calls = calls
        self._kinds = calls.functions[name]
        self._keys: set[str] = set()

    def read(self, key: str, closing: str, *, line: bool) -> Steps[None]:
        """Read the value of argument ``key``, up to ``closing``, which is consumed.

        With ``line`` a line break at either end of the value is not part of it.

        Raises
        ------
        MismatchError
            The name is empty or was used before, or ``closing`` is missing.
        """
        if not key or key in self._keys:
            raise MismatchError
        calls, source = self._calls, self._calls.source
        if line:
            yield from source.starts_with("\n")
        calls.argue((", " if self._keys else "{") + f'"{quoted_inside(key)}": ')
        self._keys.add(key)
        kinds = self._kinds.get(key, ANY)
        if kinds == TEXT:
            yield from self._read_text(closing, line=line)
        else:
            calls.argue(json_of((yield from _read_value(source, kinds, closing, line=line)), kinds))

    def end(self) -> None:
        """There are no more."""
        if self._keys:
            self._calls.argue("}")
        self._calls.complete()

    def _read_text(self, closing: str, *, line: bool) -> Steps[None]:
        calls = self._calls
        text = _Text(holds_break=line)
        calls.argue('"')
        is_closed = yield from calls.copy(calls.source.up_to(closing), text.spell)
        if not is_closed:
            raise MismatchError
        yield from calls.source.expect(closing)
        calls.argue('"')


class _Text:
    """Escapes a streamed text for JSON; a line break at its end is held back."""

    def __init__(self, *, holds_break: bool) -> None:
        self._holds_break = holds_break
        self._held = ""

    def spell(self, text: str) -> str:
        text = self._held + text
        shown = text.removesuffix("\n") if self._holds_break else text
        self._held = text[len(shown) :]
        return quoted_inside(shown)


def _read_value(source: Source, kinds: Kinds, closing: str, *, line: bool) -> Steps[str]:
    """Consume a value that may be JSON, and ``closing``; return the value's text."""
    assert source.captured is None
    captured: list[str] = []
    source.captured = captured
    try:
        if "string" not in kinds:
            # A string inside the JSON may contain the tag.
            with contextlib.suppress(MismatchError):
                yield from read_value(source)
        is_closed = yield from source.up_to(closing)
    finally:
        source.captured = None
    if not is_closed:
        raise MismatchError
    yield from source.expect(closing)
    spelt = "".join(captured)
    return spelt.removesuffix("\n") if line else spelt


def _ends(source: Source, tag: str) -> Steps[bool]:
    """Consume the tag after the last argument, which may be missing at the end of an answer."""
    if (yield from source.starts_with(tag)):
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
    arguments = _ArgumentWriter(calls, name)
    while True:
        yield from source.run_space()
        if (yield from _ends(source, "</function>")):
            break
        yield from source.expect("<parameter=")
        key = yield from source.run(_KEY_RUN)
        yield from source.expect(">")
        yield from arguments.read(key.strip(), "</parameter>", line=True)
    arguments.end()


def _read_glm(calls: Calls) -> Steps[None]:
    """The name, ``<arg_key>`` and ``<arg_value>`` for each argument."""
    source = calls.source
    yield from source.run_space()
    if (yield from source.peek()) == "{":
        yield from calls.read_object()
        return
    arguments = _ArgumentWriter(calls, (yield from source.run(NAME_RUN)))
    while True:
        yield from source.run_space()
        if (yield from _ends(source, "</tool_call>")):
            break
        yield from source.expect("<arg_key>")
        key = yield from source.run(_KEY_RUN)
        yield from source.expect("</arg_key>")
        yield from source.run_space()
        yield from source.expect("<arg_value>")
        yield from arguments.read(key.strip(), "</arg_value>", line=False)
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
