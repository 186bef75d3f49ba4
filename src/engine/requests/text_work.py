"""Work on requests' texts that takes long: in threads, beside the event loop, owners in turns."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, ParamSpec, TypeVar

from src.core.cpus import usable_cpus
from src.core.errors import ShuttingDownError
from src.core.turn_pool import TurnPool

# Longer texts wait among themselves. Each takes a thread for tens of milliseconds, or seconds.
_LONG_CHARS: Final = 64 * 1024

P = ParamSpec("P")
T = TypeVar("T")


class TextWork:
    """Threads for tokenizing and the like, those for long texts apart."""

    def __init__(self) -> None:
        threads = usable_cpus()
        self._short = TurnPool(threads, "slipstream-texts")
        self._long = TurnPool(threads, "slipstream-long-texts")
        self._is_closed = False

    async def run(
        self, owner: str, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``function`` on a text of ``size`` characters once it is the turn of ``owner``.

        Whoever is cancelled while waiting leaves nothing to be done.

        Raises
        ------
        ShuttingDownError
            The engine was closed, before or meanwhile.
        """
        run = functools.partial(function, *args, **kwargs)
        try:
            # An error has this frame: no name in it holds the future, which holds the error.
            return await asyncio.wrap_future(self._submitted(owner, size, run))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and not (task is not None and task.cancelling()):
                raise _closed() from None
            raise

    def _submitted(self, owner: str, size: int, run: Callable[[], T]) -> Future[T]:
        pool = self._long if size > _LONG_CHARS else self._short
        try:
            return pool.submit(owner, run).future
        except RuntimeError:
            if not self._is_closed:  # no thread can be started, say
                raise
            raise _closed() from None

    def close(self) -> None:
        """End the threads; what waits fails. Blocks while some text is worked on."""
        self._is_closed = True
        self._short.close()
        self._long.close()


def _closed() -> ShuttingDownError:
    return ShuttingDownError("the engine was closed")
