"""Chat messages as plain data, in the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from src.core.errors import InvalidRequestError

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


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


def final_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message, of all its parts; empty if it has none.

    Raises
    ------
    InvalidRequestError
        A part is not text.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, list):
        text: str = content or ""
        return text
    where = f"messages[{len(messages) - 1}].content"
    return "".join(text_of_part(f"{where}[{i}]", part) for i, part in enumerate(content))


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
