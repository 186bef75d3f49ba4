"""What the tools of other servers leave in a conversation, in a form that every model reads.

A session that began elsewhere goes on here: what ran there is shown as a call and its result, and
what a block says is shown as its text, whatever its type is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from src.core.errors import InvalidRequestError
from src.http.chat.input_items import read_item
from src.http.chat.placeholders import block_text, is_media, placeholder
from src.http.protocol.chat import ChatMessage, FunctionCall, Name, ToolCall

# Keys of which the values are for readers, in the order in which they are read.
_READABLE: Final = (
    *("title", "url", "source", "filename", "tool_name", "text", "stdout", "stderr", "logs"),
    *("content", "output", "lines", "results", "outputs", "tool_references", "tools", "tabs"),
    *("error", "error_code", "message"),
)
_MAX_DEPTH: Final = 8

# Type of an item -> the tool that it is a call of, and the keys that are its arguments.
_CALLS: Final[Mapping[str, tuple[str | None, tuple[str, ...]]]] = {
    "custom_tool_call": (None, ("input",)),
    "mcp_call": (None, ("arguments",)),
    "apply_patch_call": ("apply_patch", ("operation",)),
    "code_interpreter_call": ("code_interpreter", ("code",)),
    "computer_call": ("computer", ("action", "actions")),
    "file_search_call": ("file_search", ("queries",)),
    "image_generation_call": ("image_generation", ("revised_prompt",)),
    "local_shell_call": ("local_shell", ("action",)),
    "program": ("program", ("code",)),
    "shell_call": ("shell", ("action",)),
    "tool_search_call": ("tool_search", ("arguments",)),
    "web_search_call": ("web_search", ("action",)),
}
# Calls that hold what they came to, and where.
_ANSWERED: Final[Mapping[str, tuple[str, ...]]] = {
    "mcp_call": ("output", "error"),
    "code_interpreter_call": ("outputs",),
    "file_search_call": ("results",),
    "image_generation_call": ("result",),
}
# Type of an item -> where it has what a call came to.
_RESULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "custom_tool_call_output": ("output",),
    "apply_patch_call_output": ("status", "output"),
    "computer_call_output": ("output",),
    "local_shell_call_output": ("output",),
    "program_output": ("result",),
    "shell_call_output": ("output",),
    "tool_search_output": ("tools",),
}
CALL_ITEMS: Final = frozenset(_CALLS)
RESULT_ITEMS: Final = frozenset(_RESULTS)


class _Item(msgspec.Struct, kw_only=True):
    """What tells a call from others; an item that ran elsewhere may have its own id alone."""

    type: str
    id: Name | None = None
    call_id: Name | None = None
    name: Name | None = None


class ForeignUseBlock(msgspec.Struct, kw_only=True):
    """A call of a tool that ran elsewhere, in Anthropic's protocol."""

    type: Literal["server_tool_use", "mcp_tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ForeignResultBlock(msgspec.Struct, kw_only=True):
    """What such a call came to."""

    type: str
    tool_use_id: Name
    content: Any = None


def readable(where: str, value: object, *, replaces_media: bool) -> str | None:
    """The text of a block, or of a list of them; ``None`` where nothing in it is for readers.

    Raises
    ------
    InvalidRequestError
        There is an image or the like in it, and no text may stand for that; names ``where``.
    """
    texts = list(_texts(where, value, replaces_media, 0))
    return "\n".join(texts) if texts else None


def call_of(where: str, item: dict[str, Any]) -> ToolCall:
    """The call that an item of `CALL_ITEMS` is; one that says nothing has no arguments.

    Raises
    ------
    InvalidRequestError
        It has no name where it needs one.
    """
    read = read_item(where, item, _Item)
    name, keys = _CALLS[read.type]
    if name is None:
        name = _required(f"{where}.name", read.name)
    given = {key: item[key] for key in keys if item.get(key) is not None}
    arguments = given.get("arguments")
    if isinstance(arguments, str | dict):
        return ToolCall(id=_id(read), function=FunctionCall(name=name, arguments=arguments))
    return ToolCall(id=_id(read), function=FunctionCall(name=name, arguments=given))


def result_of(where: str, item: dict[str, Any], *, replaces_media: bool) -> ChatMessage | None:
    """The message that tells what a call came to; ``None`` for a call that does not hold it.

    Raises
    ------
    InvalidRequestError
        It does not name the call, or holds an image or the like that no text may stand for.
    """
    read = read_item(where, item, _Item)
    keys = _RESULTS.get(read.type) or _ANSWERED.get(read.type)
    if keys is None:
        return None
    held: list[Any] = [item[key] for key in keys if item.get(key) is not None]
    if read.type == "image_generation_call":
        held = [{"type": "image"} for _ in held]
    text = readable(where, held, replaces_media=replaces_media)
    call_id = _id(read)
    if read.type in _RESULTS and read.type != "tool_search_output":
        call_id = _required(f"{where}.call_id", call_id)
    return ChatMessage(role="tool", content=text or "", tool_call_id=call_id)


def not_understood(where: str, kind: object, what: str = "blocks") -> InvalidRequestError:
    """The refusal of a block or an item by its type."""
    if not isinstance(kind, str):
        return InvalidRequestError(f"{where}.type is required", param=f"{where}.type")
    return InvalidRequestError(
        f"{where}.type: {what} of type {kind[:100]!r} are not understood",
        param=f"{where}.type",
        code="unsupported_parameter",
    )


def _id(item: _Item) -> str | None:
    return item.call_id if item.call_id is not None else item.id


def _required(where: str, value: str | None) -> str:
    if value is None:
        raise InvalidRequestError(f"{where} is required", param=where)
    return value


def _texts(where: str, value: object, replaces_media: bool, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(where, item, replaces_media, depth + 1)
    elif isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and is_media(kind):
            text = block_text(value) or placeholder(kind)
            if text is None or not replaces_media:
                raise not_understood(where, kind)
            yield text
            return
        if kind in ("function", "custom") and isinstance(value.get("name"), str):
            # A definition: its schema is offered as a tool.
            yield value["name"]
            return
        for key in _READABLE:
            # A source that is no text has bytes, or says where they are.
            if key in value and (key != "source" or isinstance(value[key], str)):
                yield from _texts(where, value[key], replaces_media, depth + 1)
