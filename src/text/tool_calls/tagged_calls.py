"""Syntaxes in which tags part a function's name from the JSON of its arguments."""

from __future__ import annotations

import re
from typing import Final

from src.text.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    read_header,
)
from src.text.source import MismatchError, Steps
from src.text.tool_calls.calls import Calls
from src.text.tool_calls.python_values import NAME_RUN
from src.text.tool_calls.syntax import Form, Slot, Syntax

_DEEPSEEK_CALLS: Final = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALLS_END: Final = "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL: Final = "<｜tool▁call▁begin｜>"
_DEEPSEEK_CALL_END: Final = "<｜tool▁call▁end｜>"
_DEEPSEEK_PART: Final = "<｜tool▁sep｜>"

_KIMI_CALLS: Final = "<|tool_calls_section_begin|>"
_KIMI_CALLS_END: Final = "<|tool_calls_section_end|>"
_KIMI_CALL: Final = "<|tool_call_begin|>"
_KIMI_CALL_END: Final = "<|tool_call_end|>"
_KIMI_ARGUMENTS: Final = "<|tool_call_argument_begin|>"

_KIMI_ID_RUN: Final = re.compile(r"[A-Za-z0-9_.:\-]*")


def _read_deepseek_v3(calls: Calls) -> Steps[None]:
    """``function``, the name, and the arguments in a block of code."""
    source = calls.source
    yield from _begin_in_section(calls, _DEEPSEEK_CALLS, _DEEPSEEK_CALL)
    yield from source.run(NAME_RUN)
    yield from source.expect(_DEEPSEEK_PART)
    yield from source.run_space()
    calls.begin((yield from source.run(NAME_RUN)))
    yield from source.run_space()
    if (yield from source.starts_with("```")):
        yield from source.starts_with("json")
        yield from source.run_space()
    yield from calls.read_arguments("```", _DEEPSEEK_CALL_END)
    calls.complete()


def _read_deepseek_v31(calls: Calls) -> Steps[None]:
    """The name and the arguments."""
    source = calls.source
    yield from _begin_in_section(calls, _DEEPSEEK_CALLS, _DEEPSEEK_CALL)
    calls.begin((yield from source.run(NAME_RUN)))
    yield from source.run_space()
    yield from source.expect(_DEEPSEEK_PART)
    yield from source.run_space()
    yield from calls.read_arguments(_DEEPSEEK_CALL_END)
    calls.complete()


def _read_kimi(calls: Calls) -> Steps[None]:
    """``functions.name:0``, which is the call's id too, and the arguments."""
    source = calls.source
    yield from _begin_in_section(calls, _KIMI_CALLS, _KIMI_CALL)
    call_id = yield from source.run(_KIMI_ID_RUN)
    name, _, number = call_id.removeprefix("functions.").partition(":")
    calls.begin(name, call_id if number else None)
    yield from source.run_space()
    yield from source.expect(_KIMI_ARGUMENTS)
    yield from source.run_space()
    yield from calls.read_arguments(_KIMI_CALL_END)
    calls.complete()


def _begin_in_section(calls: Calls, section: str, call: str) -> Steps[None]:
    """Go to the call's beginning: the tag before it may be that of all of them."""
    source = calls.source
    if calls.opened == section:
        yield from source.run_space()
        yield from source.expect(call)
    yield from source.run_space()


def _read_harmony(calls: Calls) -> Steps[None]:
    """A message to a function."""
    source = calls.source
    header = yield from read_header(source, calls.opened)
    if not header.recipient.startswith("functions."):
        raise MismatchError
    calls.begin(header.recipient.removeprefix("functions."))
    yield from source.run_space()
    yield from calls.read_arguments(CALL, END)
    calls.complete()


def _read_llama3_function(calls: Calls) -> Steps[None]:
    """``name>{...}</function>``."""
    source = calls.source
    calls.begin((yield from source.run(NAME_RUN)))
    yield from source.expect(">")
    yield from source.run_space()
    yield from calls.read_arguments("</function>")
    calls.complete()


