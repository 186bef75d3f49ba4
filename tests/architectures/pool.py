"""Checks some architectures, each in a process of its own, a few at a time."""

from __future__ import annotations

import json
import multiprocessing
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec

LIMIT = 180.0  # seconds that an architecture may take


class Running(msgspec.Struct):
    """One architecture on its way."""

    model_type: str
    process: Any
    answer: Connection
    started: float


def _check(model_type: str, answer: Connection) -> None:
    import torch

    from tests.architectures.check import check

    torch.set_num_threads(1)
    answer.send(check(model_type))


def _start(context: Any, model_type: str) -> Running:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(model_type, theirs))
    process.start()
    theirs.close()
    return Running(model_type, process, ours, time.monotonic())


def _line_of(running: Running) -> dict[str, Any] | None:
    """What has become of one; None while it goes on."""
    late = time.monotonic() - running.started > LIMIT
    if not running.answer.poll() and running.process.is_alive() and not late:
        return None
    try:
        line: dict[str, Any] = running.answer.recv() if running.answer.poll() else {}
    except EOFError:
        line = {}
    if late:
        running.process.kill()
    running.process.join()
    if not line:
        reason = f"more than {LIMIT:.0f} s" if late else f"exit code {running.process.exitcode}"
        line = {"model_type": running.model_type, "failed": reason}
    return line


def run(model_types: list[str], processes: int, results: Path) -> None:
    """Check architectures, a few at a time; each adds its line to ``results``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.architectures.check"])
    waiting, running = list(model_types), list[Running]()
    while waiting or running:
        while waiting and len(running) < processes:
            running.append(_start(context, waiting.pop(0)))
        wait([one.answer for one in running], timeout=5)
        for one in list(running):
            line = _line_of(one)
            if line is not None:
                running.remove(one)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
