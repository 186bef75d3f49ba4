"""What protocols have in common whose conversations are lists of untyped items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from src.core.errors import InvalidRequestError
from src.http.protocol.chat import MAX_MESSAGES, ChatMessage
from src.http.server.body import invalid_field

T = TypeVar("T")


def with_instructions(
    instructions: str | None, messages: Sequence[ChatMessage]
) -> list[ChatMessage]:
    """The messages, led by one of the system.

    Instructions and the first messages of system or developer are joined into it: many templates
    take no second one.
    """
    texts = [instructions] if instructions else []
    rest = 0
    for message in messages:
        if message.role not in ("system", "developer"):
            break
        content = message.content
        texts += [content] if isinstance(content, str) else [p.text or "" for p in content or ()]
        rest += 1
    leading = [ChatMessage(role="system", content="\n\n".join(texts))] if texts else []
    return [*leading, *messages[rest:]]


def check_parts(param: str, contents: Iterable[object]) -> None:
    """Refuse more parts than a chat may have messages, before any of them is read.

    Parameters
    ----------
    contents
        Texts, or lists of parts, of which all together count.

    Raises
    ------
    InvalidRequestError
        Naming ``param``.
    """
    count = sum(len(content) for content in contents if isinstance(content, list))
    if count > MAX_MESSAGES:
        raise InvalidRequestError(
            f"{param} may have at most {MAX_MESSAGES} parts in all, got {count}", param=param
        )


def read_item(where: str, item: Any, kind: type[T]) -> T:
    """An untyped part of a request as what it is.

    Raises
    ------
    InvalidRequestError
        It is not that; names its field, which is ``where`` or below it.
    """
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        refusal = invalid_field(error)
        below = refusal.param
        if below is None:
            param = where
            refusal.message = f"{where}: {refusal.message}"
        else:
            param = f"{where}{below}" if below.startswith("[") else f"{where}.{below}"
            refusal.message = refusal.message.replace(below, param, 1)
        refusal.param = param
        raise refusal from None
