"""How each protocol writes an error: as a whole answer, and inside a stream that has begun."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from src.http.server.errors import ErrorAnswer

# Paths at and below which Anthropic's protocol is spoken.
ANTHROPIC: Final = "/v1/messages"

# Status to the type of an error, as Anthropic names it; others are api_error.
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorFormat(Protocol):
    """One protocol's errors."""

    def body(self, answer: ErrorAnswer, request_id: str) -> bytes:
        """A whole answer."""

    def event(self, answer: ErrorAnswer, request_id: str) -> bytes:
        """The last events of a stream."""


class OpenAIErrors:
    """``{"error": {...}}``, in a stream as an event before the last."""

    def body(self, answer: ErrorAnswer, request_id: str) -> bytes:
        """A whole answer."""
        return answer.body

    def event(self, answer: ErrorAnswer, request_id: str) -> bytes:
        """The last events of a stream."""
        return b"data: " + answer.body + b"\n\ndata: [DONE]\n\n"


class AnthropicError(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """Every answer of Anthropic's protocol with a status of 400 or more."""

    type: str = "error"
    error: AnthropicError
    request_id: str


class AnthropicErrors:
    """``{"type": "error", "error": {...}}``, in a stream as the event ``error``."""

    def body(self, answer: ErrorAnswer, request_id: str) -> bytes:
        """A whole answer."""
        kind = _ANTHROPIC_TYPES.get(answer.status, "api_error")
        error = AnthropicError(kind, answer.detail.message)
        return msgspec.json.encode(AnthropicErrorBody(error=error, request_id=request_id))

    def event(self, answer: ErrorAnswer, request_id: str) -> bytes:
        """The last events of a stream."""
        return b"event: error\ndata: " + self.body(answer, request_id) + b"\n\n"


_OPENAI: Final = OpenAIErrors()
_ANTHROPIC: Final = AnthropicErrors()


def error_format(path: str) -> ErrorFormat:
    """The format of errors at the path of a request."""
    if path == ANTHROPIC or path.startswith(ANTHROPIC + "/"):
        return _ANTHROPIC
    return _OPENAI