DEEPSEEK_V3: Final = Syntax(
    name="deepseek_v3",
    models="DeepSeek V3 and R1",
    example=(
        f"{_DEEPSEEK_CALLS}{_DEEPSEEK_CALL}function{_DEEPSEEK_PART}add\n"
        f'```json\n{{"a": 1}}\n```{_DEEPSEEK_CALL_END}{_DEEPSEEK_CALLS_END}'
    ),
    shown_by=((_DEEPSEEK_CALLS, "```json"),),
    read=_read_deepseek_v3,
    openings=(_DEEPSEEK_CALLS, _DEEPSEEK_CALL),
    closings=("```", _DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
    marks=(_DEEPSEEK_PART,),
    forms=(
        Form(
            (
                f"{_DEEPSEEK_CALL}function{_DEEPSEEK_PART}",
                Slot.NAME,
                "\n```json\n",
                Slot.ARGUMENTS,
                f"\n```{_DEEPSEEK_CALL_END}",
            ),
            begin=_DEEPSEEK_CALLS,
            end=_DEEPSEEK_CALLS_END,
            separator="\n",
        ),
    ),
)
DEEPSEEK_V31: Final = Syntax(
    name="deepseek_v31",
    models="DeepSeek V3.1",
    example=(
        f"{_DEEPSEEK_CALLS}{_DEEPSEEK_CALL}add{_DEEPSEEK_PART}"
        f'{{"a": 1}}{_DEEPSEEK_CALL_END}{_DEEPSEEK_CALLS_END}'
    ),
    shown_by=(_DEEPSEEK_CALLS,),
    read=_read_deepseek_v31,
    openings=(_DEEPSEEK_CALLS, _DEEPSEEK_CALL),
    closings=(_DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
    marks=(_DEEPSEEK_PART,),
    forms=(
        Form(
            (
                _DEEPSEEK_CALL,
                Slot.NAME,
                _DEEPSEEK_PART,
                Slot.ARGUMENTS,
                _DEEPSEEK_CALL_END,
            ),
            begin=_DEEPSEEK_CALLS,
            end=_DEEPSEEK_CALLS_END,
            separator="",
        ),
    ),
)
KIMI_K2: Final = Syntax(
    name="kimi_k2",
    models="Kimi K2",
    example=(
        f'{_KIMI_CALLS}{_KIMI_CALL}functions.add:0{_KIMI_ARGUMENTS}{{"a": 1}}'
        f"{_KIMI_CALL_END}{_KIMI_CALLS_END}"
    ),
    shown_by=(_KIMI_CALLS,),
    read=_read_kimi,
    openings=(_KIMI_CALLS, _KIMI_CALL),
    closings=(_KIMI_CALL_END, _KIMI_CALLS_END),
    marks=(_KIMI_ARGUMENTS,),
    forms=(
        Form(
            (
                f"{_KIMI_CALL}functions.",
                Slot.NAME,
                ":",
                Slot.NUMBER,
                _KIMI_ARGUMENTS,
                Slot.ARGUMENTS,
                _KIMI_CALL_END,
            ),
            begin=_KIMI_CALLS,
            end=_KIMI_CALLS_END,
            separator="",
        ),
    ),
)
OPENAI: Final = Syntax(
    name="openai",
    models="gpt-oss",
    example=f'{CHANNEL}commentary to=functions.add {CONSTRAIN}json{MESSAGE}{{"a": 1}}{CALL}',
    shown_by=((CHANNEL, MESSAGE),),
    read=_read_harmony,
    openings=(START, CHANNEL),
    closings=(CALL, END),
    marks=(MESSAGE, CONSTRAIN, RETURN),
    # The answer ends with a call.
    forms=(
        Form(
            (
                f"{CHANNEL}commentary to=functions.",
                Slot.NAME,
                f" {CONSTRAIN}json{MESSAGE}",
                Slot.ARGUMENTS,
            ),
            joins_text=False,
        ),
    ),
)
LLAMA3_FUNCTION: Final = Syntax(
    name="llama3_function",
    models="Llama 3.1, prompted for custom tools",
    example='<function=add>{"a": 1}</function>',
    shown_by=("<function=",),
    read=_read_llama3_function,
    openings=("<function=",),
    closings=("</function>",),
    forms=(Form(("<function=", Slot.NAME, ">", Slot.ARGUMENTS, "</function>")),),
)
