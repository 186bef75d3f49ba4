"""The outcome of a simulation's requests, stored with little memory per request."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

import msgspec

from src.bench.figures import Summary, summarize
from src.engine.scheduling.scheduler import SchedulerStats

NEVER = -1.0


class Journal:
    """Arrival, first and last token of each request; indexed by the request's key.

    Times are simulated seconds, ``NEVER`` for events that did not happen.
    """

    def __init__(self) -> None:
        self.arrived = array("d")
        self.first = array("d")
        self.last = array("d")
        self.prompt_tokens = array("q")
        self.output_tokens = array("q")
        # Times between two deliveries to decoding rows, and the number of rows for each.
        self.gaps = array("d")
        self.gap_rows = array("q")
        self.refused = 0

    def add(self, at: float, prompt_tokens: int, output_tokens: int) -> int:
        """Add a request that has arrived; returns its key."""
        self.arrived.append(at)
        self.first.append(NEVER)
        self.last.append(NEVER)
        self.prompt_tokens.append(prompt_tokens)
        self.output_tokens.append(output_tokens)
        return len(self.arrived) - 1


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a simulation.

    Attributes
    ----------
    duration
        Simulated seconds from the first arrival to the last token.
    device_busy
        Share of that time in which the devices computed, 0 to 1, averaged over replicas.
    ttft, tpot, itl, e2el
        Seconds, of text; ``itl`` is between two tokens of a row.
    embedded, embedded_per_second, embed_e2el
        Texts that became vectors, and seconds from their arrival to these.
    """

    completed: int
    refused: int
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    device_busy: float
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2el: Summary
    scheduler: SchedulerStats
    embedded: int
    embedded_per_second: float
    embed_e2el: Summary


def outcome_of(
    journal: Journal,
    *,
    busy_seconds: Sequence[float],
    stats: Sequence[SchedulerStats],
    percents: Sequence[float] = (90, 99),
    objectives: Mapping[str, float] | None = None,
) -> Outcome:
    """The metrics of a journal.

    Parameters
    ----------
    busy_seconds, stats
        Per replica: busy seconds of its device, counters of its scheduler.
    objectives
        Metric (``ttft``, ``tpot``, ``e2el``) -> maximal seconds of a good request.
    """
    import numpy as np

    arrived, first, last = map(np.array, (journal.arrived, journal.first, journal.last))
    prompts, outputs = np.array(journal.prompt_tokens), np.array(journal.output_tokens)
    done = last >= 0
    writes = done & (outputs > 0)
    reads = done & (outputs == 0)
    duration = float(last.max() - arrived.min()) if done.any() else 0.0
    seconds = max(duration, 1e-9)
    ttft, e2el = (first - arrived)[writes], (last - arrived)[writes]
    tpot = (last - first)[writes] / np.maximum(outputs[writes] - 1, 1)
    whole = (last - arrived)[reads]
    good = np.ones(len(ttft), dtype=bool)
    good_reads = np.ones(len(whole), dtype=bool)
    for name, most in (objectives or {}).items():
        good &= {"ttft": ttft, "tpot": tpot, "e2el": e2el}[name] <= most
        # A vector has no first token.
        good_reads &= (name != "e2el") | (whole <= most)
    num_prompt, num_output = int(prompts[done].sum()), int(outputs[done].sum())
    return Outcome(
        completed=int(done.sum()),
        refused=journal.refused,
        duration=duration,
        total_input_tokens=num_prompt,
        total_output_tokens=num_output,
        request_throughput=int(done.sum()) / seconds,
        request_goodput=int(good.sum() + good_reads.sum()) / seconds if objectives else None,
        output_throughput=num_output / seconds,
        total_token_throughput=(num_prompt + num_output) / seconds,
        device_busy=sum(busy_seconds) / len(busy_seconds) / seconds,
        ttft=summarize(ttft.tolist(), percents),
        tpot=summarize(tpot[outputs[writes] > 1].tolist(), percents),
        itl=_weighted(journal, percents),
        e2el=summarize(e2el.tolist(), percents),
        scheduler=_sum(stats),
        embedded=int(reads.sum()),
        embedded_per_second=int(reads.sum()) / seconds,
        embed_e2el=summarize(whole.tolist(), percents),
    )


def _weighted(journal: Journal, percents: Sequence[float]) -> Summary:
    import numpy as np

    if not journal.gaps:
        return summarize([], percents)
    gaps, rows = np.array(journal.gaps), np.array(journal.gap_rows)
    order = np.argsort(gaps)
    gaps, rows = gaps[order], rows[order]
    below = np.cumsum(rows)
    mean = float((gaps * rows).sum() / below[-1])

    def at(percent: float) -> float:
        return float(gaps[np.searchsorted(below, percent / 100 * below[-1])])

    return Summary(
        mean=mean,
        median=at(50),
        std=math.sqrt(float(((gaps - mean) ** 2 * rows).sum() / below[-1])),
        percentiles={percent: at(percent) for percent in percents},
    )


def _sum(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    names = SchedulerStats.__struct_fields__
    return SchedulerStats(**{name: sum(getattr(s, name) for s in stats) for name in names})
