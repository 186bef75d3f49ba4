"""Requests from bodies, and what becomes of a field that nobody has heard of.

It is ignored and counted, since routers and clients of other servers add some; with
``http.strict_fields`` it is refused. Only the outermost fields of a body are looked at.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, Generic, TypeVar

import msgspec

from src.core.errors import InvalidRequestError
from src.http.server.body import MAX_FIELDS, decode, too_many_fields
from src.http.server.call import Call

# Of one body at most so many unknown fields are counted.
_MAX_COUNTED: Final = 64
_MAX_SHOWN_CHARS: Final = 100

# Values are skipped and not built, so that this costs a fraction of the decoding.
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

T = TypeVar("T", bound=msgspec.Struct)


class RequestDecoder(Generic[T]):
    """Decodes the bodies of one endpoint."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._known = frozenset(kind.__struct_encode_fields__)

    def __call__(self, call: Call) -> T:
        """The request in the call's body, which the call is then without.

        Raises
        ------
        InvalidRequestError
            It is not JSON, or not such a request; names the field.
        """
        # Answers take long, and for so long their calls are held.
        body, call.body = call.body, b""
        request = decode(body, self._decoder)
        fields = decode(body, _FIELDS)
        if len(fields) > MAX_FIELDS:
            raise too_many_fields(len(fields))
        unknown = [name for name in fields if name not in self._known]
        if unknown and call.server.config.http.strict_fields:
            name = unknown[0][:_MAX_SHOWN_CHARS]
            raise InvalidRequestError(
                f"{name} is not a field of this request", param=name, code="unknown_parameter"
            )
        for name in islice(unknown, _MAX_COUNTED):
            call.server.metrics.on_unknown_field(name)
        return request
