"""Latent attention on the CPU: a decode step against a plain read of as many bytes.

    python -m benchmarks.latent_attention
    python -m benchmarks.latent_attention --heads 4 --rows 8 --context 4096

Every call has a cache of its own, and together they exceed the CPU's caches. So do the tensors that
are read for comparison, with the same number of threads, before and after each turn. `of the read`
is the time of a call over that of the read: 1 is what memory allows. `of the products` is the same
for the time that a product of matrices of the dtype takes for as many operations. `of the bound` is
the time over the longer of both: what no kernel can go below on this machine. Where `needs`, the
time of the products over that of the read, is above 1, arithmetic is the limit, and `of the read`
cannot be less than `needs`. `expanded` is a prompt of as many tokens as the context, and `absorbed`
is the same prompt with every row absorbed.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any, Final

import torch

from benchmarks.record import Figure, Recorder, add_common
from src.engine.sizing.roofline import best_seconds
from src.ops import LATENT_ATTENTION
from src.ops.build.kernels import ensure_built, kernel_library

_BEYOND_CACHES: Final = 2**28  # bytes of all caches of a turn
_SHAPE: Final = {"nope": 128, "rope": 64, "rank": 512, "value": 128}
_MS: Final = 1e3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.latent_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--heads", nargs="+", type=int, default=(4, 8, 16, 128), metavar="H")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8), metavar="B")
    parser.add_argument("--context", type=int, default=4096, metavar="L", help="tokens of a row")
    parser.add_argument("--prompt", type=int, default=1024, metavar="P", help="0: none")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    add_common(parser, repeats=7)
    return parser.parse_args()


def arguments(rows: int, context: int, heads: int) -> list[tuple[Any, ...]]:
    """Calls with the same queries and caches of their own, which exceed the caches together."""
    case = {"rows": ((1, context),) * rows, "heads": heads, "dtype": torch.bfloat16, **_SHAPE}
    first = LATENT_ATTENTION.build("cpu", **case)
    count = max(2, _BEYOND_CACHES // first[2].nbytes)
    return [(*first[:2], first[2].clone(), *first[3:]) for _ in range(count)]


def seconds(calls: list[tuple[Any, ...]]) -> float:
    """Time of a call, over all of them in random order."""
    library = kernel_library()
    if library is None:
        raise RuntimeError("the compiled kernels are not there")
    order = random.sample(calls, len(calls))
    begin = time.perf_counter()
    for call in order:
        library.latent_attention(*call)
    return (time.perf_counter() - begin) / len(calls)


def decode(options: argparse.Namespace, recorder: Recorder, heads: int, rows: int) -> None:
    calls = arguments(rows, options.context, heads)
    cost = LATENT_ATTENTION.cost(*calls[0])
    data = torch.ones(_BEYOND_CACHES // 4)
    side = torch.randn(768, 768).bfloat16()
    taken, of_read, of_products, of_bound, needs = [], [], [], [], []

    def read() -> float:
        return data.nbytes / best_seconds(data.sum, data.device)

    seconds(calls)
    before = read()
    for _ in range(options.repeats):
        now = seconds(calls)
        after = read()
        flops = 2 * len(side) ** 3 / best_seconds(lambda: side @ side, side.device)
        taken.append(_MS * now)
        reading, multiplying = cost.bytes / (before + after) * 2, cost.flops / flops
        of_read.append(now / reading)
        of_products.append(now / multiplying)
        of_bound.append(now / max(reading, multiplying))
        needs.append(multiplying / reading)
        before = after
    recorder.add(
        f"decode, {heads} heads, {rows} rows of {options.context}",
        {
            "time": Figure.of("ms", taken),
            "of the read": Figure.of("x", of_read),
            "of the products": Figure.of("x", of_products),
            "of the bound": Figure.of("x", of_bound),
            "needs": Figure.of("x", needs),
        },
        threads=options.threads,
        bytes=cost.bytes,
        flops=cost.flops,
    )


def prompt(options: argparse.Namespace, recorder: Recorder, heads: int) -> None:
    length, times = options.prompt, {}
    for name, absorbs in (("expanded", False), ("absorbed", True)):
        case = {"heads": heads, "dtype": torch.bfloat16, "deterministic": absorbs, **_SHAPE}
        call = LATENT_ATTENTION.build("cpu", rows=((length, length),), **case)
        times[name] = Figure.of("ms", [_MS * seconds([call]) for _ in range(options.repeats)])
    recorder.add(f"prompt of {length}, {heads} heads", times, threads=options.threads)


def main() -> None:
    options = parse()
    recorder = Recorder("latent_attention", save=not options.no_save)
    ensure_built(wait=True)
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        for heads in options.heads:
            for rows in options.rows:
                decode(options, recorder, heads, rows)
            if options.prompt:
                prompt(options, recorder, heads)


if __name__ == "__main__":
    main()
