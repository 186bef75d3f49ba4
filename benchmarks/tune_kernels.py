"""Finds the tile sizes of the Triton kernels, for the tables beside them and in src/ops/tuning.py::

    python -m benchmarks.tune_kernels --compilers 14

Every candidate is timed on batches like those of an 8 B model, a mixture of experts and DeepSeek,
as a captured step replays them, and checked against the reference. A candidate's figure is the
geometric mean over the batches of its time relative to the shortest. Lines for the table are
printed, best first; the first candidate is the one that serves today, and is always among them. A
candidate that does not fit into the device's shared memory is left out. One that fails otherwise,
or computes wrong results, is reported last, and the exit code is 1.

With ``--compilers`` so many processes compile first, which takes a tenth of the time on a machine
with enough CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.gpu.kernels import call_seconds
from benchmarks.record import Figure, Recorder
from src.ops import EXPERTS, LATENT_ATTENTION, PAGED_ATTENTION, Op, step_schedule, tuning
from src.ops.attention import (
    latent_attention_triton,
    latent_expanded_triton,
    paged_attention_triton,
)
from src.ops.projections import experts_triton

_TOLERANCE = 0.05
"""Largest difference of a result, relative to the largest number of the reference."""

Shape = Any
Batches = dict[str, dict[str, Any]]


class Tuned(NamedTuple):
    """A table of tiles, and what its entries are compared on.

    Attributes
    ----------
    key
        Options -> key of the entry that serves this device and these sizes.
    serving
        Options -> the entry that serves today.
    values
        What each field of an entry is tried with.
    quick
        The same with ``--quick``.
    batches
        Whether ``--quick`` -> name of a batch -> a case of the op.
    """

    op: Op[..., Any]
    run: Callable[..., Any]
    table: dict[Any, Any]
    key: Callable[[argparse.Namespace], Any]
    serving: Callable[[argparse.Namespace], Shape]
    values: tuple[tuple[int, ...], ...]
    quick: tuple[tuple[int, ...], ...]
    batches: Callable[[bool], Batches]


def _of_rows(rows: Sequence[tuple[int, int]], **more: Any) -> dict[str, Any]:
    return {"rows": list(rows), "block_size": 64, **more}


def _decode_batches(quick: bool) -> Batches:
    scale = 128 if quick else 1
    mixed = [(1, (128 << (row % 8)) // scale + 1) for row in range(max(1, 64 // scale))]
    return {
        f"{rows} rows of {length // scale}": _of_rows([(1, length // scale)] * rows)
        for rows, length in ((1, 1024), (8, 16384), (max(1, 64 // scale), 2048))
    } | {"64 rows of any length": _of_rows(mixed)}


def _prefill_batches(quick: bool) -> Batches:
    scale = 128 if quick else 1
    return {
        f"{new // scale} after {(all_ - new) // scale}": _of_rows([(new // scale, all_ // scale)])
        for new, all_ in ((2048, 2048), (8192, 8192), (2048, 32768))
    }


def _experts_batches(few: bool) -> Callable[[bool], Batches]:
    def batches(quick: bool) -> Batches:
        mixture = {"experts": 128, "chosen": 8, "hidden": 2048, "intermediate": 768}
        if quick:
            mixture = {"experts": 2, "chosen": 1, "hidden": 64, "intermediate": 32}
        sizes = (1, 8) if few else (48,)
        if not quick:
            sizes = (1, 16, 64, 256) if few else (320, 1024, 2048, 8192)
        return {f"{tokens} tokens": {"tokens": tokens, **mixture} for tokens in sizes}

    return batches


def _latent_batches(*, expanded: bool) -> Callable[[bool], Batches]:
    def batches(quick: bool) -> Batches:
        sizes = {"heads": 128, "nope": 128, "rope": 64, "rank": 512, "value": 128}
        if quick:
            sizes = {"heads": 2, "nope": 16, "rope": 16, "rank": 32, "value": 16}
        rows = {"1 row": [(1, 8192)], "64 rows": [(1, 2048)] * 64, "64 of 1,024": [(64, 1024)]}
        if expanded:
            rows = {"2,048": [(2048, 2048)], "2,048 of 8,192": [(2048, 8192)]}
        if quick:
            rows = {"quick": [(20, 40)] if expanded else [(1, 40)]}
        more = {"expands": True} if expanded else {}
        return {name: _of_rows(each, **sizes, **more) for name, each in rows.items()}

    return batches


def _width(options: argparse.Namespace) -> int:
    return 128 if triton.next_power_of_2(options.head_dim) <= 128 else 256


def _size(options: argparse.Namespace) -> int:
    return torch.empty(0, dtype=getattr(torch, options.dtype)).element_size()


def _capability(options: argparse.Namespace) -> int:
    return tuning.capability_of(torch.device(options.device))


def _attention(
    table: dict[Any, Any],
    values: tuple[tuple[int, ...], ...],
    quick: tuple[tuple[int, ...], ...],
    batches: Callable[[bool], Batches],
) -> Tuned:
    def key(options: argparse.Namespace) -> tuple[int, int, int]:
        return _capability(options), _width(options), _size(options)

    def serving(options: argparse.Namespace) -> Shape:
        return tuning._find(table, _capability(options), _width(options), _size(options))

    run = paged_attention_triton.run
    return Tuned(PAGED_ATTENTION, run, table, key, serving, values, quick, batches)


def _other(
    op: Op[..., Any],
    run: Callable[..., Any],
    table: dict[Any, Any],
    what: Callable[[argparse.Namespace], Any],
    values: tuple[tuple[int, ...], ...],
    quick: tuple[tuple[int, ...], ...],
    batches: Callable[[bool], Batches],
) -> Tuned:
    def key(options: argparse.Namespace) -> tuple[int, Any]:
        return _capability(options), what(options)

    def serving(options: argparse.Namespace) -> Shape:
        return tuning.of_capability(table, *key(options))

    return Tuned(op, run, table, key, serving, values, quick, batches)


KERNELS = {
    "decode": _attention(
        tuning._DECODE,
        values=((32, 64, 128), (1, 2, 3, 4), (4, 8), (3, 5, 7)),
        quick=((64,), (2,), (4,), (5,)),
        batches=_decode_batches,
    ),
    "prefill": _attention(
        tuning._PREFILL,
        values=((64, 128), (32, 64, 128), (4, 8), (2, 3, 5, 7)),
        quick=((64,), (64,), (4,), (5,)),
        batches=_prefill_batches,
    ),
    "experts of few pairs": _other(
        EXPERTS,
        experts_triton.run,
        experts_triton._TILES,
        lambda options: (experts_triton._FEW, _size(options)),
        values=((16, 32), (32, 64, 128), (64, 128), (4, 8), (3, 4, 5)),
        quick=((16,), (32,), (32,), (4,), (2,)),
        batches=_experts_batches(few=True),
    ),
    "experts of many pairs": _other(
        EXPERTS,
        experts_triton.run,
        experts_triton._TILES,
        lambda options: (experts_triton._MANY, _size(options)),
        values=((64, 128), (64, 128, 256), (32, 64), (4, 8), (3, 4)),
        quick=((64,), (32,), (32,), (4,), (2,)),
        batches=_experts_batches(few=False),
    ),
    "latent attention": _other(
        LATENT_ATTENTION,
        latent_attention_triton.run,
        latent_attention_triton._TILES,
        _size,
        values=((32, 64), (16, 32, 64, 128), (4, 8), (1, 2, 3)),
        quick=((16,), (16,), (4,), (1,)),
        batches=_latent_batches(expanded=False),
    ),
    "latent attention, expanded": _other(
        LATENT_ATTENTION,
        latent_attention_triton.run,
        latent_expanded_triton.TILES,
        _size,
        values=((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)),
        quick=((16,), (16,), (4,), (1,)),
        batches=_latent_batches(expanded=True),
    ),
}


def candidates(kernel: str, options: argparse.Namespace) -> list[Shape]:
    """The candidates; first the one that serves today."""
    tuned = KERNELS[kernel]
    serving = tuned.serving(options)
    values = tuned.quick if options.quick else tuned.values
    others = (type(serving)(*each) for each in itertools.product(*values))
    return [serving, *(shape for shape in others if shape != serving)]


@contextmanager
def installed(table: dict[Any, Any], key: Any, shape: Shape) -> Iterator[None]:
    """Make the kernels launch with this shape during the block."""
    before = table.get(key)
    table[key] = shape
    try:
        yield
    finally:
        del table[key]
        if before is not None:
            table[key] = before


def built(tuned: Tuned, case: Mapping[str, Any], options: argparse.Namespace) -> tuple[Any, ...]:
    """The op's arguments of a batch."""
    case = dict(case, dtype=getattr(torch, options.dtype))
    if tuned.op is PAGED_ATTENTION:
        heads = {"num_heads": options.heads, "num_kv_heads": options.kv_heads}
        case |= {**heads, "head_dim": options.head_dim}
    return tuned.op.build(options.device, **case)


