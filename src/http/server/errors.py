"""Errors as HTTP answers, in OpenAI's shape. The client's fault is 4xx and never 5xx."""

from __future__ import annotations

import logging
import math
from typing import Final

import msgspec

from src.core.errors import (
    ConfigError,
    ConflictError,
    DeadEndError,
    DeadlineExceededError,
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    NotReadyError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    RequestTooLargeError,
    ShuttingDownError,
    SlipstreamError,
    UnavailableError,
)
from src.http.protocol.errors import ErrorBody, ErrorDetail

logger = logging.getLogger(__name__)


class UnsupportedMediaTypeError(RequestError):
    """The body is not declared to be JSON (HTTP 415)."""


class UnsupportedCodingError(UnsupportedMediaTypeError):
    """The body is coded as is not read here (HTTP 415); ``read`` names the codings that are."""

    def __init__(self, message: str, read: str) -> None:
        super().__init__(message, code="unsupported_content_encoding")
        self.read = read


class UnauthorizedError(RequestError):
    """The key is missing or wrong (HTTP 401)."""


class PermissionDeniedError(RequestError):
    """The key is good, and not for this (HTTP 403)."""


class ForeignPageError(RequestError):
    """A web page of another origin asks, which may not (HTTP 403)."""

    def __init__(self) -> None:
        super().__init__(
            "a web page of another origin may not send this: http.cors_origins lists the origins "
            "whose pages may",
            code="foreign_origin",
        )


class MisdirectedRequestError(RequestError):
    """The request is for a name that is not known to be this server's (HTTP 421)."""

    def __init__(self, host: str) -> None:
        super().__init__(
            "this server has no API keys, so it answers to localhost, to addresses and to the "
            f"names in http.allowed_hosts alone, and not to the Host {host[:100]!r}",
            code="unknown_host",
        )


class RouteNotFoundError(RequestError):
    """There is nothing at this path (HTTP 404)."""


class MethodNotAllowedError(RequestError):
    """The path takes other methods (HTTP 405)."""


class GenerationFailedError(SlipstreamError):
    """The engine failed while it served one request (HTTP 500)."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An error ready to be sent. ``reason`` is the label under which it is counted."""

    status: int
    reason: str
    detail: ErrorDetail
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def body(self) -> bytes:
        """The JSON of it."""
        return msgspec.json.encode(ErrorBody(self.detail))


# Class, status, type, code. The first class that fits is taken.
_KINDS: Final[tuple[tuple[type[BaseException], int, str, str | None], ...]] = (
    (InvalidRequestError, 400, "invalid_request_error", None),
    (UnauthorizedError, 401, "invalid_request_error", "invalid_api_key"),
    (PermissionDeniedError, 403, "invalid_request_error", "permission_denied"),
    (ForeignPageError, 403, "invalid_request_error", "foreign_origin"),
    (ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (RouteNotFoundError, 404, "invalid_request_error", "not_found"),
    (MethodNotAllowedError, 405, "invalid_request_error", "method_not_allowed"),
    (DeadlineExceededError, 408, "timeout_error", "deadline_exceeded"),
    (ConflictError, 409, "invalid_request_error", "conflict"),
    (DeadEndError, 500, "server_error", "dead_end"),
    (RequestTooLargeError, 413, "invalid_request_error", "request_too_large"),
    (UnsupportedMediaTypeError, 415, "invalid_request_error", "unsupported_media_type"),
    (MisdirectedRequestError, 421, "invalid_request_error", "unknown_host"),
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (GenerationError, 500, "server_error", "generation_failed"),
    (NotReadyError, 503, "service_unavailable_error", "model_loading"),
    (ShuttingDownError, 503, "service_unavailable_error", "shutting_down"),
    (UnavailableError, 503, "service_unavailable_error", "unavailable"),
    (RequestAbortedError, 503, "service_unavailable_error", "request_aborted"),
)
# What the engine says of its own faults is for the log: it may hold paths and addresses.
_FAULTS: Final[tuple[tuple[type[BaseException], str, str], ...]] = (
    (EngineDeadError, "engine_dead", "the engine has stopped after an internal fault"),
    (GenerationFailedError, "generation_failed", "the engine failed while it served this request"),
    (ModelLoadError, "load_failed", "the model could not be loaded"),
    (ConfigError, "load_failed", "the model could not be loaded"),
)


def answer_to(error: BaseException) -> ErrorAnswer:
    """The HTTP answer to an error; one that nobody raised on purpose is logged and is a 500."""
    if isinstance(error, RequestError):
        for kind, status, type_, code in _KINDS:
            if isinstance(error, kind):
                code = error.code or code
                return ErrorAnswer(
                    status,
                    code or "invalid_request",
                    ErrorDetail(error.message, type_, error.param, code),
                    _headers(error),
                )
    for kind, code, message in _FAULTS:
        if isinstance(error, kind):
            return ErrorAnswer(500, code, ErrorDetail(message, "server_error", None, code))
    logger.error("a request failed", exc_info=error)
    detail = ErrorDetail("internal error", "server_error", None, "internal_error")
    return ErrorAnswer(500, "internal_error", detail)


def _headers(error: RequestError) -> tuple[tuple[bytes, bytes], ...]:
    if isinstance(error, UnsupportedCodingError):
        return ((b"accept-encoding", error.read.encode()),)
    if isinstance(error, UnavailableError):
        return ((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()),)
    return ()
