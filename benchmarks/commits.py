"""Two commits of this engine, or more, in turns: each figure against the first commit's.

    python -m benchmarks.commits HEAD~20                        # and this tree, 7 M, bfloat16
    python -m benchmarks.commits v1 v2 --model 0.35b --quantization none int8
    python -m benchmarks.commits HEAD~1 . --model model.gguf --workloads one --starts 0
    python -m benchmarks.commits . --model 0.35b --quantization none int8 int4  # formats

A commit is checked out beside this tree under ``--root`` and runs under this environment's Python;
``.`` is this tree. Settings of sections that a commit does not know yet are left out for it. Caches
are the user's, so the first run compiles and later ones do not; with ``--starts 0 --repeats 0``
nothing but that is done. With ``--cold`` each has a cache of its own, which is deleted before each
start. Ratios are of costs: below 1 the later commit is faster. A figure worse by more than 2 % is
marked.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.__main__ import limits
from benchmarks.peers.checkpoint import make, vocabulary
from benchmarks.peers.contest import Contest, Entrant
from benchmarks.peers.peers import Peer
from benchmarks.peers.workloads import START, WORKLOADS, figures_of
from benchmarks.record import Figure, Recorder, add_common
from benchmarks.shapes import SHAPES
from src.core.gguf import open_gguf
from src.core.settings import CHECKOUT
from src.ops.build.cache_root import cache_root

_HERE = "."
_WORSE = 1.02
_DRIVER = "drive_slipstream"
_SHOWN = ("one", "many", "prefill")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("commits", nargs="+", metavar="COMMIT", help="the first one is the base")
    parser.add_argument("--model", default="7m", metavar="SHAPE|GGUF", help="; ".join(SHAPES))
    parser.add_argument(
        "--quantization", nargs="+", default=["none"], choices=("none", "int8", "int4")
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides"
    )
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(_SHOWN))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--root", type=Path, default=CHECKOUT / ".nox" / "commits")
    parser.add_argument("--timeout", type=float, default=600, metavar="S")
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="counted ones")
    parser.add_argument("--cold", action="store_true", help="starts with empty caches")
    add_common(parser, repeats=5)
    options = parser.parse_args(arguments)
    if len(options.commits) == 1 and len(options.quantization) == 1:
        options.commits.append(_HERE)
    return options


def checkout(commit: str, root: Path) -> Path:
    """The tree of a commit: this one, or a worktree that is added where it is missing."""
    if commit == _HERE:
        return CHECKOUT
    found = _git("rev-parse", "--verify", f"{commit}^{{commit}}")
    path = root / "trees" / found[:12]
    if not path.is_dir():
        _git("worktree", "add", "--detach", str(path), found)
    return path


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=CHECKOUT, check=False, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def entered(options: argparse.Namespace) -> list[Entrant]:
    """Every commit with every format; the first one is what the others are held against."""
    given = [tuple(each.split("=", 1)) for each in options.overrides]
    peers = []
    for quantization in options.quantization:
        for commit in options.commits:
            tree = checkout(commit, options.root)
            settings = known_to(tree, dict(given))
            if quantization != "none":
                settings["model.quantization"] = quantization
            name = commit if quantization == "none" else f"{commit}, {quantization}"
            peers.append(
                Peer(
                    name,
                    "slipstream-engine",
                    _DRIVER,
                    "cpu",
                    options={"settings": settings},
                    checkout=tree,
                )
            )
    return [Entrant(peer) for peer in peers]


def known_to(tree: Path, settings: dict[str, str]) -> dict[str, str]:
    """Those of the settings whose sections a tree's configuration has."""
    text = (tree / "src" / "core" / "config.py").read_text()
    sections = set(re.findall(r"^    (\w+): \w+Section\b", text, re.MULTILINE))
    return {name: value for name, value in settings.items() if name.partition(".")[0] in sections}


def costs(workload: str, name: str, values: Sequence[float]) -> list[float]:
    """Times, or the time of one token where the figure is a rate: less is better."""
    if figures_of(workload)[name].more_is_better:
        return [1 / value for value in values]
    return list(values)


