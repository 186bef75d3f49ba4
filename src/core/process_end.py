"""Functions that run when this process ends, either normally or by `end_now`.

`end_now` uses `os._exit`, because threads may be stuck, and `os._exit` skips the interpreter's
`atexit` functions.
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
    """Call ``act`` once at the end, unless a signal kills the process. It must not block.

    Parameters
    ----------
    after_others
        Whether other functions come first, because they stop users of what this one removes.
    """
    _acts.insert(len(_acts) if after_others else 0, act)


def end_now(code: int) -> NoReturn:
    """End the process without waiting for threads, after running the registered functions."""
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
