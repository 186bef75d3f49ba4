"""Work for times without a step: capturing further steps, touching pages of KV memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

Piece = Callable[[], None]

# Seconds without a step after which idle work begins.
_IDLE_SECONDS = 0.05


class IdleWork:
    """Does small pieces of work on the device thread while no step is outstanding.

    Steps are counted on the event loop. Pieces are looked for there and on the device thread.

    Parameters
    ----------
    post
        Queues a function behind the launched steps; raises ``RuntimeError`` once there is no device
        thread any more.
    run
        Runs a piece on the device thread, as a step would run.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], object],
        run: Callable[[Piece], None],
    ) -> None:
        self._post = post
        self._run = run
        self._sources: list[Callable[[], Piece | None]] = []
        # All launched steps, and those whose result has not arrived.
        self._num_launched = 0
        self._num_outstanding = 0
        self._awaits_pause = False
        self._closed = False

    def add(self, source: Callable[[], Piece | None]) -> None:
        """Add what gives the next piece of its work, or ``None``, behind all other sources.

        A source is asked when those before it have nothing left.
        """
        self._sources.append(source)

    def step_launched(self) -> None:
        """A step was launched: there is no idle work until its result has arrived."""
        self._num_launched += 1
        self._num_outstanding += 1

    def step_arrived(self) -> None:
        """A step's result has arrived, on the event loop; `await_pause` may follow."""
        self._num_outstanding -= 1

    def begin(self) -> None:
        """Begin the idle work. It stops when a step comes, and goes on when the engine is idle."""
        if self._next() is not None:
            # A worker that is closed at this moment accepts no more work.
            with contextlib.suppress(RuntimeError):
                self._post(self._use_pause)

    def await_pause(self) -> None:
        """On the event loop: watch for an idle time, if there is work for one."""
        if not self._awaits_pause and self._next() is not None:
            self._awaits_pause = True
            loop = asyncio.get_running_loop()
            loop.call_later(_IDLE_SECONDS, self._look_for_pause, self._num_launched)

    def close(self) -> None:
        """Begin no further piece, and forget what gives them."""
        self._closed = True
        self._sources = []

    def _next(self) -> Piece | None:
        """The next piece; ``None`` if there is none, or if a step is outstanding."""
        # A closed worker has released everything that the work needs.
        if self._closed or self._num_outstanding > 0:
            return None
        pieces = (source() for source in self._sources)
        return next((piece for piece in pieces if piece is not None), None)

    def _use_pause(self) -> None:
        """On the device thread: do one piece and queue the next."""
        piece = self._next()
        if piece is not None:
            self._run(piece)
            self.begin()

    def _look_for_pause(self, num_launched: int) -> None:
        """Begin idle work, unless more than ``num_launched`` steps have been launched by now."""
        self._awaits_pause = False
        # No outstanding step at this moment is not enough: that is so between any two steps.
        if self._num_launched == num_launched:
            self.begin()
        else:
            self.await_pause()
