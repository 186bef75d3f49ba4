"""Formats the screen of ``top``: a pure function of the readings, the size and the alphabet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from src.core.steps import StepRecord
from src.core.views import PoolView, RequestsView, RequestTrack, RequestView
from src.observability.timeline_figures import Quantiles, TimelineFigures, figures, milliseconds


class Alphabet(msgspec.Struct, frozen=True):
    """The characters of bars and maps; ``levels`` go from empty to full."""

    levels: str
    done: str
    left: str
    free: str
    cached: str
    held: str
    shared: str


UNICODE: Final = Alphabet(" ▁▂▃▄▅▆▇█", "█", "░", "·", "░", "▓", "█")
ASCII: Final = Alphabet(" .:-=+*#@", "#", "-", ".", "-", "+", "#")


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The data of one poll.

    Attributes
    ----------
    window
        Seconds over which rates and latencies are computed.
    now
        The server's clock.
    steps, requests
        Within the window.
    totals
        Counters of ``/metrics`` by name, summed over labels.
    """

    url: str
    window: float
    now: float
    steps: Sequence[StepRecord]
    requests: Sequence[RequestTrack]
    alive: RequestsView
    pool: PoolView
    totals: Mapping[str, float]


def screen(reading: Reading, width: int, height: int, alphabet: Alphabet) -> list[str]:
    """The screen, at most ``height`` lines of at most ``width`` characters."""
    lines = [
        *_rates(reading, alphabet),
        "",
        *_memory(reading.pool, width, alphabet),
        "",
        *_requests(reading.alive, height, alphabet),
    ]
    return [line[:width] for line in lines][:height]


def _rates(reading: Reading, alphabet: Alphabet) -> list[str]:
    found, alive, totals = figures(reading.steps, reading.requests), reading.alive, reading.totals
    window = reading.window
    history = [0.0] * max(1, round(2 * window))
    for step in reading.steps:
        place = int(2 * (step.published - (reading.now - window)))
        if 0 <= place < len(history):
            history[place] += step.sampled_rows + step.accepted_tokens
    phases = " ".join(
        f"{name} {milliseconds(values.p50)}"
        for name, values in found.phases.items()
        if name in ("plan", "launch", "device", "commit", "publish")
    )
    return [
        f"{reading.url}   last {window:.0f} s   {found.num_steps / window:.1f} steps/s",
        f"requests  running {alive.running}, waiting {alive.waiting} "
        f"({alive.waiting_tokens} tokens)   since the start: "
        f"ended {totals.get('vllm:request_success_total', 0):.0f}, "
        f"refused {totals.get('slipstream_http_rejections_total', 0):.0f}, "
        f"preempted {totals.get('vllm:num_preemptions_total', 0):.0f}",
        f"tokens/s  output {found.output_tokens / window:.1f}, prompt "
        f"{found.prompt_tokens / window:.1f}, cached {found.cached_tokens / window:.1f}   "
        f"{found.rows_per_step:.1f} rows/step   [{_spark(history, alphabet)}]",
        *_drafts(found),
        *_tasks(found, window),
        f"latency   first token {_two(found.ttft)}   between tokens {_two(found.between_tokens)}"
        f"   whole {_two(found.whole)}",
        f"step      bubble {100 * found.bubble:.1f} %   {phases or 'none yet'}",
    ]


def _drafts(found: TimelineFigures) -> list[str]:
    """A line of what speculation brings; none where nothing is drafted."""
    if not found.drafted_tokens:
        return []
    share = 100 * found.accepted_tokens / found.drafted_tokens
    return [f"drafts    verified {found.drafted_tokens}, accepted {share:.1f} %"]


def _tasks(found: TimelineFigures, window: float) -> list[str]:
    """A line of what else than text was asked for; none where nothing was."""
    if not found.tasks:
        return []
    each = (
        f"{task} {times.count / window:.1f}/s {_two(times)}" for task, times in found.tasks.items()
    )
    return [f"tasks     {'   '.join(each)}"]


def _two(values: Quantiles | None) -> str:
    if values is None:
        return "-"
    return f"p50 {milliseconds(values.p50)} p99 {milliseconds(values.p99)}"


def _spark(values: Sequence[float], alphabet: Alphabet) -> str:
    most, levels = max(values), alphabet.levels
    if not most:
        return levels[0] * len(values)
    # Values above zero get at least the lowest visible level.
    return "".join(
        levels[-(-round(1000 * value / most) * (len(levels) - 1) // 1000)] for value in values
    )


def _memory(pool: PoolView, width: int, alphabet: Alphabet) -> list[str]:
    shared = sum(count for holders, count in pool.references.items() if holders > 1)
    share = 100 / max(1, pool.num_blocks)
    lines = [
        f"KV        held {share * pool.held:.1f} % ({shared} blocks shared), cached "
        f"{share * pool.cached:.1f} %, free {share * pool.free:.1f} %   of {pool.num_blocks} "
        f"blocks of {pool.block_size} tokens"
    ]
    cells = "".join(_cell(cell, alphabet) for cell in pool.map)
    room = max(1, width - 10)
    lines += [f"{'':<10}{cells[start : start + room]}" for start in range(0, len(cells), room)]
    return lines


def _cell(cell: tuple[int, int, int], alphabet: Alphabet) -> str:
    free, cached, held = cell
    if held == free + cached + held:
        return alphabet.shared
    if held:
        return alphabet.held
    return alphabet.cached if cached else alphabet.free


def _requests(alive: RequestsView, height: int, alphabet: Alphabet) -> list[str]:
    lines = [
        f"{'key':>6}  {'request':<20} {'phase':<10} {'age':>8} {'waited':>8} {'prompt':>7} "
        f"{'cached':>7} {'blocks':>6}  {'output':<24}"
    ]
    lines += [_request(request, alphabet) for request in alive.requests[:height]]
    if not alive.requests:
        lines.append("        nothing to do")
    return lines


def _request(request: RequestView, alphabet: Alphabet) -> str:
    if request.task != "generate":
        # It ends with its prompt.
        done, total, what = request.computed_tokens, request.prompt_tokens, f" to {request.task}"
    elif request.output_tokens or request.computed_tokens >= request.prompt_tokens:
        done, total, what = request.output_tokens, request.max_tokens, ""
    else:
        done, total, what = request.computed_tokens, request.prompt_tokens, " of the prompt"
    filled = min(12, 12 * done // max(1, total))
    bar = alphabet.done * filled + alphabet.left * (12 - filled)
    name = f"{request.request_id[:16]}/{request.index}"
    name = name if name.isprintable() else ascii(name)[1:-1]
    return (
        f"{request.key:>6}  {name[:20]:<20} {request.phase:<10} {milliseconds(request.age):>8} "
        f"{milliseconds(request.waited):>8} {request.prompt_tokens:>7} {request.cached_tokens:>7} "
        f"{request.blocks:>6}  {bar} {done}/{total}{what}"
    )
