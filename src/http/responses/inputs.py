"""What a response was asked with, as items of their own: how they are kept, listed and counted."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from src.core.errors import InvalidRequestError
from src.http.protocol.responses import ItemList, OutputItem, ResponseRequest

MAX_PAGE: Final = 100
_PAGE: Final = 20

# Type of an item -> what its id begins with, as OpenAI's do.
_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "additional_tools": "at",
}
_NUMBER: Final = re.compile(r"[0-9]{1,9}", re.ASCII)

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Named(msgspec.Struct):
    id: str


_decode_name: Final = msgspec.json.Decoder(_Named).decode


def kept_items(request: ResponseRequest, find_item: Callable[[str], OutputItem | None]) -> bytes:
    """The items of a request, which has been read already, as JSON: each with an id.

    ``find_item`` knows the items of past responses, for those that are referred to.
    """
    if isinstance(request.input, str):
        return _encode([_message({"role": "user", "content": request.input})])
    return _encode([_kept(item, find_item) for item in request.input or ()])


def page_of(items: bytes, query: Mapping[str, Sequence[str]]) -> bytes:
    """The part of kept items that a query asks for, as OpenAI lists things.

    Raises
    ------
    InvalidRequestError
        Naming the parameter.
    """
    limit = _limit(query)
    order = query.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {order[:50]!r}", param="order")
    listed = _decode(items)
    if order == "desc":
        listed.reverse()
    names = [_decode_name(item).id for item in listed]
    begin = 0
    if after := query.get("after", [""])[-1]:
        if after not in names:
            raise InvalidRequestError(
                f"after: the response has no input item {after[:100]!r}", param="after"
            )
        begin = names.index(after) + 1
    end = begin + limit
    return _encode(
        ItemList(
            data=listed[begin:end],
            first_id=next(iter(names[begin:end]), None),
            last_id=next(reversed(names[begin:end]), None),
            has_more=end < len(names),
        )
    )


def _limit(query: Mapping[str, Sequence[str]]) -> int:
    given = query.get("limit", [str(_PAGE)])[-1]
    if _NUMBER.fullmatch(given) is None or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequestError(
            f"limit must be from 1 to {MAX_PAGE}, got {given[:50]!r}", param="limit"
        )
    return int(given)


def _kept(item: Mapping[str, Any], find_item: Callable[[str], OutputItem | None]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind in (None, "item_reference"):
        # A reference: it has been followed once already.
        found = find_item(item["id"])
        kept: dict[str, Any] = {} if found is None else msgspec.to_builtins(found)
        return kept or {"type": "item_reference", "id": item["id"]}
    if kind == "message":
        return _message(item)
    kept = {**item, "id": _id(item, kind)}
    if kind == "reasoning":
        kept.setdefault("summary", [])
    elif kind == "additional_tools":
        kept.setdefault("role", "developer")
    elif kind in _PREFIXES:
        kept["status"] = "completed"
    return kept


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    is_said = item["role"] == "assistant"
    return {
        **item,
        "id": _id(item, "message"),
        "type": "message",
        "status": "completed",
        "content": [_part(part, is_said=is_said) for part in parts],
    }


def _part(part: Mapping[str, Any], *, is_said: bool) -> dict[str, Any]:
    """Text is of one type for what the assistant said, and of another for all else."""
    if part["type"] == "refusal" or "text" not in part:
        return dict(part)
    if not is_said:
        return {**part, "type": "input_text"}
    return {"annotations": [], **part, "type": "output_text"}


def _id(item: Mapping[str, Any], kind: str) -> str:
    given = item.get("id")
    if isinstance(given, str) and given:
        return given
    return f"{_PREFIXES.get(kind, kind)}_{uuid.uuid4().hex}"
