"""Ops at the sizes of an 8 B model: first checked against their references, then timed.

On CUDA, calls are timed in a graph, as the engine replays its decode steps; so the host's launch
cost is not included.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu.session import Session, device_facts
from benchmarks.gpu.table import Row
from benchmarks.record import Figure
from src.engine.sizing.roofline import Roofline, best_seconds
from src.ops import (
    DECODE_SCHEDULE,
    EXPERTS,
    GUMBEL_ARGMAX,
    LATENT_ATTENTION,
    PAGED_ATTENTION,
    ROTATE_AND_CACHE,
    Op,
    step_schedule,
)
from src.ops.build.kernels import ensure_built

BANDWIDTH: Final = "this device: memory read"
ARITHMETIC: Final = "this device: matrix product"
EQUAL: Final = "ops that equal their references"

_HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 64}
# A captured decode step is launched for the longest possible context, not for the actual ones.
_LONGEST = 32_768
_VOCAB = 128_256
# Maximal error of a token's output: sums in another order, weights rounded to bfloat16 before use.
_MOST_ERROR = 0.1
# Maximal share of tokens that may differ, where scores tie within float rounding.
_MOST_TIES = 0.02
# Copies of the arguments take this multiple of the cache's size.
_BEYOND_CACHE = 4
_CPU_CACHE = 32 * 2**20
_MOST_COPIES = 64


def cases(*, quick: bool) -> dict[str, tuple[Op[..., Any], dict[str, Any]]]:
    """Calls of the ops as in a decoder of 8 B parameters, in its dtype."""
    scale, most_rows = (16, 16) if quick else (1, 256)
    attention = {**_HEADS, "dtype": torch.bfloat16}
    named: dict[str, tuple[Op[..., Any], dict[str, Any]]] = {}
    for rows, context in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (8, 8192)):
        rows, length = min(rows, most_rows), context // scale
        named[f"attention, {rows} decoding at {length}"] = (
            PAGED_ATTENTION,
            {"rows": [(1, length)] * rows, "longest": _LONGEST // scale, **attention},
        )
    for new, length in ((2048, 2048), (2048, 8192)):
        named[f"attention, {new // scale} new of {length // scale}"] = (
            PAGED_ATTENTION,
            {"rows": [(new // scale, length // scale)], **attention},
        )
    for tokens in (1, 64 // scale, 2048 // scale):
        named[f"rotation and cache write, {tokens}"] = (
            ROTATE_AND_CACHE,
            {"tokens": tokens, **attention},
        )
    named[f"schedule of {most_rows} rows, a prefix in common"] = (
        DECODE_SCHEDULE,
        {
            "rows": [(1, 2048 // scale)] * most_rows,
            "prefixes": dict.fromkeys(range(1, most_rows), (0, 16 // scale)),
            "tile": 64,
            "members": 4,
            "block_size": 64,
            # Of the cache it reads nothing, and drawing one of a real size takes longer than all.
            "head_dim": 8,
        },
    )
    for rows in (1, most_rows):
        named[f"sampling, {rows} of {_VOCAB}"] = (
            GUMBEL_ARGMAX,
            {"rows": rows, "vocab_size": _VOCAB, "temperature": 1.0},
        )
    # A mixture of experts with 30 B parameters, of which a token uses 3 B.
    mixture = {"experts": 128 // scale, "chosen": 8 // min(scale, 4), "dtype": torch.bfloat16}
    for tokens in (1, 64 // scale, 2048 // scale):
        named[f"experts, {tokens} tokens"] = (
            EXPERTS,
            {"tokens": tokens, "hidden": 2048 // scale, "intermediate": 768 // scale, **mixture},
        )
    # Of DeepSeek-V3: 1,152 bytes per token.
    latents = {"heads": 128, "nope": 128, "rope": 64, "rank": 512, "value": 128, "block_size": 64}
    for rows, context in ((1, 8192), (64, 2048)):
        rows, length = min(rows, most_rows), context // scale
        named[f"latent attention, {rows} decoding at {length}"] = (
            LATENT_ATTENTION,
            {"rows": [(1, length)] * rows, "dtype": torch.bfloat16, **latents},
        )
    for new, length in ((2048, 2048), (2048, 8192)):
        named[f"latent attention, {new // scale} new of {length // scale}"] = (
            LATENT_ATTENTION,
            {
                "rows": [(new // scale, length // scale)],
                "dtype": torch.bfloat16,
                "expands": True,
                **latents,
            },
        )
    return named


def figures(options: argparse.Namespace) -> list[str]:
    return [BANDWIDTH, ARITHMETIC, EQUAL, *cases(quick=options.quick)]


def run(session: Session) -> None:
    if not session.on_cuda:
        ensure_built(wait=True)
    roof = session.roofline()
    ceiling = {
        "bandwidth": Figure.of("GB/s", [roof.bandwidth / 1e9]),
        "arithmetic": Figure.of("TFLOP/s", [roof.flops / 1e12]),
    }
    session.record("this device at most", ceiling)
    about = ", ".join(f"{name} {value}" for name, value in device_facts(session.device).items())
    session.row(Row(BANDWIDTH, "GB/s", roof.bandwidth / 1e9, rises=True, note=about))
    session.row(Row(ARITHMETIC, "TFLOP/s", roof.flops / 1e12, rises=True))
    every = cases(quick=session.options.quick)
    equal = 0
    for name, (op, case) in every.items():
        with session.attempt(name):
            arguments = arguments_of(op, session.device, case)
            error = check(op, arguments)
            equal += 1
            # Each time anew, so that a section that is out of time has told how far it came.
            session.row(Row(EQUAL, "", equal, goal=len(every), rises=True))
            _time(session, name, op, arguments, roof, error)
    if not equal:
        session.row(Row(EQUAL, "", 0, goal=len(every), rises=True))


# What an op changes that has to be the same bits as its reference's.
_EXACT = {
    PAGED_ATTENTION: ("key_cache", "value_cache"),
    LATENT_ATTENTION: ("cache",),
    ROTATE_AND_CACHE: ("value_cache", "out"),
}


def arguments_of(op: Op[..., Any], device: torch.device, case: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments as a model's layers pass them: the decode schedule is made once per step."""
    arguments = op.build(str(device), **case)
    if op is not PAGED_ATTENTION:
        return arguments
    call = PAGED_ATTENTION.record.of_flat(*arguments)
    rows = (call.block_tables, call.query_start_loc, call.seq_lens)
    schedule = step_schedule(call.key_cache, call.query.shape[1], *rows, call.spec)
    return (*arguments[:-2], schedule, arguments[-1])


