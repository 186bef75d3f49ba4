"""Converts assistant messages with tool calls into the form that a chat template accepts."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from src.text.call_ids import shorten_ids

Message: TypeAlias = dict[str, Any]
Content: TypeAlias = Literal["absent", "null", "empty"]
Arguments: TypeAlias = Literal["object", "text"]
BesideText: TypeAlias = Literal["together", "split", "alone"]

_LONG_TEXT: Final = 64 * 1024  # characters


class CallForms(NamedTuple):
    """The form in which a template accepts an assistant message with tool calls.

    Attributes
    ----------
    content
        Accepted values of ``content`` for a message without text. The first is the preferred one.
    arguments
        Whether ``arguments`` are an object or JSON text.
    beside_text
        What happens to a message with both text and calls. ``together``: it stays as it is.
        ``split``: it becomes two messages. ``alone``: its text is dropped, because the template
        shows no calls beside a text.
    one_at_a_time
        Whether a message with several calls becomes several messages, each followed by its
        result. Set for templates that refuse or hide all calls but the first.
    nine_character_ids
        Whether call ids must be nine letters and digits.
    """

    content: tuple[Content, ...] = ("absent",)
    arguments: Arguments = "object"
    beside_text: BesideText = "together"
    one_at_a_time: bool = False
    nine_character_ids: bool = False


def shaped(chat: Sequence[Message], forms: CallForms) -> list[Message]:
    """Return the messages in these forms. May change the given messages in place."""
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
    """Return the tool calls of a message, or an empty list."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def give_arguments(message: Message, form: Arguments) -> None:
    """Convert the arguments of tool calls in place, to objects or to JSON text.

    A text that holds no JSON object stays as it is: the template may still show it.
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
    """Return the message with an absent, null or empty ``content``."""
    rest = {key: value for key, value in turn.items() if key != "content"}
    if form == "absent":
        return rest
    return {**rest, "content": None if form == "null" else ""}


def _in_turns(turn: Message, forms: CallForms) -> list[Message]:
    """Return the one or two messages in which the template shows both calls and text."""
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
    """Return the text of ``content``: a string, a list of text parts, or None."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _one_at_a_time(chat: Sequence[Message], content: Content) -> Iterator[Message]:
    """Yield the messages with each call in a message of its own, followed by its results."""
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
        own = _Results(results)
        for number, call in enumerate(calls):
            turn = message if number == 0 else with_content({"role": message["role"]}, content)
            yield {**turn, "tool_calls": [call]}
            yield from own.take(call.get("id") if isinstance(call, dict) else None)
        yield from own.rest()


class _Results:
    """The results behind a message with calls, found by the call's id in constant time."""

    def __init__(self, results: Sequence[Message]) -> None:
        self._results = results
        # Key of an id -> places of its results, in order.
        self._places: dict[Any, deque[int]] = defaultdict(deque)
        for place, result in enumerate(results):
            self._places[_key(result.get("tool_call_id"))].append(place)

    def take(self, call_id: Any) -> Iterator[Message]:
        """Yield the results of the next call with this id."""
        places = self._places.get(_key(call_id), deque())
        # Without ids, calls and results are paired in order.
        for _ in range(min(1, len(places)) if call_id is None else len(places)):
            yield self._results[places.popleft()]

    def rest(self) -> Iterator[Message]:
        """Yield the results that belong to no call, in order."""
        left = sorted(place for places in self._places.values() for place in places)
        yield from (self._results[place] for place in left)


def _key(call_id: Any) -> Any:
    """Return what stands for an id in a table: ids from clients may be any JSON."""
    is_plain = call_id is None or isinstance(call_id, str)
    return call_id if is_plain else (json.dumps(call_id, sort_keys=True),)


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
