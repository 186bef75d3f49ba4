"""Work on long bodies, beside the event loop and one body at a time.

Python runs one thread at a time, and one that waits for its turn gets it after milliseconds. So a
thread for each body would hold up the event loop by all of them together. Here a body waits for
those before it instead, and the work on it pauses, so that the event loop gets its turn at once.
Owners of keys take turns, so that nobody waits for all that somebody else has sent.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, ParamSpec, TypeVar

from src.core.cpus import usable_cpus
from src.core.turn_pool import TurnPool

# What is worked on between two pauses, in bytes. It takes a tenth of a millisecond.
PIECE_BYTES: Final = 64 * 1024
_PAUSE: Final = 50e-6
# Longer bodies, and compressed ones, which may be any length, wait among themselves.
_LONG_BYTES: Final = 1024 * 1024

OWNER: Final[ContextVar[str]] = ContextVar("OWNER", default="")
"""Whose request it is that a task serves; empty where no owners are told apart."""

P = ParamSpec("P")
T = TypeVar("T")


# Of the process, like Python's lock. Their threads begin with the first work.
_MIDDLING: Final = TurnPool(1, "slipstream-bodies")
_LONG: Final = TurnPool(1, "slipstream-long-bodies")
# For what is computed of a request beside its body. Some of it waits for other processes.
_WORK: Final = TurnPool(max(4, usable_cpus()), "slipstream-work")


async def beside_the_loop(
    size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run ``function`` on a body of ``size`` bytes once it is its turn; it calls `pause`.

    Whoever is cancelled while waiting leaves nothing to be done.
    """
    lane = _LONG if size > _LONG_BYTES else _MIDDLING
    run = functools.partial(function, *args, **kwargs)
    # An error has this frame: no name in it holds the future, which holds the error.
    return await asyncio.wrap_future(lane.submit(OWNER.get(), run).future)


async def in_turn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``function``, which may take long, on a thread of several once it is its owner's turn.

    Whoever is cancelled while waiting leaves nothing to be done.
    """
    run = functools.partial(function, *args, **kwargs)
    return await asyncio.wrap_future(_WORK.submit(OWNER.get(), run).future)


# Where the size is not known yet.
ANY_SIZE: Final = _LONG_BYTES + 1


def pause() -> None:
    """Let the event loop have its turn; call it after each piece."""
    time.sleep(_PAUSE)


class Turns:
    """Lets one long body after the other be decoded, with a turn of the event loop in between.

    Decoding is one call, of ten milliseconds for the longest bodies. Where many are ready at the
    same time, nobody else would have a turn before the last of them.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, size: int) -> None:
        """Wait for the turn of a body of ``size`` bytes, which is decoded without further waits."""
        if size > PIECE_BYTES:
            async with self._lock:
                await asyncio.sleep(0)
