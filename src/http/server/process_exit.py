"""Ending the process with an exit code that its supervisor sees, and one readable reason.

Under uvicorn and ``python -m src serve`` the exit code is the number below, under granian it is 1.
Hypercorn runs an application in a child process and forgets the child's exit code: a parent that
has lost its only child exits with 0, which tells every supervisor that all is well. So the parent
is ended by a signal that it does not handle, and a shell sees 128 + that signal: 138 and 140.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from typing import Final, NoReturn

from src.core.process_end import end_now

EXIT_LOAD_FAILED: Final = 3
EXIT_ENGINE_DEAD: Final = 4

# The engine's background compiler, by the name it gives its thread.
COMPILE_THREAD: Final = "slipstream-compile"

_PARENT_SIGNALS: Final = {
    EXIT_LOAD_FAILED: signal.SIGUSR1,
    EXIT_ENGINE_DEAD: signal.SIGUSR2,
}


def end_process(code: int, reason: str = "") -> NoReturn:
    """End the process now: threads may be stuck in a load or in a dead device, so nobody waits."""
    if reason:
        print(f"slipstream: {reason}", file=sys.stderr, flush=True)  # noqa: T201
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if code in _PARENT_SIGNALS:
        _end_hypercorn_parent(_PARENT_SIGNALS[code])
    end_now(code)


def first_line(error: BaseException) -> str:
    """What an error says, in one line: torch adds whole stack traces to its own."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_compiling() -> bool:
    """Whether the engine still compiles in the background."""
    return any(thread.name == COMPILE_THREAD for thread in threading.enumerate())


def _end_hypercorn_parent(parent_signal: signal.Signals) -> None:
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or "hypercorn" not in sys.modules:
        return
    if parent.pid != os.getppid():
        return
    _release_semaphores()
    os.kill(parent.pid, parent_signal)


def _release_semaphores() -> None:
    """Release what the parent shares with us: ended by a signal, it cannot do so itself.

    Otherwise the resource tracker ends the log with a warning about leaked semaphores.
    """
    from multiprocessing import synchronize

    for lock in gc.get_objects():
        # Not `isinstance`: it would wake lazy modules, which are among all these objects.
        if issubclass(type(lock), synchronize.SemLock):
            with contextlib.suppress(OSError):
                synchronize.SemLock._cleanup(lock._semlock.name)  # type: ignore[attr-defined]
