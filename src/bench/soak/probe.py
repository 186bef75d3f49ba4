"""``python -m src`` with a probe in its event loop, for the process under test.

On SIGUSR1 it writes data that only the process itself knows to the file named by ``SOAK_PROBE``.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "SOAK_PROBE"


def tell(file: Path) -> None:
    """Write down the tasks and threads, atomically."""
    tasks = asyncio.all_tasks()
    facts = {
        "tasks": len(tasks),
        "threads": threading.active_count(),
        "names": sorted(str(task.get_coro()) for task in tasks)[:50],
    }
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(facts))
    fresh.replace(file)


async def _watched(main: Coroutine[Any, Any, Any], file: Path) -> Any:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell, file)
    return await main


def run() -> None:
    """Run ``python -m src`` with this process's arguments."""
    file = Path(os.environ[VARIABLE])
    original = asyncio.run

    def watched_run(main: Coroutine[Any, Any, Any], **options: Any) -> Any:
        return original(_watched(main, file), **options)

    asyncio.run = watched_run
    runpy.run_module("src", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run()
