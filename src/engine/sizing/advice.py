"""What to change when a model does not fit: each advice is an attempt that has succeeded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from src.core.config import MIB
from src.core.errors import SlipstreamError
from src.core.memory_report import size
from src.engine.sizing.answer import Advice
from src.engine.sizing.attempt import Attempt, Setup, kv_shape
from src.engine.sizing.device_table import NAMED_DEVICES, DeviceDescription

# The most of the free memory that an advice gives to keys and values.
_MOST_FOR_KV: Final = 0.9
_GROUP_SIZES: Final = (2, 4, 8, 16)


def advise(setup: Setup, failed: Attempt, device: DeviceDescription) -> Iterator[Advice]:
    """Changes that each suffice, the least costly first."""
    if failed.plan is not None and (kept := failed.report.kv) and kept.lasts == "step":
        yield from _longer_step(setup, failed.plan.max_model_len, device)
        return
    if failed.reckoned.free > 0:
        yield from _more_kv_memory(setup, failed, device)
        yield from _less(setup, device)
    if device.kind == "cpu":
        yield from _rounded(setup, device)
    yield from _narrower(setup, failed, device)
    if device.kind == "cuda":
        yield from _more_devices(setup, device)
        yield from _larger_device(setup, device)


def _longer_step(setup: Setup, longest: int, device: DeviceDescription) -> Iterator[Advice]:
    """For a text that a step must hold as a whole: a larger step, or a shorter text."""
    budget = setup.config.scheduler.max_num_batched_tokens
    if _fits(setup.changed("scheduler", max_num_batched_tokens=longest), device):
        option = f"--set scheduler.max_num_batched_tokens={longest}"
        yield Advice(option, "a step that holds the longest text")
    if _fits(setup.changed("model", max_model_len=budget), device):
        yield Advice(f"--context {budget}", "texts that a step holds")


def _fits(setup: Setup, device: DeviceDescription) -> Attempt | None:
    """The attempt, if it succeeds."""
    try:
        attempt = setup.attempt(device)
    except SlipstreamError:
        # For example a rounded format that has no place for this model's rows.
        return None
    return attempt if attempt.reason is None else None


def _more_kv_memory(setup: Setup, failed: Attempt, device: DeviceDescription) -> Iterator[Advice]:
    reckoned, asked = failed.reckoned, setup.config.model.max_model_len
    shape = kv_shape(reckoned)
    context = asked or reckoned.outline.spec.max_positions
    needed = (setup.concurrency or 1) * shape.blocks_held(context) * shape.bytes_per_block
    room = reckoned.free - reckoned.step - reckoned.graphs
    if needed > _MOST_FOR_KV * room:
        return
    # Whole MiB, which are easier to type.
    wanted = -(-needed // MIB) * MIB
    if _fits(setup.changed("cache", memory_bytes=wanted, num_blocks=None), device):
        yield Advice(
            f"--set cache.memory_bytes={wanted}",
            f"KV memory of {size(wanted)}, of {size(room)} that are free",
        )


def _less(setup: Setup, device: DeviceDescription) -> Iterator[Advice]:
    """A shorter context, or fewer requests, in the KV memory that there is."""
    rows = setup.concurrency or 1
    # Without a fixed length, the KV memory that there is.
    loose = _fits(replace(setup.changed("model", max_model_len=None), concurrency=None), device)
    if loose is None or loose.plan is None:
        return
    kv = loose.plan.kv
    context = setup.config.model.max_model_len or loose.plan.max_model_len
    shorter = replace(kv, num_blocks=kv.num_blocks // rows).longest(context)
    if 0 < shorter < context and _fits(setup.changed("model", max_model_len=shorter), device):
        yield Advice(f"--context {shorter}", f"{rows} at once, each of {shorter} tokens")
    fewer = kv.num_blocks // kv.blocks_held(context)
    if 0 < fewer < rows and _fits(_with_rows(setup, fewer), device):
        yield Advice(f"--concurrency {fewer}", f"of {context} tokens each")


def _with_rows(setup: Setup, rows: int) -> Setup:
    return replace(setup.changed("scheduler", max_num_seqs=rows), concurrency=rows)


def _rounded(setup: Setup, device: DeviceDescription) -> Iterator[Advice]:
    for method in ("int8", "int4"):
        if setup.config.model.quantization == method:
            continue
        attempt = _fits(setup.changed("model", quantization=method), device)
        if attempt is not None:
            yield Advice(
                f"--quantization {method}", f"weights of {size(attempt.report.weight_bytes)}"
            )
            return


def _narrower(setup: Setup, failed: Attempt, device: DeviceDescription) -> Iterator[Advice]:
    if failed.reckoned.outline.spec.dtype.itemsize > 2:
        attempt = _fits(setup.changed("model", dtype="bfloat16"), device)
        if attempt is not None:
            taken = size(attempt.report.weight_bytes)
            yield Advice("--set model.dtype=bfloat16", f"weights of {taken}")


def _more_devices(setup: Setup, device: DeviceDescription) -> Iterator[Advice]:
    for ranks in _GROUP_SIZES:
        if ranks > setup.tensor_parallel:
            attempt = _fits(replace(setup, tensor_parallel=ranks), device)
            if attempt is not None:
                taken = size(attempt.report.total)
                yield Advice(
                    f"--tensor-parallel {ranks}",
                    f"{taken} on each of {ranks}; serving on several is not available yet",
                )
                return


def _larger_device(setup: Setup, device: DeviceDescription) -> Iterator[Advice]:
    larger = [each for each in NAMED_DEVICES.values() if each.free > device.free]
    for each in sorted(larger, key=lambda one: one.free):
        if _fits(setup, each):
            yield Advice(f"--device {each.name}", f"{size(each.free)} free")
            return
