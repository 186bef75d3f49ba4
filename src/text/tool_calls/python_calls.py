"""Syntaxes whose calls are written as Python's."""

from __future__ import annotations

from typing import Final

from src.text.source import MismatchError, Source, Steps, finished
from src.text.tool_calls.calls import Calls
from src.text.tool_calls.json_calls import (
    LIST_START,
    OBJECT,
    OBJECT_START,
    read_items,
    read_several,
)
from src.text.tool_calls.python_values import NAME_RUN, next_item, read_arguments, read_brackets
from src.text.tool_calls.syntax import Form, Syntax

_START: Final = r"\[(?=[ \t\r\n]*[A-Za-z0-9_.\-]*(?:\(|\Z))"


def _read_pythonic(calls: Calls) -> Steps[None]:
    """``[name(argument=value, ...), ...]``."""
    yield from calls.source.run_space()
    yield from calls.source.expect("[")
    yield from _read_calls(calls)


def _read_calls(calls: Calls) -> Steps[None]:
    source = calls.source
    while True:
        yield from source.run_space()
        yield from _read_call(calls)
        if not (yield from next_item(source, "]")):
            break
    yield from source.expect("]")


def _read_call(calls: Calls) -> Steps[None]:
    """A call; one whose brackets are in order but whose arguments are no literals is text."""
    source = calls.source
    name = yield from source.run(NAME_RUN)
    if name not in calls.functions:
        calls.reject()
    written = yield from read_brackets(source)
    try:
        arguments = _arguments(written)
        calls.begin(name)
        calls.argue(arguments)
    except MismatchError:
        calls.reject()
    calls.complete()


def _arguments(written: str) -> str:
    """Return the JSON of the arguments that ``(name=value, ...)`` spells."""
    source = Source()
    source.feed(written)
    source.end()
    return finished(read_arguments(source))


def _read_either(calls: Calls) -> Steps[None]:
    """Calls as Python's, or as JSON."""
    source = calls.source
    yield from source.run_space()
    if (yield from source.peek()) == "{":
        yield from read_several(calls)
        return
    yield from source.expect("[")
    yield from source.run_space()
    if (yield from source.peek()) == "{":
        yield from read_items(calls)
    else:
        yield from _read_calls(calls)


LLAMA4_PYTHONIC: Final = Syntax(
    name="llama4_pythonic",
    models="Llama 4",
    example="<|python_start|>[add(a=1)]<|python_end|>",
    shown_by=("<|python_start|>",),
    read=_read_either,
    openings=("<|python_start|>",),
    closings=("<|python_end|>",),
    starts=(_START, LIST_START, OBJECT_START),
    siblings=(OBJECT_START,),
)
PYTHONIC: Final = Syntax(
    name="pythonic",
    models="Llama 3.2, ToolACE",
    example="[add(a=1)]",
    shown_by=("[func_name1(",),
    read=_read_pythonic,
    openings=("<|python_start|>",),
    closings=("<|python_end|>",),
    starts=(_START,),
)
NEMOTRON_JSON: Final = Syntax(
    name="nemotron_json",
    models="Nemotron Nano 2, Llama-Nemotron",
    example='<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>',
    shown_by=("<TOOLCALL>",),
    read=_read_either,
    openings=("<TOOLCALL>",),
    closings=("</TOOLCALL>",),
    siblings=(OBJECT_START,),
    forms=(Form(OBJECT, begin="<TOOLCALL>[", end="]</TOOLCALL>", separator=", "),),
)
