"""What is to be done when this process ends, in order or by `end_now`.

`os._exit`, by which a process ends whose threads may be stuck, passes over the interpreter's own
list (`atexit`).
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from typing import Final, NoReturn

_log = logging.getLogger(__name__)
_acts: Final[list[Callable[[], object]]] = []


def at_process_end(act: Callable[[], object], *, after_others: bool = False) -> None:
    """Have ``act`` called once, unless a signal kills the process. It must not block.

    Parameters
    ----------
    after_others
        Whether the acts of others come first: those that end who uses what this one removes.
    """
    _acts.insert(len(_acts) if after_others else 0, act)


def end_now(code: int) -> NoReturn:
    """End the process without waiting for any thread, but not without the acts."""
    _act()
    os._exit(code)


@atexit.register
def _act() -> None:
    while _acts:
        act = _acts.pop(0)
        try:
            act()
        except Exception:
            _log.exception("at the end of the process")
