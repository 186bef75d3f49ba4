"""Errors of a chat, with its fields as a client of another protocol names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from src.core.errors import RequestError

# (what a chat calls a field, what the client does); the first that fits is taken
Names: TypeAlias = Sequence[tuple[re.Pattern[str], str]]


def with_client_field_names(error: RequestError, names: Names) -> RequestError:
    """The same error, with its field and the beginning of its message in the client's words."""
    if error.param is None:
        return error
    for pattern, replacement in names:
        if pattern.match(error.param):
            chat_name = error.param
            error.param = pattern.sub(replacement, chat_name, count=1)
            error.message = error.message.replace(chat_name, error.param, 1)
            break
    return error
