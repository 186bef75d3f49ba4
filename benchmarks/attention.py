"""CPU attention in bfloat16 relative to the machine's limits, and the gain of shared prefixes.

    python -m benchmarks.attention
    python -m benchmarks.attention --parts shared

`prefill` is one prompt of 2,048 tokens, relative to the rate of `F.linear` in bfloat16, the best of
some sizes. Only visible keys are counted: two products per query and key at or before it, i.e. 2.1
million pairs per head instead of the 4.2 million of the full square. `decode` is rows of one token:
bytes of keys and values over time, relative to the memory bandwidth of as many threads. Enough
layers take turns to exceed the caches, and their blocks are in random order. The machine's limits
are measured before and after every turn, because a shared machine changes by the minute; a turn's
figure is relative to the mean of the two.

`coded` is the same decoding rows over caches in 8 bits (`cache.dtype`), as many tokens. Passes over
them and over bfloat16 follow one another in random order; the figure is the ratio of the two times,
under 1 if 8 bits are faster.

`shared` is decoding rows whose block tables begin alike, computed with and without sharing: the
same call on the same memory, with sharing disabled in the library for comparison
(`KernelLibrary.share_prefixes`). The two passes follow one another in random order, and the ratio
is of the two. For rows without shared keys, it is the cost of looking for them.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.decode_bandwidth import bandwidth
from benchmarks.record import Figure, Recorder, add_common, figures_of
from src.engine.sizing.roofline import best_seconds
from src.ops import PAGED_ATTENTION
from src.ops.attention.cached_rows import CODES
from src.ops.build.kernels import ensure_built, kernel_library
from src.ops.runtime.kernel_library import KernelLibrary

US = 1e6
PARTS = ("prefill", "decode", "coded", "shared")
Calls = Sequence[Callable[[], None]]


class Heads(NamedTuple):
    """Numbers of query heads and of kv heads, head size, and dtype."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {kind}"

    def key_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class Family(NamedTuple):
    """Decoding rows: number of keys that all of them share, and of each row's own keys."""

    rows: int
    shared: int
    own: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.shared or 'no'} keys shared, {self.own} own"


# Heads of models with 0.35 B and 8 B parameters.
HEADS = (Heads(16, 8, 64), Heads(32, 8, 128))
PROMPT = 2048
DECODES = ((32, 160), (8, 1000), (1, 2048), (32, 1000))
# Code paths: pairs, strips, strips with many heads, a model dominated by overhead, and floats.
SHARED_HEADS = (*HEADS, Heads(8, 1, 64), Heads(4, 2, 64), Heads(16, 8, 64, torch.float32))
FAMILIES = (
    Family(2, 256, 64),
    Family(2, 1024, 64),
    Family(4, 256, 300),
    Family(16, 1024, 64),
    Family(8, 1024, 600),
    Family(32, 512, 64),
    Family(32, 2048, 64),
    Family(32, 0, 600),
)
_BLOCK = 16
_BEYOND_CACHES = 2**28  # bytes of all layers' keys and values
_MOST_LAYERS = 96
_READ_FLOATS = 2**27
_SIDES = (768, 1024, 2048)  # sizes of the square matrices
_PASS_SECONDS = 0.003  # minimal duration of a pass
_FEWEST_PASSES = 21


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="of passes of each shared prefix"
    )
    add_common(parser, repeats=9)
    return parser.parse_args(arguments)


def layers_of(library: KernelLibrary, arguments: tuple[Any, ...], count: int) -> Calls:
    """Calls of `count` layers: the rows are the same, each layer has caches of its own."""

    def of(caches: tuple[Tensor, Tensor]) -> Callable[[], None]:
        changed = (*arguments[:3], *caches, *arguments[5:])
        return lambda: library.paged_attention(*changed)

    first = (arguments[3], arguments[4])
    return [of(first), *(of((first[0].clone(), first[1].clone())) for _ in range(count - 1))]


