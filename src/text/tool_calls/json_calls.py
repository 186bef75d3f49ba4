"""Syntaxes whose calls are JSON objects."""

from __future__ import annotations

import secrets
import string
from typing import Final

from src.text.source import Steps
from src.text.tool_calls.calls import Calls
from src.text.tool_calls.python_values import NAME_RUN, next_item
from src.text.tool_calls.syntax import Form, Slot, Syntax

_ALPHANUMERIC: Final = string.ascii_letters + string.digits

# Whatever may follow the bracket of one that is read, so that it is the same at a piece's end.
OBJECT_START: Final = r"\{(?=[ \t\r\n]*(?:[\"}]|\Z))"
LIST_START: Final = r"\[(?=[ \t\r\n]*(?:\{|\Z))"
"""What begins a call, and a list of calls, where no tag says so."""

OBJECT: Final = ('{"name": ', Slot.QUOTED_NAME, ', "arguments": ', Slot.ARGUMENTS, "}")
"""A forced call in JSON."""
HERMES_FORM: Final = Form(
    ('<tool_call>\n{"name": ', *OBJECT[1:-1], "}\n</tool_call>"), separator="\n"
)
_LIST_FORM: Final = Form(OBJECT, begin="[", end="]", separator=", ")


def _mistral_id() -> str:
    """Mistral's chat templates take ids of nine letters and digits and no others."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def _read_one(calls: Calls) -> Steps[None]:
    yield from calls.source.run_space()
    yield from calls.read_object()


def read_several(calls: Calls) -> Steps[None]:
    """A list of calls, or one call or several, with ``;``, a comma or white space between."""
    source = calls.source
    yield from source.run_space()
    if (yield from source.starts_with("[")):
        yield from read_items(calls)
        return
    yield from calls.read_object()
    while True:
        yield from source.run_space()
        parted = yield from source.starts_with_any((";", ","))
        yield from source.run_space()
        if not parted and (yield from source.peek()) != "{":
            return
        yield from calls.read_object()


def read_items(calls: Calls) -> Steps[None]:
    """The items of a list of calls, and its end."""
    source = calls.source
    while True:
        yield from source.run_space()
        yield from calls.read_object()
        if not (yield from next_item(source, "]")):
            break
    yield from source.expect("]")


def _read_fenced(calls: Calls) -> Steps[None]:
    """Calls, perhaps in a block of code."""
    source = calls.source
    if calls.opened == "```":
        yield from source.starts_with("json")
    yield from read_several(calls)


def _read_mistral(calls: Calls) -> Steps[None]:
    """A list of calls, or ``name{...}`` of one call, with marks between in newer tokenizers."""
    source = calls.source
    yield from source.run_space()
    if (yield from source.peek()) in ("[", "{"):
        yield from read_several(calls)
        return
    name = yield from source.run(NAME_RUN)
    calls.begin(name)
    if (yield from source.starts_with("[CALL_ID]")):
        yield from source.run(NAME_RUN)
    yield from source.starts_with("[ARGS]")
    yield from source.run_space()
    yield from calls.read_arguments()
    calls.complete()


HERMES: Final = Syntax(
    name="hermes",
    models="Hermes, Qwen 2.5 and 3, Granite 4, the bundled demo model",
    example='<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    shown_by=("<tool_call>",),
    read=_read_one,
    openings=("<tool_call>",),
    closings=("</tool_call>",),
    forms=(HERMES_FORM,),
)
LLAMA3_JSON: Final = Syntax(
    name="llama3_json",
    models="Llama 3.1 to 3.3",
    example='{"name": "add", "parameters": {"a": 1}}',
    shown_by=("<|python_tag|>", '"parameters": ', '\\"parameters\\": '),
    read=read_several,
    openings=("<|python_tag|>",),
    starts=(OBJECT_START, LIST_START),
    # Its templates refuse a message with several calls.
    forms=(Form(('{"name": ', Slot.QUOTED_NAME, ', "parameters": ', Slot.ARGUMENTS, "}")),),
)
MISTRAL: Final = Syntax(
    name="mistral",
    models="Mistral, Ministral, Magistral",
    example='[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    shown_by=("[TOOL_CALLS]",),
    read=_read_mistral,
    openings=("[TOOL_CALLS]",),
    marks=("[CALL_ID]", "[ARGS]"),
    siblings=(OBJECT_START,),
    forms=(
        # Of tokenizers that have the mark.
        Form(("[TOOL_CALLS]", Slot.NAME, "[ARGS]", Slot.ARGUMENTS), separator="", needs="[ARGS]"),
        _LIST_FORM._replace(begin="[TOOL_CALLS]["),
    ),
    new_id=_mistral_id,
)
GRANITE: Final = Syntax(
    name="granite",
    models="Granite 3",
    example='<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]',
    shown_by=("<|tool_call|>",),
    read=read_several,
    openings=("<|tool_call|>", "<tool_call>"),
    closings=("</tool_call>",),
    siblings=(OBJECT_START,),
    forms=(_LIST_FORM._replace(begin="<|tool_call|>["),),
)
PHI4_MINI_JSON: Final = Syntax(
    name="phi4_mini_json",
    models="Phi-4-mini",
    example='functools[{"name": "add", "arguments": {"a": 1}}]',
    shown_by=("functools", "<|tool|>"),
    read=read_several,
    openings=("functools", "<|tool_call|>"),
    closings=("</|tool_call|>", "<|/tool_call|>"),
    siblings=(OBJECT_START,),
    forms=(_LIST_FORM._replace(begin="functools["),),
)
JSON: Final = Syntax(
    name="json",
    models="others",
    example='```json\n[{"name": "add", "arguments": {"a": 1}}]\n```',
    read=_read_fenced,
    openings=("<tool_call>", "```"),
    closings=("</tool_call>", "```"),
    starts=(OBJECT_START, LIST_START),
    forms=(_LIST_FORM,),
)
