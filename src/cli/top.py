"""``python -m src top``: shows a server's state in the terminal, a few times a second."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from src.cli.debug_client import DebugClient, ServerError, add_server, client_of
from src.cli.options import Commands
from src.cli.options import add_command as add
from src.cli.top_screen import ASCII, UNICODE, Alphabet, Reading, screen
from src.core.steps import StepRecord
from src.core.views import PoolView, RequestsView, RequestTrack, TimelineView

# Seconds over which rates and latencies are computed.
WINDOW: Final = 10.0
_MAX_STEPS: Final = 100_000
# Number of steps in the first query; later queries only ask for new steps.
_FIRST_STEPS: Final = 4096
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(commands, "top", "Watch a server: throughput, latency, memory, requests.", run)
    add_server(parser)
    parser.add_argument("--once", action="store_true", help="print one screen and end")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_interval,
        default=0.5,
        help="between two looks, 0.1 to 60 (default: 0.5)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command until Ctrl-C."""
    with contextlib.closing(client_of(arguments)) as client:
        return _watch(Watcher(client), arguments)


def _watch(watcher: Watcher, arguments: argparse.Namespace) -> int:
    # On a terminal without cursor control, or in a file, print one screen.
    plain = os.environ.get("TERM", "dumb") == "dumb" or not sys.stdout.isatty()
    if arguments.once or plain:
        print("\n".join(watcher.look(_alphabet())))
        return 0
    with contextlib.suppress(KeyboardInterrupt), _whole_screen():
        while True:
            try:
                lines = watcher.look(_alphabet())
            except ServerError as error:
                lines = [f"{error}; trying again"]
            print("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="")
            sys.stdout.flush()
            time.sleep(arguments.interval)
    return 0


class Watcher:
    """Polls a server, and keeps the steps of the last seconds."""

    def __init__(self, client: DebugClient) -> None:
        self._client = client
        self._last = 0
        self._steps: deque[StepRecord] = deque(maxlen=_MAX_STEPS)
        self._ended: dict[int, RequestTrack] = {}

    def look(self, alphabet: Alphabet) -> list[str]:
        """The lines of the current screen.

        Raises
        ------
        ServerError
            The server does not answer.
        """
        columns, rows = shutil.get_terminal_size((120, 40))
        return screen(self._read(), columns, rows - 1, alphabet)

    def _read(self) -> Reading:
        client = self._client
        path = f"/debug/timeline?format=records&steps={_FIRST_STEPS}&after={self._last}"
        view = client.decode(path, TimelineView)
        if view.last_step < self._last:
            # Step numbers restart at 1 if the server was restarted.
            self._steps.clear()
            self._ended.clear()
        self._last = view.last_step
        self._steps.extend(view.steps)
        begin = view.now - WINDOW
        while self._steps and self._steps[0].published < begin:
            self._steps.popleft()
        self._ended.update((t.key, t) for t in view.requests if t.ended is not None)
        ended = {
            key: t for key, t in self._ended.items() if t.ended is not None and t.ended >= begin
        }
        self._ended = ended
        return Reading(
            url=client.url,
            window=WINDOW,
            now=view.now,
            steps=list(self._steps),
            requests=[*ended.values(), *(t for t in view.requests if t.ended is None)],
            alive=client.decode("/debug/requests?limit=100", RequestsView),
            pool=client.decode("/debug/pool?cells=256", PoolView),
            totals=_totals(client.get("/metrics").decode()),
        )


def _totals(text: str) -> dict[str, float]:
    """Samples of Prometheus' text format, summed over labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


@contextlib.contextmanager
def _whole_screen() -> Iterator[None]:
    print(_ENTER, end="")
    try:
        yield
    finally:
        print(_LEAVE, end="", flush=True)


def _alphabet() -> Alphabet:
    try:
        UNICODE.levels.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 60 seconds, got {text!r}")
    return seconds
