"""``/debug/...``: what the engine is doing, step by step and block by block, behind the admin key.

No prompt, no output and no token id is shown. Live state is read on the event loop within bounds
and turned into text in a thread, so that looking does not hold up the steps.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import parse_qs

import msgspec

from src.core.errors import InvalidRequestError, NotReadyError
from src.engine.client import AsyncEngine
from src.http.server.call import Call
from src.http.server.errors import RouteNotFoundError
from src.observability.logs import LEVELS, current_level, set_level
from src.observability.trace_events import trace_events

_encode: Final = msgspec.json.Encoder().encode
# A proxy must not keep what was meant for one person at one moment.
_NO_STORE: Final = ((b"cache-control", b"no-store"),)
_MAX_STEPS: Final = 1_000_000
_MAX_ITEMS: Final = 1000


async def show_timeline(call: Call) -> None:
    """The last steps as a Chrome trace, which ui.perfetto.dev opens, or as plain records."""
    query = _query(call, "steps", "after", "format")
    kind = query.get("format", "perfetto")
    if kind not in ("perfetto", "records"):
        raise InvalidRequestError(
            f"format must be perfetto or records, got {kind[:50]!r}", param="format"
        )
    steps = _number(query, "steps", None, 1, _MAX_STEPS)
    after = _number(query, "after", 0, 0, 2**53) or 0
    view = _engine(call).inspector.timeline(steps, after)
    body = await asyncio.to_thread(trace_events if kind == "perfetto" else _encode, view)
    name = b'attachment; filename="slipstream-timeline.json"'
    extra = ((b"content-disposition", name),) if kind == "perfetto" else ()
    await call.answer(body, headers=(*_NO_STORE, *extra))


async def show_requests(call: Call) -> None:
    """The completions that are alive: where they stand, how long they waited, what they hold."""
    query = _query(call, "limit")
    limit = _number(query, "limit", _MAX_ITEMS, 1, _MAX_ITEMS) or _MAX_ITEMS
    view = _engine(call).inspector.requests(limit)
    await call.answer(await asyncio.to_thread(_encode, view), headers=_NO_STORE)


async def show_pool(call: Call) -> None:
    """The blocks of KV memory: free, cached and held, how often shared, and a map of them."""
    query = _query(call, "cells")
    cells = _number(query, "cells", 256, 1, _MAX_ITEMS) or 256
    await call.answer(_encode(await _engine(call).inspector.pool(cells)), headers=_NO_STORE)


async def show_plan(call: Call) -> None:
    """The last plans."""
    query = _query(call, "plans")
    plans = _engine(call).inspector.plans(_number(query, "plans", None, 1, _MAX_ITEMS))
    await call.answer(await asyncio.to_thread(_encode, {"plans": plans}), headers=_NO_STORE)


async def start_profile(call: Call) -> None:
    """Record the next steps with torch's profiler; 202, and the result comes with GET."""
    steps = _number(_query(call, "steps"), "steps", 10, 1, _MAX_ITEMS) or 10
    profile = _engine(call).inspector.start_profile(steps)
    body = _encode({"phase": profile.phase, "steps": profile.steps})
    await call.answer(body, status=202, headers=_NO_STORE)


async def show_profile(call: Call) -> None:
    """The last profile, gzipped; 202 while it is being taken, 404 before there is one."""
    _query(call)
    profile = _engine(call).inspector.profile
    if profile is None:
        raise RouteNotFoundError("there is no profile yet; POST /debug/profile takes one")
    if profile.phase == "done":
        name = b'attachment; filename="slipstream-profile.json.gz"'
        extra = (b"content-disposition", name)
        await call.answer(profile.trace, kind=b"application/gzip", headers=(*_NO_STORE, extra))
        return
    status = {"phase": profile.phase, "steps": profile.steps, "detail": profile.detail}
    code = 202 if profile.phase == "running" else 500
    await call.answer(_encode(status), status=code, headers=_NO_STORE)


async def reset_prefix_cache(call: Call) -> None:
    """Forget all cached prefixes, and the outputs that drafts may come from.

    Requests that run go on, and nothing they compute or say is kept.
    """
    _query(call)
    _engine(call).inspector.reset_prefix_cache()
    await call.answer(_encode({"reset": True}), headers=_NO_STORE)


async def show_log_level(call: Call) -> None:
    """What is logged."""
    _query(call)
    await _answer_log_level(call)


async def change_log_level(call: Call) -> None:
    """Log more or less from now on, until it is changed again or the server is restarted."""
    level = _query(call, "level").get("level", "")
    if level not in LEVELS:
        raise InvalidRequestError(
            f"level must be one of {', '.join(LEVELS)}, got {level[:50]!r}", param="level"
        )
    set_level(level)
    await _answer_log_level(call)


async def _answer_log_level(call: Call) -> None:
    await call.answer(_encode({"level": current_level()}), headers=_NO_STORE)


def _engine(call: Call) -> AsyncEngine:
    engine = call.server.engine
    if engine is None:
        raise NotReadyError("the server is starting")
    return engine


def _query(call: Call, *known: str) -> dict[str, str]:
    """The query's fields, each given once.

    Raises
    ------
    InvalidRequestError
        A field is unknown or given twice.
    """
    given = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for name, values in given.items():
        if name not in known or len(values) > 1:
            problem = "given twice" if name in known else "unknown"
            raise InvalidRequestError(f"{name[:50]!r} is {problem}", param=name[:50])
    return {name: values[0] for name, values in given.items()}


def _number(
    query: dict[str, str], name: str, default: int | None, least: int, most: int
) -> int | None:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise InvalidRequestError(
            f"{name} must be an integer from {least} to {most}, got {text[:30]!r}", param=name
        )
    return int(text)
