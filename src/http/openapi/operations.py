"""What is known of an endpoint beforehand."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from src.http.protocol.errors import ErrorBody
from src.http.server.call import Handler

JSON: Final = "application/json"
Access: TypeAlias = Literal["key", "admin", "open", "metrics", "page"]


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of a path or a query; ``schema`` is JSON schema."""

    name: str
    schema: dict[str, Any]
    place: str = "query"


class Route(msgspec.Struct, frozen=True, eq=False):
    """What answers a method at a path, which has its parameters in braces."""

    path: str
    method: str
    handler: Handler


class Operation(Route, frozen=True, eq=False, kw_only=True):
    """One endpoint, of one method; the first line of its handler's docstring is shown.

    Attributes
    ----------
    tag
        The group that it is shown in.
    request
        What its body is decoded into; ``None`` takes none.
    answers
        Status to the type of the body; ``None`` is a body that is described by ``kind`` alone.
    kind
        The content type of an answer.
    streams
        Whether it answers with server-sent events to ``stream = true``.
    refusals
        With which statuses it refuses.
    access
        Who may ask where there are API keys: their holders (``key``), the administrator alone
        (``admin``) or everybody (``open``; ``metrics`` if they are public, ``page`` if there is
        a page).
    error
        What a refusal looks like.
    """

    tag: str
    request: Any = None
    answers: dict[int, Any]
    kind: str = JSON
    streams: bool = False
    parameters: tuple[Parameter, ...] = ()
    refusals: tuple[int, ...] = ()
    access: Access = "key"
    error: Any = ErrorBody
