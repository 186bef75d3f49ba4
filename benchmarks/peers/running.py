"""Runs a driver's process: starts it, sends it turns, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.load import Answer
from benchmarks.peers.peers import DRIVERS

_LAST_WORDS = 5
_END_SECONDS = 20.0


class PeerFailed(Exception):
    """The engine failed to open or to answer; the message has the end of its output."""


class Running:
    """An open engine in a process group of its own.

    Parameters
    ----------
    command
        Interpreter, driver and argument.
    variables
        Its complete environment.
    directory
        Its working directory.

    Raises
    ------
    PeerFailed
        It is not ready within ``seconds``.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], directory: Path, seconds: float
    ) -> None:
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            cwd=directory,
            env=dict(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_lines, self._read_words)
        ]
        for reader in self._readers:
            reader.start()
        try:
            ready = self._next(seconds)
        except (PeerFailed, KeyboardInterrupt):
            self.close()
            raise
        self.ready: float = ready["ready"]
        self.about: dict[str, Any] = ready["about"]

    def ask(self, prompts: list[list[int]], output_len: int, seconds: float) -> Turn:
        """Run one turn: all prompts at once.

        Raises
        ------
        PeerFailed
            It ends, takes too long, or an answer does not have ``output_len`` tokens.
        """
        turn = {"prompts": prompts, "output_len": output_len}
        answers = self.exchange(turn, seconds)["answers"]
        lengths = {len(tokens) for *_, tokens in answers}
        if len(answers) != len(prompts) or lengths != {output_len}:
            raise PeerFailed(
                f"{len(answers)} answers of {sorted(lengths)} tokens to {len(prompts)} prompts, "
                f"expected {output_len} each"
            )
        return Turn(answers)

    def exchange(self, turn: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send one turn, and wait for what the driver says to it.

        Raises
        ------
        PeerFailed
            It ends, or takes too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(turn) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerFailed(self._last_words()) from error
        return self._next(seconds)

    def close(self) -> None:
        """End it and all its children."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        # Children survive a driver that exits at once.
        self._kill()
        self._process.wait(_END_SECONDS)
        for reader in self._readers:
            reader.join(_END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            # It hangs, so it would not react to a request to end either.
            self._kill()
            raise PeerFailed(f"no answer within {seconds:g} s; {self._last_words()}") from None
        if not line:
            # Its last output may not have arrived yet.
            time.sleep(0.2)
            raise PeerFailed(self._last_words())
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        return " | ".join(self._words)[-400:] or f"ended with {self._process.poll()}"

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put("")

    def _read_words(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                if line.strip():
                    self._words.append(line.strip())


class Turn:
    """The result of one turn.

    Attributes
    ----------
    answers
        Times of each request's tokens.
    first_tokens
        The first token of each answer; engines with the same weights agree on nearly all of them.
    """

    def __init__(self, answers: Sequence[tuple[float, float, float, list[int]]]) -> None:
        self.answers = [
            Answer(sent, first, last, len(tokens)) for sent, first, last, tokens in answers
        ]
        self.first_tokens = [tokens[0] for *_, tokens in answers]


def command_of(python: str, driver: str, options: Mapping[str, Any]) -> list[str]:
    """The command that drives an engine."""
    return [python, str(DRIVERS / f"{driver}.py"), json.dumps(options)]
