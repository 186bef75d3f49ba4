"""Turns of the assistant that call functions, in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from src.text.call_ids import shorten_ids

Message: TypeAlias = dict[str, Any]
Content: TypeAlias = Literal["absent", "null", "empty"]
Arguments: TypeAlias = Literal["object", "text"]
BesideText: TypeAlias = Literal["together", "split", "alone"]

_LONG_TEXT: Final = 64 * 1024  # characters


class CallForms(NamedTuple):
    """How a template takes a turn of the assistant that calls functions.

    Attributes
    ----------
    content
        Forms of content of a turn that has no text: the one to take, and others as good.
    arguments
        What arguments are given as.
    beside_text
        A turn with text and calls: ``together`` as it is, ``split`` into two turns, or the calls
        ``alone``, since the template shows no calls beside a text.
    one_at_a_time
        Whether a turn with several calls is given as several turns, each with what its call came
        to, since the template takes or shows one call of a turn.
    nine_character_ids
        Whether ids of calls have to be nine letters and digits.
    """

    content: tuple[Content, ...] = ("absent",)
    arguments: Arguments = "object"
    beside_text: BesideText = "together"
    one_at_a_time: bool = False
    nine_character_ids: bool = False


def shaped(chat: Sequence[Message], forms: CallForms) -> list[Message]:
    """Messages in these forms; what they hold may be changed in place."""
    turns: list[Message] = []
    for message in chat:
        give_arguments(message, forms.arguments)
        turns += _in_turns(message, forms) if calls_of(message) else [message]
    if forms.one_at_a_time:
        turns = list(_one_at_a_time(turns, forms.content[0]))
    if forms.nine_character_ids:
        shorten_ids(turns)
    return turns


def calls_of(message: Mapping[str, Any]) -> list[Any]:
    """The calls of a message; none where there is no list of them."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def give_arguments(message: Message, form: Arguments) -> None:
    """Give arguments of tool calls in place as an object, or as the JSON text of one.

    A text that holds no object is left: a model wrote it, and the template may still show it.
    """
    for call in calls_of(message):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        arguments = function.get("arguments")
        if form == "text":
            if arguments == "":
                function["arguments"] = "{}"
            elif isinstance(arguments, dict):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            try:
                held = _decoded(arguments or "{}")
            except ValueError:
                continue
            if isinstance(held, dict):
                function["arguments"] = held


def with_content(turn: Mapping[str, Any], form: Content) -> Message:
    """The turn with content that says nothing, in one of the forms."""
    rest = {key: value for key, value in turn.items() if key != "content"}
    if form == "absent":
        return rest
    return {**rest, "content": None if form == "null" else ""}


def _in_turns(turn: Message, forms: CallForms) -> list[Message]:
    """A turn that calls functions, as the one or two in which its calls and its text are shown."""
    said = _text(turn.get("content"))
    if said and forms.beside_text == "together":
        return [turn]
    if not said and turn.get("content") is not None and "empty" in forms.content:
        return [turn]
    if forms.beside_text == "alone" or not said.strip():
        return [with_content(turn, forms.content[0])]
    calls = {"role": turn["role"], "tool_calls": turn["tool_calls"]}
    text = {key: value for key, value in turn.items() if key != "tool_calls"}
    return [text, with_content(calls, forms.content[0])]


def _text(content: Any) -> str:
    """The text of content, which is a text or a list of text parts, or absent."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _one_at_a_time(chat: Sequence[Message], content: Content) -> Iterator[Message]:
    """Each of a turn's calls as a turn, with what it came to behind it."""
    index = 0
    while index < len(chat):
        message, calls = chat[index], calls_of(chat[index])
        index += 1
        if len(calls) < 2:
            yield message
            continue
        results = []
        while index < len(chat) and chat[index]["role"] == "tool":
            results.append(chat[index])
            index += 1
        for number, call in enumerate(calls):
            turn = message if number == 0 else with_content({"role": message["role"]}, content)
            yield {**turn, "tool_calls": [call]}
            call_id = call.get("id") if isinstance(call, dict) else None
            own = [r for r in results if r.get("tool_call_id") == call_id]
            if call_id is None:
                # Without ids they belong together in order.
                own = own[:1]
            yield from own
            results = _without(results, own)
        yield from results


def _without(messages: Iterable[Message], taken: Sequence[Message]) -> list[Message]:
    return [message for message in messages if not any(message is each for each in taken)]


def _decoded(text: str) -> Any:
    """What JSON text holds. Raises ValueError if it is none, or long and only Python's JSON.

    Python's parser takes what JSON does not know (NaN, infinities), and six times as long, in one
    piece, in which no other thread runs.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        if len(text) > _LONG_TEXT:
            raise ValueError(str(error)) from error
        return json.loads(text)
