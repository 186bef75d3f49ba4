"""Vectors and ranks: this engine, its server, and others, on the same checkpoint, in turns.

    python -m benchmarks.tasks                                  # all that can be installed
    python -m benchmarks.tasks onnxruntime openvino             # only these; prefixes suffice
    python -m benchmarks.tasks --loads lone many --repeats 9

The checkpoints are all-MiniLM-L6-v2 and a cross-encoder of its shape with random weights. All get
texts, so tokenizing counts, and compute with the same threads and dtype. A peer is installed into
an environment of its own under ``--environments``; one that fails is named and left out. The ratio
says how many times faster this engine is. Before it is measured, each peer's vectors are held
against this engine's.
"""

from __future__ import annotations

import argparse
import math
import operator
import os
import random
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.load import MS
from benchmarks.peers.__main__ import chosen
from benchmarks.peers.contest import Contest, Entrant
from benchmarks.peers.encoders import EMBEDDER, MAX_TOKENS, RANKER, make_encoders, words_of
from benchmarks.peers.peers import REFERENCE
from benchmarks.peers.running import PeerFailed, Running, command_of
from benchmarks.peers.vector_peers import vector_peers
from benchmarks.record import Figure, Recorder, add_common
from src.core.settings import CHECKOUT

_SPECIAL: Final = 2  # tokens that the tokenizer puts around a text
_DOCUMENTS: Final = 100
_SEED: Final = 0
_STARTED: Final = "start"


@dataclass(frozen=True)
class Load:
    """Texts of one call.

    Attributes
    ----------
    about
        One line of explanation for the table.
    lengths
        Tokens of each text, special ones included; of a pair, those of the document.
    calls
        Calls of a turn; their median counts.
    query
        Tokens of the query, for ranks; 0 for vectors.
    """

    about: str
    lengths: tuple[int, ...]
    calls: int
    query: int = 0


def _mixed() -> tuple[int, ...]:
    """64 lengths from 8 to 512, as many short as long ones on a scale of ratios."""
    source = random.Random(_SEED)
    return tuple(round(8 * 64 ** source.random()) for _ in range(64))


LOADS: Final = {
    "lone": Load("one text of 16 tokens", (16,), 40),
    "many": Load("32 texts of 16 tokens", (16,) * 32, 10),
    "bulk": Load("256 texts of 128 tokens", (128,) * 256, 1),
    "mixed": Load("64 texts of 8 to 512 tokens", _mixed(), 1),
    "ranks": Load("100 documents of 64 tokens for a query of 12", (64,) * _DOCUMENTS, 1, 12),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="peers; all by default")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--environments", type=Path, default=CHECKOUT / ".nox" / "peers")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="of a turn")
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


