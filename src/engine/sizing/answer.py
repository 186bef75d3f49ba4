"""The answer to "will it fit, and how fast can it be?", as plain data and as text."""

from __future__ import annotations

import msgspec

from src.core.memory_report import MemoryReport, memory_lines, size
from src.engine.sizing.speed import PrefillSpeed, Speed, TextSpeed


class DeviceFacts(msgspec.Struct, frozen=True):
    """The device that was planned for: bytes, bytes per second, operations per second by dtype."""

    name: str
    kind: str
    free: int
    bandwidth: float
    flops: dict[str, float]


class Advice(msgspec.Struct, frozen=True):
    """One change after which it fits: an option, and what one gets."""

    option: str
    effect: str


class ModelPlan(msgspec.Struct, frozen=True):
    """A plan for one model on one device.

    Attributes
    ----------
    tensor_parallel
        Number of ranks; ``memory`` is that of one of them.
    concurrency
        Requests at once that were asked for; null: as many as fit.
    reason
        Why it does not fit; null if it does.
    advice
        Changes that each suffice, if it does not fit.
    decode, prefill
        Limits of text that is generated; none of a model that only reads.
    texts
        Limits of texts that become vectors, labels or scores.
    longest_text
        The most tokens of such a text; null if the model gives text alone.
    reads_only
        Whether tokens see later ones, so that a text is computed in one step, and nothing is kept.
    is_for_texts
        Whether its files or settings say that it is meant for them.
    command
        The command that serves it so; null if it does not fit, or cannot be served here.
    """

    model: str
    architecture: str
    implementation: str
    dtype: str
    quantization: str | None
    tensor_parallel: int
    device: DeviceFacts
    memory: MemoryReport
    fits: bool
    concurrency: int | None
    reason: str | None
    advice: tuple[Advice, ...]
    decode: tuple[Speed, ...]
    prefill: PrefillSpeed | None
    notes: tuple[str, ...]
    command: str | None
    texts: tuple[TextSpeed, ...] = ()
    longest_text: int | None = None
    reads_only: bool = False
    is_for_texts: bool = False


def plan_lines(plan: ModelPlan) -> list[str]:
    """The plan for a reader: half a screen."""
    weights = plan.dtype if plan.quantization is None else f"{plan.dtype} with {plan.quantization}"
    ranks = f", one of {plan.tensor_parallel} ranks" if plan.tensor_parallel > 1 else ""
    lines = [
        f"{plan.model}: {plan.architecture} ({plan.implementation}), {weights}{ranks}",
        f"on {plan.device.name}, {size(plan.device.free)} free",
        *memory_lines(plan.memory),
        *_speed_lines(plan),
        *_text_lines(plan),
        *(f"Note: {note}" for note in plan.notes),
    ]
    if plan.reason is None:
        lines.append(f"It fits. {_holds(plan)}")
        if plan.command is not None:
            lines.append(f"Serve it: {plan.command}")
        return lines
    lines.append(f"It does not fit: {plan.reason}.")
    if plan.advice:
        width = max(len(each.option) for each in plan.advice)
        lines.append("Any of these helps:")
        lines += [f"  {each.option:<{width}}  {each.effect}" for each in plan.advice]
    else:
        lines.append("No option that plan knows helps on this device.")
    return lines


def _holds(plan: ModelPlan) -> str:
    kv = plan.memory.kv
    assert kv is not None
    if plan.reads_only:
        rows = plan.texts[-1].rows_per_step if plan.texts else 1
        return f"The longest text has {plan.longest_text} tokens; a step computes {rows} of these."
    if plan.concurrency is not None:
        return f"{_requests(plan.concurrency)} of {kv.max_model_len} tokens have room at once."
    return f"Room for {kv.requests_at_once:.1f} requests of {kv.max_model_len} tokens at once."


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _speed_lines(plan: ModelPlan) -> list[str]:
    """A table of the limits."""
    if not plan.decode or plan.prefill is None:
        return []
    bandwidth, rate = plan.device.bandwidth / 1e9, plan.device.flops[plan.dtype] / 1e12
    head = f"at {bandwidth:,.0f} GB/s, {rate:,.3g} TFLOP/s", "ms per token", "tokens/s", "limit"
    rows = [(*head, "reached")]
    for speed in plan.decode:
        name = f"{_requests(speed.rows)} behind {speed.context} tokens"
        least = _digits(1000 * speed.seconds_per_token)
        rows.append((name, least, _digits(speed.tokens_per_second), *_bound(speed)))
    prompt = plan.prefill
    name = f"a prompt of {prompt.context} tokens"
    rows.append((name, "", _digits(prompt.tokens_per_second), *_bound(prompt)))
    width = max(len(row[0]) for row in rows)
    return [
        "",
        *(
            f"  {name:<{width}} {least:>12} {rate:>11}  {bound:<10}  {share}".rstrip()
            for name, least, rate, bound, share in rows
        ),
        "",
    ]


def _text_lines(plan: ModelPlan) -> list[str]:
    """A table of the limits of texts that become vectors."""
    if not plan.texts or not plan.is_for_texts:
        return []
    bandwidth, rate = plan.device.bandwidth / 1e9, plan.device.flops[plan.dtype] / 1e12
    head = f"at {bandwidth:,.0f} GB/s, {rate:,.3g} TFLOP/s", "rows a step", "texts/s", "limit"
    rows = [head] + [
        (f"texts of {one.tokens} tokens", str(one.rows_per_step), _digits(one.texts_per_second),
         one.bound)
        for one in plan.texts
    ]  # fmt: skip
    width = max(len(row[0]) for row in rows)
    lines = [
        f"  {name:<{width}} {count:>12} {each:>11}  {bound}" for name, count, each, bound in rows
    ]
    return [*([""] if plan.reads_only else []), *lines, ""]


def _digits(number: float) -> str:
    """Three digits at least."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _bound(speed: Speed | PrefillSpeed) -> tuple[str, str]:
    """What limits it, and the share that was reached."""
    return speed.bound, "not measured" if speed.share is None else f"{100 * speed.share:.0f} %"