def layers_beyond_caches(num_bytes: int) -> int:
    """How many layers of `num_bytes` each exceed any cache."""
    return min(_MOST_LAYERS, -(-_BEYOND_CACHES // num_bytes))


def seconds_of(calls: Calls) -> float:
    """Duration of all calls, one after the other."""
    begun = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begun


def best_rate() -> float:
    """FLOP/s of torch's fastest bfloat16 product."""

    def rate(side: int) -> float:
        left, right = (torch.randn(side, side).to(torch.bfloat16) for _ in range(2))
        return 2 * side**3 / best_seconds(lambda: linear(left, right), left.device)

    return max(map(rate, _SIDES))


def turns(
    repeats: int, machine: Callable[[], float], calls: Calls, work: float
) -> Iterator[dict[str, float]]:
    """``work`` per second, the machine's limit, and their ratio."""
    seconds_of(calls)
    before = machine()
    for _ in range(repeats):
        done = work / statistics.median(seconds_of(calls) for _ in range(5))
        after = machine()
        at_most = (before + after) / 2
        yield {"attention": done / 1e9, "machine": at_most / 1e9, "fraction": done / at_most}
        before = after


def prefill(library: KernelLibrary, recorder: Recorder, repeats: int) -> None:
    for heads in HEADS:
        arguments = PAGED_ATTENTION.build("cpu", rows=[(PROMPT, PROMPT)], **heads._asdict())
        flops = PAGED_ATTENTION.cost(*arguments).flops
        calls = layers_of(library, arguments, 1)
        units = {"attention": "GFLOP/s", "machine": "GFLOP/s", "fraction": "of matmul rate"}
        found = list(turns(repeats, best_rate, calls, flops))
        recorder.add(
            f"a prompt of {PROMPT}, {heads}",
            figures_of(units, found),
            kernels=library.path.stem,
            threads=torch.get_num_threads(),
            flops=flops,
        )


def decode(library: KernelLibrary, recorder: Recorder, repeats: int) -> None:
    data, threads = torch.ones(_READ_FLOATS), torch.get_num_threads()
    for heads, (rows, length) in itertools.product(HEADS, DECODES):
        arguments = PAGED_ATTENTION.build("cpu", rows=[(1, length)] * rows, **heads._asdict())
        size = rows * length * heads.key_bytes()
        count = layers_beyond_caches(size)
        calls = layers_of(library, arguments, count)
        units = {"attention": "GB/s", "machine": "GB/s", "fraction": "of bandwidth"}
        found = list(turns(repeats, lambda: bandwidth(data, threads), calls, count * size))
        recorder.add(
            f"decode, {rows} rows of {length}, {heads}",
            figures_of(units, found),
            kernels=library.path.stem,
            threads=threads,
            layers=count,
        )


def coded(library: KernelLibrary, recorder: Recorder, repeats: int) -> None:
    order = random.Random(1)
    for heads, (rows, length) in itertools.product(HEADS, DECODES):
        size = rows * length * heads.key_bytes()
        calls = {
            kept_as: layers_of(
                library,
                PAGED_ATTENTION.build(
                    "cpu", rows=[(1, length)] * rows, cache_dtype=kept_as, **heads._asdict()
                ),
                layers_beyond_caches(size),
            )
            for kept_as in (heads.dtype, *CODES)
        }
        times: dict[torch.dtype, list[float]] = {kept_as: [] for kept_as in calls}
        for _ in range(1 + 2 * repeats):
            for kept_as in order.sample(list(calls), len(calls)):
                times[kept_as].append(seconds_of(calls[kept_as]))
        plain = times.pop(heads.dtype)
        recorder.add(
            f"decode over 8 bits, {rows} rows of {length}, {heads}",
            {
                str(kept_as).removeprefix("torch."): Figure.of(
                    "of bfloat16", [a / b for a, b in zip(found[1:], plain[1:], strict=True)]
                )
                for kept_as, found in times.items()
            },
            kernels=library.path.stem,
            threads=torch.get_num_threads(),
        )


def ratios(
    library: KernelLibrary, calls: Calls, seconds: float, order: random.Random
) -> tuple[list[float], float]:
    """Time with sharing over time without, per pass, and the median seconds of an unshared call."""
    found: dict[bool, list[float]] = {True: [], False: []}
    seconds_of(calls)
    # If calls are short, a pass repeats them.
    calls = [*calls] * max(1, round(_PASS_SECONDS / seconds_of(calls)))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[True]) < _FEWEST_PASSES:
        for share in order.sample((True, False), 2):
            library.share_prefixes(share)
            found[share].append(seconds_of(calls) / len(calls))
    pairs = zip(found[True], found[False], strict=True)
    return [together / apart for together, apart in pairs], statistics.median(found[False])


def shared(library: KernelLibrary, recorder: Recorder, seconds: float) -> None:
    order = random.Random(1)
    for heads in SHARED_HEADS:
        for from_memory in (True, False):
            figures, apart = {}, {}
            for family in FAMILIES:
                whole, blocks = family.shared + family.own, family.shared // _BLOCK
                arguments = PAGED_ATTENTION.build(
                    "cpu",
                    rows=[(1, whole)] * family.rows,
                    prefixes=dict.fromkeys(range(1, family.rows), (0, blocks)),
                    block_size=_BLOCK,
                    **heads._asdict(),
                )
                size = (family.shared + family.rows * family.own) * heads.key_bytes()
                count = layers_beyond_caches(size) if from_memory else 1
                calls = layers_of(library, arguments, count)
                try:
                    values, alone = ratios(library, calls, seconds, order)
                finally:
                    library.share_prefixes(True)
                figures[str(family)] = Figure.of("of apart", values)
                apart[str(family)] = US * alone
            recorder.add(
                f"shared prefixes, {heads}, {'many layers' if from_memory else 'one layer'}",
                figures,
                kernels=library.path.stem,
                threads=torch.get_num_threads(),
                apart_us=apart,
            )


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    recorder = Recorder("attention", save=not options.no_save)
    ensure_built(wait=True)
    library = kernel_library()
    if library is None:
        raise SystemExit("no compiled kernels: nothing to measure")
    if "prefill" in options.parts:
        prefill(library, recorder, options.repeats)
    if "decode" in options.parts:
        decode(library, recorder, options.repeats)
    if "coded" in options.parts:
        coded(library, recorder, options.repeats)
    if "shared" in options.parts:
        shared(library, recorder, options.seconds)


if __name__ == "__main__":
    main()
