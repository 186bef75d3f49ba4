"""Several engines behind a router, with one stream of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from src.bench.simulate.engine import SimulatedEngine
from src.bench.simulate.outcome import Journal, Outcome, outcome_of
from src.bench.simulate.requests import SimulatedRequest
from src.bench.simulate.step_cost import StepCost
from src.core.errors import ConfigError
from src.engine.scheduling.scheduler import SchedulerLimits

Routing = Literal["round-robin", "least-requests"]


def simulate(
    requests: Iterable[SimulatedRequest],
    limits: SchedulerLimits,
    cost: StepCost,
    *,
    depth: int = 2,
    replicas: int = 1,
    routing: Routing = "round-robin",
    seed: int | None = 0,
    percents: Sequence[float] = (90, 99),
    objectives: Mapping[str, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Simulate requests, in the order of their arrival, until all are answered.

    Parameters
    ----------
    depth, replicas
        Steps in a device's queue, 1 or 2; number of engines.
    routing
        Send a request to the next engine in turn, or to the one with the fewest unfinished ones.
    seed
        Seed for the scatter of step times; ``None`` for no scatter.
    percents, objectives
        As in `outcome_of`.
    progress
        Called with the number of arrived requests.

    Raises
    ------
    ConfigError
        There are no requests or no engines, or requests are not in order.
    """
    if replicas < 1:
        raise ConfigError(f"there must be at least 1 replica, got {replicas}")
    journal = Journal()
    engines = [
        SimulatedEngine(
            limits, cost, journal, depth=depth, seed=None if seed is None else seed + number
        )
        for number in range(replicas)
    ]
    before = -math.inf
    for number, request in enumerate(requests):
        if request.at < before:
            raise ConfigError(f"request {number} comes before the one in front of it")
        before = request.at
        # A router that counts requests needs the state of every engine at this moment.
        if routing == "least-requests":
            for engine in engines:
                engine.advance(request.at)
            chosen = min(engines, key=lambda engine: engine.num_unfinished)
        else:
            chosen = engines[number % replicas]
            chosen.advance(request.at)
        chosen.submit(request)
        if progress is not None:
            progress(1)
    for engine in engines:
        engine.advance(math.inf)
    if not journal.arrived:
        raise ConfigError("there is no request to simulate")
    return outcome_of(
        journal,
        busy_seconds=[engine.busy_seconds for engine in engines],
        stats=[engine.scheduler.stats for engine in engines],
        percents=percents,
        objectives=objectives,
    )