def bases(entrants: Sequence[Entrant], commits: int) -> list[Entrant]:
    """For each entrant the one that it is held against.

    With several commits that is the first one in the same format, with one the first format.
    """
    return [
        entrants[index - index % commits] if commits > 1 else entrants[0]
        for index in range(len(entrants))
    ]


def table(entrants: Sequence[Entrant], commits: int) -> list[str]:
    """A line per figure and entrant: its median, the ratio of its cost, and whether it is worse."""
    lines = []
    for workload in (*START, *WORKLOADS):
        for name, measured in figures_of(workload).items():
            for entrant, base in zip(entrants, bases(entrants, commits), strict=True):
                values = entrant.values.get((workload, name), [])
                of_base = base.values.get((workload, name), [])
                if not values or not of_base:
                    continue
                cost = statistics.median(costs(workload, name, values))
                ratio = cost / statistics.median(costs(workload, name, of_base))
                mark = "  worse" if ratio > _WORSE and len(entrants) > 1 and commits > 1 else ""
                span = f"{min(values):,.4g} to {max(values):,.4g}"
                lines.append(
                    f"{workload:<12}{name:<9}{entrant.peer.name:<24}"
                    f"{statistics.median(values):>10,.4g} {measured.unit:<6}"
                    f"{ratio:>6.3f}{mark}  ({span})"
                )
    for entrant, base in zip(entrants, bases(entrants, commits), strict=True):
        share = entrant.agreement(base)
        if share is not None and share < 1 and commits > 1:
            lines.append(f"{entrant.peer.name}: {share:.1%} of first tokens as {base.peer.name}")
        if entrant.failure:
            lines.append(f"{entrant.peer.name} is missing: {entrant.failure}")
    return lines


def save(recorder: Recorder, contest: Contest, options: argparse.Namespace) -> None:
    """One line per entrant and workload."""
    for entrant in contest.entrants:
        for workload in (*START, *WORKLOADS):
            figures = {
                name: Figure.of(measured.unit, entrant.values[workload, name])
                for name, measured in figures_of(workload).items()
                if (workload, name) in entrant.values
            }
            if figures:
                recorder.add(
                    f"{entrant.peer.name}, {workload}",
                    figures,
                    model=Path(options.model).name,
                    threads=options.threads,
                    busy_cores_of_others=round(statistics.median(contest.busy or [0.0]), 2),
                )


def main() -> int:
    options = parse()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    root: Path = options.root.resolve()
    options.root = root
    root.mkdir(parents=True, exist_ok=True)
    if options.model in SHAPES:
        path = make(root / "checkpoints" / options.model, options.model)
        vocab_size = vocabulary(options.model)
    else:
        path = Path(options.model).resolve()
        vocab_size = open_gguf(path).tensors["token_embd.weight"].shape[0]
    entrants = entered(options)
    scratch = root / f"caches-{path.stem}"
    bound = limits(options, vocab_size)
    # Entries of a cache are named by the sources that made them, so commits may share one.
    shared = None if options.cold else cache_root()
    contest = Contest(entrants, root, scratch, path, bound, options.timeout, shared)
    kinds = ("start-cold",) if options.cold else ("start-warm",)
    interrupting = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, signal.default_int_handler) for number in interrupting]
    try:
        contest.install()
        contest.convert()
        contest.start(options.starts + (not options.cold), kinds)
        if not options.cold:
            # The first start compiles where this was not run before.
            for entrant in contest.in_play:
                if options.starts:
                    entrant.values["start-warm", "start"].pop(0)
                else:
                    entrant.values.clear()
        if options.repeats and options.workloads:
            contest.take_turns(options.workloads, options.repeats)
    except KeyboardInterrupt:
        print("interrupted: what was measured so far is kept", flush=True)
    finally:
        contest.close()
        for number, handler in zip(interrupting, before, strict=True):
            signal.signal(number, handler)
    print("\n".join(table(entrants, len(options.commits))))
    save(Recorder("commits", save=not options.no_save, prints=False), contest, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
