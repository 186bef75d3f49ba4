"""Chat messages as plain data, in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from src.core.errors import InvalidRequestError

Content: TypeAlias = Literal["absent", "null", "empty"]
Arguments: TypeAlias = Literal["object", "text"]
BesideText: TypeAlias = Literal["together", "split", "alone"]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
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
    nine_character_ids
        Whether ids of calls have to be nine letters and digits.
    """

    content: tuple[Content, ...] = ("absent",)
    arguments: Arguments = "object"
    beside_text: BesideText = "together"
    nine_character_ids: bool = False


def plain(value: Any) -> Any:
    """Return a deep copy of ``value`` out of JSON types alone, so that a template meets no method.

    Raises
    ------
    InvalidRequestError
        There is something in it that JSON does not have.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise InvalidRequestError(
        f"messages: expected JSON types only, got {type(value).__name__}", param="messages"
    )


def text_parts(texts: list[str]) -> list[dict[str, str]]:
    """Return content as a list of text parts."""
    return [{"type": "text", "text": text} for text in texts]


def text_of_part(where: str, part: Any) -> str:
    """Return the text of one content part.

    Raises
    ------
    InvalidRequestError
        The part is not text; ``where`` names it.
    """
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)} if kind not in ("text", "refusal"):
            raise InvalidRequestError(
                f"{where}: this model takes text only, got a part of type {kind!r}",
                param="messages",
            )
        case _:
            raise InvalidRequestError(
                f"{where}: expected an object with type 'text' and a string text", param="messages"
            )


def give_arguments(message: dict[str, Any], form: Arguments) -> None:
    """Give arguments of tool calls in place as an object, or as the JSON text of one.

    A text that holds no object is left: a model wrote it, and the template may still show it.
    """
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
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


def _said(content: Any) -> str:
    """The text of content, which is a text or a list of text parts, or absent."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def call_turns(turn: dict[str, Any], forms: CallForms) -> list[dict[str, Any]]:
    """A turn that calls functions, as the turns in which a template shows its calls."""
    said = _said(turn.get("content"))
    if said and forms.beside_text == "together":
        return [turn]
    if not said and turn.get("content") is not None and "empty" in forms.content:
        return [turn]
    if forms.beside_text == "alone" or not said.strip():
        return [with_content(turn, forms.content[0])]
    calls = {"role": turn["role"], "tool_calls": turn["tool_calls"]}
    text = {key: value for key, value in turn.items() if key != "tool_calls"}
    return [text, with_content(calls, forms.content[0])]


def with_content(turn: Mapping[str, Any], form: Content) -> dict[str, Any]:
    """The turn with content that says nothing, in one of the forms."""
    rest = {key: value for key, value in turn.items() if key != "content"}
    if form == "absent":
        return rest
    return {**rest, "content": None if form == "null" else ""}


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


def open_final_message(chat: list[dict[str, Any]]) -> str:
    """Mark in place the end of the last message's text; return that text.

    Raises
    ------
    InvalidRequestError
        The last message has no text.
    """
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _CONTINUE_TAG
        return text
    raise InvalidRequestError(
        "continue_final_message: the last message has no content to continue",
        param="continue_final_message",
    )


def cut_at_tag(rendered: str, final_text: str) -> str:
    """Return ``rendered`` up to the mark that `open_final_message` set.

    Raises
    ------
    InvalidRequestError
        The template did not show the final message as it is.
    """
    at = rendered.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final_text.strip() not in rendered:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template does not show the last message as "
            "it is, so it cannot be continued",
            param="continue_final_message",
        )
    trimmed = not rendered.startswith(_CONTINUE_TAG, at)
    return rendered[:at].rstrip() if trimmed else rendered[:at]