def _with_schedule(tuned: Tuned, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """As in a model's layers, but with the candidate's tile size."""
    if tuned.op is not PAGED_ATTENTION:
        return given
    call = PAGED_ATTENTION.record.of_flat(*given)
    rows = (call.block_tables, call.query_start_loc, call.seq_lens)
    schedule = step_schedule(call.key_cache, call.query.shape[1], *rows, call.spec)
    return (*given[:-2], schedule, given[-1])


def _result(tuned: Tuned, given: tuple[Any, ...], returned: Any) -> Tensor:
    result: Tensor = tuned.op.record.of_flat(*given).out if tuned.op.mutated else returned
    return result.float().clone()


def seconds_of(
    tuned: Tuned, arguments: Mapping[str, tuple[Any, ...]], wanted: Mapping[str, Tensor]
) -> dict[str, float]:
    """Time by batch.

    Raises
    ------
    triton.runtime.errors.OutOfResources
        The program does not fit on the device.
    RuntimeError
        The kernel's results differ from the reference.
    """
    seconds = {}
    for name, plain in arguments.items():
        given = _with_schedule(tuned, plain)
        if tuned.op.mutated:
            # Nothing of the reference, or of a candidate before, may count as a result.
            tuned.op.record.of_flat(*given).out.fill_(torch.nan)
        got = _result(tuned, given, tuned.run(*given))
        error = float((got - wanted[name]).abs().max() / wanted[name].abs().max())
        if not error < _TOLERANCE:
            raise RuntimeError(f"{name}: differs by {error:g} of the largest number")
        num_bytes = tuned.op.cost(*plain).bytes
        device = next(value.device for value in plain if isinstance(value, Tensor))
        seconds[name] = call_seconds(tuned.run, given, num_bytes, device)
    return seconds


def tune(kernel: str, options: argparse.Namespace, recorder: Recorder) -> list[str]:
    """Time every candidate of a kernel and print them, best first; returns lines of failures."""
    tuned = KERNELS[kernel]
    key = tuned.key(options)
    arguments, wanted = {}, {}
    for name, case in tuned.batches(options.quick).items():
        given = arguments[name] = built(tuned, case, options)
        wanted[name] = _result(tuned, given, tuned.op.reference(*given))
    times: dict[Shape, dict[str, float]] = {}
    failed = []
    for shape in candidates(kernel, options):
        with installed(tuned.table, key, shape):
            try:
                times[shape] = seconds_of(tuned, arguments, wanted)
            except triton.runtime.errors.OutOfResources:
                continue
            except Exception as error:
                # An error of one candidate must not lose the others' results.
                failed.append(f"{kernel}: {shape}: {error!r}")
    if not times:
        return [*failed, f"{kernel}: no candidate ran"]
    best = {name: min(each[name] for each in times.values()) for name in arguments}

    def excess(shape: Shape) -> float:
        ratios: Sequence[float] = [times[shape][name] / best[name] for name in best]
        return statistics.geometric_mean(ratios)

    serving = tuned.serving(options)
    shown = sorted(times, key=excess)[: options.top]
    for shape in [*shown, *({serving} & set(times) - set(shown))]:
        figures = {name: Figure.of("us", [1e6 * s]) for name, s in times[shape].items()}
        figures["over the shortest"] = Figure.of("", [excess(shape)])
        recorder.add(f"{kernel}: {key}: {shape}", figures, kernel=kernel)
    return failed


def compile_some(first: int, step: int, options: argparse.Namespace) -> None:
    """Launch every ``step``-th candidate of all kernels once, which leaves it in Triton's cache."""
    each = [(kernel, shape) for kernel in options.only for shape in candidates(kernel, options)]
    arguments: dict[str, tuple[Any, ...]] = {}
    for kernel, shape in each[first::step]:
        tuned = KERNELS[kernel]
        if kernel not in arguments:
            case = next(iter(tuned.batches(options.quick).values()))
            arguments[kernel] = built(tuned, case, options)
        with installed(tuned.table, tuned.key(options), shape):
            try:
                tuned.run(*_with_schedule(tuned, arguments[kernel]))
            except Exception:
                continue  # It is reported when it is timed.


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_kernels")
    parser.add_argument("--only", nargs="+", choices=tuple(KERNELS), default=list(KERNELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--compilers", type=int, default=0, help="processes that compile first")
    parser.add_argument("--top", type=int, default=5, help="how many are shown for each kernel")
    parser.add_argument("--quick", action="store_true", help="small inputs: figures mean nothing")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("tune_kernels: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 2
    spawning = multiprocessing.get_context("spawn")
    compilers = [
        spawning.Process(target=compile_some, args=(first, options.compilers, options))
        for first in range(options.compilers)
    ]
    for each in compilers:
        each.start()
    for each in compilers:
        each.join()
    recorder = Recorder("tune_kernels", save=not options.no_save)
    failed = [line for kernel in options.only for line in tune(kernel, options, recorder)]
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
