"""Finds the tile sizes of the CUDA attention kernels, for `src/ops/tuning.py`::

    python -m benchmarks.tune_attention --head-dim 128

Every candidate is timed on batches like those of an 8 B model, as a captured step replays them, and
checked against the reference. A candidate's figure is the geometric mean over the batches of its
time relative to the shortest. Lines for the table are printed, best first. A candidate that does
not fit into the device's shared memory is left out. One that fails otherwise, or computes wrong
results, is reported last, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton

from benchmarks.gpu.kernels import call_seconds
from benchmarks.record import Figure, Recorder
from src.ops import PAGED_ATTENTION, step_schedule, tuning
from src.ops.attention import paged_attention_triton as paged_attention
from src.ops.attention.call import PagedAttention
from src.ops.tuning import DecodeShape, PrefillShape

KERNELS = ("decode", "prefill")
_TOLERANCE = 0.05

Shape = DecodeShape | PrefillShape


def candidates(kernel: str, *, quick: bool) -> list[Shape]:
    """The candidates."""
    if kernel == "decode":
        sizes = (
            [(64,), (2,), (4,), (5,)] if quick else [(32, 64, 128), (1, 2, 3, 4), (4, 8), (3, 5, 7)]
        )
        return [DecodeShape(*values) for values in itertools.product(*sizes)]
    sizes = (
        [(64,), (64,), (4,), (5,)] if quick else [(64, 128), (32, 64, 128), (4, 8), (2, 3, 5, 7)]
    )
    return [PrefillShape(*values) for values in itertools.product(*sizes)]


def batches(kernel: str, *, quick: bool) -> dict[str, list[tuple[int, int]]]:
    """Batches of (query_len, seq_len) rows that this kernel serves."""
    scale = 128 if quick else 1
    if kernel == "decode":
        mixed = [(1, (128 << (row % 8)) // scale + 1) for row in range(max(1, 64 // scale))]
        return {
            f"{rows} rows of {length // scale}": [(1, length // scale)] * rows
            for rows, length in ((1, 1024), (8, 16384), (max(1, 64 // scale), 2048))
        } | {"64 rows of any length": mixed}
    return {
        f"{query // scale} after {(total - query) // scale}": [(query // scale, total // scale)]
        for query, total in ((2048, 2048), (8192, 8192), (2048, 32768))
    }


@contextmanager
def installed(table: dict[Any, Any], key: tuple[int, int, int], shape: Shape) -> Iterator[None]:
    """Make the kernels launch with this shape during the block."""
    before = table.get(key)
    table[key] = shape
    try:
        yield
    finally:
        del table[key]
        if before is not None:
            table[key] = before


def seconds_of(
    shape: Shape, arguments: Mapping[str, tuple[Any, ...]], wanted: Mapping[str, torch.Tensor]
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
    for name, given in arguments.items():
        call = PagedAttention.of_flat(*given)
        rows = (call.block_tables, call.query_start_loc, call.seq_lens)
        # As in a model's layers, but with the candidate's tile size.
        schedule = step_schedule(call.key_cache, call.query.shape[1], *rows, call.spec)
        num_bytes = PAGED_ATTENTION.cost(*given).bytes
        seconds[name] = call_seconds(
            paged_attention.run,
            (*given[:-1], schedule),
            num_bytes,
            call.query.device,
        )
        error = float((given[9].float() - wanted[name].float()).abs().max())
        if not error < _TOLERANCE:
            raise RuntimeError(f"{shape} on {name}: differs by {error:g}")
    return seconds


def tune(kernel: str, options: argparse.Namespace, recorder: Recorder) -> list[str]:
    """Time every candidate of a kernel and print them, best first; returns lines of failures."""
    dtype = getattr(torch, options.dtype)
    heads = {"num_heads": options.heads, "num_kv_heads": options.kv_heads, "block_size": 64}
    arguments, wanted = {}, {}
    for name, rows in batches(kernel, quick=options.quick).items():
        case = {"rows": rows, "head_dim": options.head_dim, "dtype": dtype, **heads}
        arguments[name] = PAGED_ATTENTION.build(options.device, **case)
        PAGED_ATTENTION.reference(*arguments[name])
        wanted[name] = arguments[name][9].clone()
    device = torch.device(options.device)
    width = 128 if triton.next_power_of_2(options.head_dim) <= 128 else 256
    key = (tuning.capability_of(device), width, dtype.itemsize)
    table: dict[Any, Any] = tuning._DECODE if kernel == "decode" else tuning._PREFILL
    times: dict[Shape, dict[str, float]] = {}
    failed = []
    for shape in candidates(kernel, quick=options.quick):
        with installed(table, key, shape):
            try:
                times[shape] = seconds_of(shape, arguments, wanted)
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

    for shape in sorted(times, key=excess)[: options.top]:
        figures = {name: Figure.of("us", [1e6 * s]) for name, s in times[shape].items()}
        figures["over the shortest"] = Figure.of("", [excess(shape)])
        recorder.add(f"{key}: {shape}", figures, kernel=kernel, head_dim=options.head_dim)
    return failed


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_attention")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--top", type=int, default=5, help="how many are shown for each kernel")
    parser.add_argument("--quick", action="store_true", help="small inputs: figures mean nothing")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("tune_attention: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 2
    recorder = Recorder("tune_attention", save=not options.no_save)
    failed = [line for kernel in KERNELS for line in tune(kernel, options, recorder)]
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
