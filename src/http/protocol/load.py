"""``/get_load``, ``/load``, ``/is_sleeping``."""

from __future__ import annotations

import msgspec


class LoadBody(msgspec.Struct):
    """Completions that run or wait."""

    load: int


class ServerLoadBody(msgspec.Struct):
    """Completions that run or wait."""

    server_load: int


class SleepBody(msgspec.Struct):
    """Whether the model gave its memory away."""

    is_sleeping: bool