class VectorContest(Contest):
    """Turns of vectors and ranks, with loads in place of workloads."""

    def __init__(self, words: Sequence[str], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._words = words

    def open(self) -> None:
        """Start all, and hold the vectors of each against the reference's."""
        texts = self.texts(LOADS["mixed"], -1)[:8]
        reference: list[list[float]] = []
        for entrant in self.in_play:
            try:
                print(f"starting {entrant.peer.name}", flush=True)
                self._start(entrant, _STARTED)
                results = self._ask(entrant, {"texts": texts, "repeats": 1})["results"]
            except PeerFailed as error:
                entrant.fail(str(error))
                continue
            reference = reference or results
            entrant.about["least_cosine"] = min(map(cosine, results, reference))

    def _cache(self, entrant: Entrant) -> Path:
        # This engine and its server run the same code.
        own = entrant.peer.environment is None
        return self._scratch / f"cache-{REFERENCE}" if own else super()._cache(entrant)

    def _start(self, entrant: Entrant, start: str) -> None:
        cache = self._cache(entrant)
        cache.mkdir(parents=True, exist_ok=True)
        peer = entrant.peer
        places = {name: str(self._checkpoint / name) for name in (EMBEDDER, RANKER)}
        entrant.options = {**entrant.options, **places}
        entrant.running = Running(
            command_of(peer.python(self._root), peer.driver, entrant.options),
            self._variables(peer, cache),
            peer.checkout if peer.environment is None else self._scratch,
            self._seconds,
        )
        entrant.about = entrant.running.about

    def texts(self, load: Load, repeat: int) -> list[str]:
        """A load's texts in a repeat: the same for every peer, and others each time."""
        source = random.Random(f"{load.about} {repeat}")
        special = 1 if load.query else _SPECIAL
        return [
            " ".join(source.choices(self._words, k=length - special)) for length in load.lengths
        ]

    def take_turns(self, workloads: Sequence[str], repeats: int) -> None:
        """Run every load on every peer, ``repeats`` times after an uncounted first time."""
        for repeat in range(repeats + 1):
            for name in workloads:
                load = LOADS[name]
                turn: dict[str, Any] = {"texts": self.texts(load, repeat), "repeats": load.calls}
                if load.query:
                    source = random.Random(repeat)
                    turn["query"] = " ".join(source.choices(self._words, k=load.query - _SPECIAL))
                for entrant in self.in_play[:: 1 if repeat % 2 else -1]:
                    if load.query and not entrant.about["ranks"]:
                        continue
                    self.busy.append(self._rest())
                    try:
                        seconds = self._ask(entrant, turn)["seconds"]
                    except PeerFailed as error:
                        entrant.fail(f"{name}: {error}")
                        continue
                    if repeat:
                        entrant.add(name, "call", MS * statistics.median(seconds))
            print(f"repeat {repeat} of {repeats} done", flush=True)

    def _ask(self, entrant: Entrant, turn: dict[str, Any]) -> dict[str, Any]:
        assert entrant.running is not None
        answer = entrant.running.exchange(turn, self._seconds)
        if len(answer["results"]) != len(turn["texts"]):
            raise PeerFailed(f"{len(answer['results'])} results of {len(turn['texts'])} texts")
        return answer


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two vectors."""
    return sum(map(operator.mul, one, other)) / math.hypot(*one) / math.hypot(*other)


def table(entrants: Sequence[Entrant], loads: Sequence[str]) -> str:
    """Load, peer, time and ratio, in columns; then the missing peers, and why."""
    reference = entrants[0]
    lines = [("load", "peer", "ms", "ratio", "tokens/s", "least cosine")]
    for name in loads:
        base = reference.values.get((name, "call"))
        for entrant in entrants:
            values = entrant.values.get((name, "call"))
            if values and base:
                median = statistics.median(values)
                rate = sum(LOADS[name].lengths) / median * MS
                cells = (f"{median:.4g}", f"{median / statistics.median(base):.3f}", f"{rate:,.0f}")
                shown = f"{entrant.about['least_cosine']:.7f}"
                lines.append((name, entrant.peer.name, *cells, shown))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines]  # fmt: skip
    rows += [f"{name}: {LOADS[name].about}" for name in loads]
    rows += [f"{e.peer.name} is missing: {e.failure}" for e in entrants if e.failure]
    return "\n".join(rows)


def save(recorder: Recorder, contest: VectorContest, options: argparse.Namespace) -> None:
    """Save one line per peer and load, and one per missing peer."""
    shared = {
        "threads": options.threads,
        "dtype": options.dtype,
        "busy_cores_of_others": round(statistics.median(contest.busy or [0.0]), 2),
    }
    for entrant in contest.entrants:
        details = {"peer": entrant.peer.name, "peer_version": entrant.version, **shared}
        if entrant.failure:
            recorder.add(f"{entrant.peer.name}, missing", {}, failure=entrant.failure, **details)
        for name in options.loads:
            if (name, "call") in entrant.values:
                figures = {"call": Figure.of("ms", entrant.values[name, "call"])}
                recorder.add(
                    f"{entrant.peer.name}, {name}",
                    figures,
                    load=name,
                    about=LOADS[name].about,
                    least_cosine=entrant.about["least_cosine"],
                    **details,
                )


def main() -> None:
    options = parse()
    # Limits all peers, which start as many threads as there are CPUs for them.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    root = options.environments.resolve()
    scratch = root / "checkpoints"
    scratch.mkdir(parents=True, exist_ok=True)
    arguments = [*options.names, "--loads", *options.loads, "--threads", str(options.threads)]
    arguments += ["--dtype", options.dtype, "--repeats", str(options.repeats)]
    command = f"python -m benchmarks.tasks {shlex.join(arguments)}"
    recorder = Recorder("tasks", save=not options.no_save, command=command, prints=False)
    checkpoint = make_encoders(root, scratch / "minilm")
    entrants = [Entrant(peer) for peer in chosen(vector_peers(), options.names)]
    limits = {
        "threads": options.threads,
        "dtype": options.dtype,
        "max_tokens": MAX_TOKENS,
        "most_documents": _DOCUMENTS,
    }
    words = words_of(checkpoint / EMBEDDER)
    contest = VectorContest(words, entrants, root, scratch, checkpoint, limits, options.timeout)
    try:
        contest.install()
        contest.convert()
        contest.open()
        contest.take_turns(options.loads, options.repeats)
    except KeyboardInterrupt:
        print("interrupted: what was measured so far is kept", flush=True)
    finally:
        contest.close()
    save(recorder, contest, options)
    print(f"\n{table(entrants, options.loads)}")
    print(f"Others kept {statistics.median(contest.busy or [0.0]):.2f} cores busy (median).")


if __name__ == "__main__":
    main()
