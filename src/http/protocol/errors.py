"""What every error looks like."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Every answer with a status of 400 or more."""

    error: ErrorDetail
