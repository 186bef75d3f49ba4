"""Runs peers in turns: A B C, then C B A, so that drift affects all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.peers import DRIVERS, Peer
from benchmarks.peers.running import PeerFailed, Running, command_of
from benchmarks.peers.workloads import START, WORKLOADS, figures_of
from src.core.settings import PREFIX
from tests.clients.environments import NotInstalled

_CONVERT_SECONDS = 1800.0
PAUSE_SECONDS = 0.5
# One prompt, one token: measures everything between process start and the first answer.
_FIRST = ([[3, 4, 5, 6, 7, 8, 9, 10]], 1)


@dataclass
class Entrant:
    """A peer in a contest.

    Attributes
    ----------
    values
        (workload, figure) -> one value per repeat.
    first_tokens
        Of every turn, for a comparison with the reference.
    failure
        Why it is excluded; empty if it is not.
    """

    peer: Peer
    version: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    first_tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    failure: str = ""
    running: Running | None = None

    def add(self, workload: str, figure: str, value: float) -> None:
        """Add the value of one repeat."""
        self.values.setdefault((workload, figure), []).append(value)

    def fail(self, why: str) -> None:
        """Exclude it; the others go on."""
        self.failure = " ".join(why.split())
        print(f"  {self.peer.name} is out: {self.failure}", flush=True)
        self.close()

    def close(self) -> None:
        """End its engine."""
        if self.running is not None:
            self.running.close()
            self.running = None

    def agreement(self, reference: Entrant) -> float | None:
        """Share of requests with the same first token as the reference."""
        pairs = [
            (mine, theirs)
            for turn, tokens in self.first_tokens.items()
            if turn in reference.first_tokens
            for mine, theirs in zip(tokens, reference.first_tokens[turn], strict=True)
        ]
        return sum(mine == theirs for mine, theirs in pairs) / len(pairs) if pairs else None


class Contest:
    """Installs, converts, starts and measures peers; a peer that fails is excluded.

    Parameters
    ----------
    entrants
        The reference comes first.
    root
        Directory of the peers' environments.
    scratch
        Directory of checkpoints and caches.
    checkpoint
        Of all peers.
    limits
        ``max_model_len``, ``max_num_seqs``, ``kv_bytes``, ``kv_tokens``, ``threads``,
        ``vocab_size``.
    seconds
        Time limits of a start and of a turn.
    cache
        The cache directory of all entrants, which is never deleted; ``None``: each has its own.
    """

    def __init__(
        self, entrants: Sequence[Entrant], root: Path, scratch: Path, checkpoint: Path,
        limits: dict[str, Any], seconds: float, cache: Path | None = None,
    ) -> None:  # fmt: skip
        self.entrants = entrants
        self._root = root
        self._scratch = scratch
        self._checkpoint = checkpoint
        self._limits = limits
        self._seconds = seconds
        self._shared = cache
        self.busy: list[float] = []
        """Number of cores used by other programs, before each turn."""

    @property
    def in_play(self) -> list[Entrant]:
        """Entrants that have not failed."""
        return [entrant for entrant in self.entrants if not entrant.failure]

    def install(self) -> None:
        """Install every environment that is not complete."""
        for entrant in self.in_play:
            peer = entrant.peer
            try:
                if peer.environment is not None:
                    print(f"installing {peer.environment.name}", flush=True)
                    peer.environment.install(self._root)
                entrant.version = peer.version(self._root)
            except NotInstalled as error:
                entrant.fail(f"not installed: {error}")

    def convert(self) -> None:
        """Convert every checkpoint that does not exist."""
        for entrant in self.in_play:
            peer = entrant.peer
            converted = self._scratch / f"{self._checkpoint.name}-{_path_of(peer)}"
            entrant.options = {
                **self._limits,
                **peer.options,
                "checkpoint": str(self._checkpoint),
                "converted": str(converted if peer.converter else self._checkpoint),
                "cache": str(self._cache(entrant)),
            }
            if not peer.converter or converted.exists():
                continue
            print(f"converting for {peer.name}", flush=True)
            try:
                self._convert(peer, converted)
            except (OSError, subprocess.SubprocessError) as error:
                words = getattr(error, "stderr", None) or str(error)
                entrant.fail(f"not converted: {words[-300:]}")

    def _convert(self, peer: Peer, converted: Path) -> None:
        unfinished = converted.with_name(f"{converted.name}-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
        python = Path(peer.python(self._root))
        places = {
            "python": python,
            "programs": python.parent,
            "drivers": DRIVERS,
            "checkpoint": self._checkpoint,
            "converted": unfinished,
        }
        subprocess.run(
            [word.format(**places) for word in peer.converter],
            env=self._variables(peer, self._scratch),
            check=True,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_CONVERT_SECONDS,
        )
        unfinished.rename(converted)

    def start(self, repeats: int, kinds: Sequence[str] = tuple(START)) -> None:
        """Start each cold and warm, ``repeats`` times in turns; the last start keeps running.

        ``kinds`` may leave out a kind of start. Without the cold one caches are kept.
        """
        for repeat in range(repeats):
            for entrant in self.in_play[:: -1 if repeat % 2 else 1]:
                if "start-cold" in kinds:
                    shutil.rmtree(self._cache(entrant), ignore_errors=True)
                try:
                    for start in kinds:
                        self._rest()
                        print(f"{start}: {entrant.peer.name}", flush=True)
                        self._start(entrant, start)
                        if start != kinds[-1] or repeat + 1 < repeats:
                            entrant.close()
                except PeerFailed as error:
                    entrant.fail(str(error))

    def _start(self, entrant: Entrant, start: str) -> None:
        cache = self._cache(entrant)
        cache.mkdir(parents=True, exist_ok=True)
        peer = entrant.peer
        entrant.running = running = Running(
            command_of(peer.python(self._root), peer.driver, entrant.options),
            self._variables(peer, cache),
            peer.checkout if peer.environment is None else self._scratch,
            self._seconds,
        )
        entrant.about = running.about
        turn = running.ask(*_FIRST, self._seconds)
        entrant.add(start, "start", turn.answers[0].first - running.started)
        # If an engine still compiles after its first answer, it does so before its second one.
        running.ask(*_FIRST, self._seconds)

    def take_turns(self, workloads: Sequence[str], repeats: int) -> None:
        """Run every workload on every peer, ``repeats`` times after an uncounted first time."""
        for repeat in range(repeats + 1):
            for name in workloads:
                order = self.in_play if repeat % 2 else self.in_play[::-1]
                for entrant in order:
                    if WORKLOADS[name].needs_prefix_cache and not entrant.peer.caches_prefixes:
                        continue
                    self.busy.append(self._rest())
                    self._turn(entrant, name, repeat)
            print(f"repeat {repeat} of {repeats} done", flush=True)

    def _turn(self, entrant: Entrant, name: str, repeat: int) -> None:
        workload = WORKLOADS[name]
        prompts = workload.prompts(repeat, self._limits["vocab_size"])
        assert entrant.running is not None
        try:
            turn = entrant.running.ask(prompts, workload.output_len, self._seconds)
        except PeerFailed as error:
            entrant.fail(f"{name}: {error}")
            return
        entrant.first_tokens[name, repeat] = turn.first_tokens
        if repeat:
            for figure, measured in figures_of(name).items():
                value = measured.measure(turn.answers, workload.input_len)
                entrant.add(name, figure, value)

    def close(self) -> None:
        """End every engine."""
        for entrant in self.entrants:
            entrant.close()

    def _cache(self, entrant: Entrant) -> Path:
        return self._shared or self._scratch / f"cache-{_path_of(entrant.peer)}"

    def _variables(self, peer: Peer, cache: Path) -> dict[str, str]:
        cpus = sorted(os.sched_getaffinity(0))
        own = {
            k: v for k, v in os.environ.items() if not k.startswith((PREFIX, "PYTHON", "VIRTUAL"))
        }
        # Python first looks in a driver's own directory, not in the checkout.
        sources = {"PYTHONPATH": str(peer.checkout)} if peer.environment is None else {}
        places = {"cache": cache, "cpus": f"{cpus[0]}-{cpus[-1]}"}
        return {
            **own,
            "PATH": f"{Path(peer.python(self._root)).parent}{os.pathsep}{own['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "SLIPSTREAM_CACHE_DIR": str(cache),
            **sources,
            **{name: value.format(**places) for name, value in peer.variables.items()},
        }

    def _rest(self) -> float:
        """Wait until threads no longer spin after their work; returns the busy cores afterwards."""
        before = _busy_seconds()
        time.sleep(PAUSE_SECONDS)
        return max(0.0, (_busy_seconds() - before) / PAUSE_SECONDS)


def _path_of(peer: Peer) -> str:
    """The peer's name without spaces, which some compilers' command lines cannot handle."""
    return "-".join(peer.name.replace(",", "").split())


def _busy_seconds() -> float:
    """Busy seconds of all cores since the machine started."""
    user, nice, system = (int(field) for field in _cpu_line().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _cpu_line() -> str:
    with open("/proc/stat") as stream:
        return stream.readline()
