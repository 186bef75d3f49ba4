"""OpenAI's batch files: one request per line, one answer per line, in any order.

The output file also records progress: an interrupted run continues with the requests that it lacks.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from src.core.errors import ConfigError

# Allowed endpoints; each must answer with a single JSON document.
URLS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v2/embed",
    "/embed",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/classify",
    "/pooling",
    "/predict",
)
# Maximal bytes of a line; more than any valid request has.
_MAX_LINE: Final = 64 * 1024 * 1024


class BatchRequest(msgspec.Struct, kw_only=True):
    """One line of the input; ``body`` is passed on unchanged."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, kw_only=True):
    """The answer to a request."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, kw_only=True):
    """Why a request has no answer."""

    code: str
    message: str


class BatchLine(msgspec.Struct, kw_only=True):
    """One line of the output."""

    id: str
    custom_id: str
    response: BatchAnswer | None = None
    error: BatchError | None = None


class _DoneLine(msgspec.Struct):
    custom_id: str


_REQUEST: Final = msgspec.json.Decoder(BatchRequest)
_DONE: Final = msgspec.json.Decoder(_DoneLine)
_FIELDS: Final = msgspec.json.Decoder(dict[str, Any])


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Read the requests of a file one by one.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line is not a request; the message names the line.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE), b""), start=1):
                if line.strip():
                    yield _request(f"{path}, line {number}", line)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def check_requests(path: Path) -> set[str]:
    """Check all requests of a file; returns their ids.

    Raises
    ------
    ConfigError
        As for `read_requests`, or an id occurs twice.
    """
    names: set[str] = set()
    for request in read_requests(path):
        if request.custom_id in names:
            raise ConfigError(f"{path}: custom_id {request.custom_id[:100]!r} is there twice")
        names.add(request.custom_id)
    return names


def finished(path: Path) -> set[str]:
    """Ids of the requests that have answers in an output file.

    An incomplete last line is removed from the file.

    Raises
    ------
    ConfigError
        The file cannot be read or written, or is not an output file.
    """
    if not path.exists():
        return set()
    names: set[str] = set()
    whole = 0
    try:
        with path.open("r+b") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    names.add(_DONE.decode(line).custom_id)
                except msgspec.MsgspecError:
                    raise ConfigError(
                        f"{path}, line {number}: this is no output of a batch"
                    ) from None
                whole += len(line)
            os.truncate(lines.fileno(), whole)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return names


def answered(request: BatchRequest, status: int, request_id: str, body: bytes) -> bytes:
    """The output line of an answer."""
    answer = BatchAnswer(status_code=status, request_id=request_id, body=msgspec.Raw(body))
    return _line(BatchLine(id=_new_id(), custom_id=request.custom_id, response=answer))


def failed(request: BatchRequest, code: str, message: str) -> bytes:
    """The output line of a request without an answer."""
    error = BatchError(code=code, message=message)
    return _line(BatchLine(id=_new_id(), custom_id=request.custom_id, error=error))


def problem(request: BatchRequest) -> str | None:
    """Why a request is not allowed in a batch; None if it is."""
    if request.method != "POST":
        return f"method must be POST, got {request.method[:20]!r}"
    if request.url not in URLS:
        return f"url must be one of {', '.join(URLS)}, got {request.url[:100]!r}"
    try:
        body = _FIELDS.decode(request.body)
    except msgspec.MsgspecError:
        return "body must be an object"
    if body.get("stream") or body.get("background"):
        return "an answer of a batch is whole: leave out stream and background"
    return None


def _request(where: str, line: bytes) -> BatchRequest:
    try:
        return _REQUEST.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _line(line: BatchLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