def check(op: Op[..., Any], arguments: tuple[Any, ...]) -> float:
    """The kernel's error relative to the reference; ``arguments`` are left as the kernel does.

    For attention and experts: the largest difference in a token's output, over the output's root
    mean square. For rotation: the largest relative difference of an element. For sampling: the
    share of tokens that differ.

    Raises
    ------
    RuntimeError
        The error exceeds rounding, or another tensor was changed.
    """
    # Omitted arguments have their defaults.
    schema = op.overload._schema.arguments[: len(arguments)]
    names = [argument.name for argument in schema]
    expected = tuple(
        value.clone() if name in op.mutated else value
        for name, value in zip(names, arguments, strict=True)
    )
    wanted, got = op.reference(*expected), op.overload(*arguments)
    if op is EXPERTS:
        error, most = _token_error(wanted, got), _MOST_ERROR
    elif not op.mutated:
        # Sampled tokens may tie; a schedule must be exact.
        most = _MOST_TIES if op is GUMBEL_ARGMAX else 0.0
        error = float((wanted != got).float().mean())
    else:
        both = dict(zip(names, zip(expected, arguments, strict=True), strict=True))
        # Keys that an op rotates are rounded; keys that attention writes are copied exactly.
        exact = _EXACT[op]
        for name in exact:
            if not torch.equal(*(tensor.view(torch.int16) for tensor in both[name])):
                raise RuntimeError(f"{op.name} writes {name} otherwise than its reference")
        rounded = [name for name in op.mutated if name not in exact]
        measure = _element_error if op is ROTATE_AND_CACHE else _token_error
        error, most = max(measure(*both[name]) for name in rounded), _MOST_ERROR
    if not error <= most:
        raise RuntimeError(f"{op.name} differs from its reference by {error:.3g}, over {most:g}")
    return error


def _token_error(wanted: Tensor, got: Tensor) -> float:
    """Error of [T, heads, head_dim] or [T, H]; NaN if there is a NaN."""
    wanted, got = wanted.float().flatten(1), got.float().flatten(1)
    spread = wanted.square().mean(1).sqrt()
    return float(((wanted - got).abs().amax(1) / spread).max())


def _element_error(wanted: Tensor, got: Tensor) -> float:
    """Largest error: relative above 1, absolute below; NaN in both counts as equal."""
    wanted, got = wanted.float(), got.float()
    same = (wanted == got) | (wanted.isnan() & got.isnan())
    return float(torch.where(same, 0.0, (wanted - got).abs() / wanted.abs().clamp(min=1)).max())


def _time(
    session: Session,
    name: str,
    op: Op[..., Any],
    arguments: tuple[Any, ...],
    roof: Roofline,
    error: float,
) -> None:
    cost = op.cost(*arguments)
    seconds = call_seconds(op.overload, arguments, cost.bytes, session.device)
    least = roof.seconds(cost)
    measured = {
        "time": Figure.of("us", [1e6 * seconds]),
        "bandwidth": Figure.of("GB/s", [cost.bytes / seconds / 1e9]),
        "arithmetic": Figure.of("TFLOP/s", [cost.flops / seconds / 1e12]),
        "fraction_of_roofline": Figure.of("", [least / seconds]),
        "error": Figure.of("", [error]),
    }
    session.record(name, measured, op=op.name, kernel=op.active(session.device.type).name)
    session.row(Row(name, "us", 1e6 * seconds, limit=1e6 * least))


def call_seconds(
    run: Callable[..., Any], arguments: tuple[Any, ...], num_bytes: int, device: torch.device
) -> float:
    """The shortest time of a call that finds no data of the previous one in a cache."""
    on_cuda = device.type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if on_cuda else _CPU_CACHE
    count = min(_MOST_COPIES, 1 + _BEYOND_CACHE * cache // num_bytes)
    # Slices of a fused projection would be copied to another layout. They are small, so reuse them.
    places = [arguments] + [
        tuple(
            value.clone() if isinstance(value, Tensor) and value.is_contiguous() else value
            for value in arguments
        )
        for _ in range(count - 1)
    ]
    if not on_cuda:
        turns = itertools.cycle(places)
        return best_seconds(lambda: run(*next(turns)), device)
    run(*arguments)  # so that nothing is compiled while it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for place in places:
            run(*place)
    return best_seconds(graph.replay, device) / count
