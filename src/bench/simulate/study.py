"""Compares policies and sizes under one load, and finds the highest rate that meets objectives."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias, get_args

import msgspec

from src.bench.arrivals import RampUp
from src.bench.dataset_files import TracedRequest
from src.bench.simulate.calibration import Calibration
from src.bench.simulate.fleet import Routing, simulate
from src.bench.simulate.outcome import Outcome
from src.bench.simulate.requests import (
    RandomWorkload,
    SimulatedRequest,
    TextWorkload,
    merged,
    traced_requests,
)
from src.core.errors import ConfigError
from src.engine.scheduling.scheduler import SchedulerLimits

# What may vary between runs of a study, beside the scheduler's limits.
_OWN: Final = ("request_rate", "replicas", "routing", "pipeline_depth")
# The scheduler's limits; others are fixed by the model, or follow from what varies.
_LIMITS: Final = tuple(
    name
    for name in SchedulerLimits.__struct_fields__
    if name not in ("windows", "content_key", "max_in_flight", "looks_first")
)
# Number of bisections of the interval of the highest rate: to within 1 %.
_HALVINGS: Final = 7
_MAX_RATE: Final = 1e6

Changes: TypeAlias = dict[str, str]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The load: synthetic requests or a trace.

    Attributes
    ----------
    unit, chunk
        Of a trace: seconds per unit of its timestamps, tokens per hash.
    texts, text_rate
        Texts to embed beside it, and how many per second.
    """

    workload: RandomWorkload
    trace: list[TracedRequest] | None = None
    unit: float = 1.0
    chunk: int = 16
    burstiness: float = 1.0
    ramp_up: RampUp | None = None
    texts: TextWorkload | None = None
    text_rate: float = math.inf

    def requests(self, rate: float) -> Iterator[SimulatedRequest]:
        """The requests at ``rate`` per second; with infinity, a trace's requests as recorded."""
        if self.texts is None:
            return self._generating(rate)
        return merged(self._generating(rate), self.texts.requests(self.text_rate))

    def _generating(self, rate: float) -> Iterator[SimulatedRequest]:
        if self.trace is None:
            return self.workload.requests(rate, self.burstiness, self.ramp_up)
        span = max(request.timestamp for request in self.trace) - min(
            request.timestamp for request in self.trace
        )
        recorded = len(self.trace) / (span * self.unit) if span else math.inf
        speed = 1.0 if math.isinf(rate) or math.isinf(recorded) else rate / recorded
        return traced_requests(self.trace, unit=self.unit, chunk=self.chunk, speed=speed)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a study."""

    limits: SchedulerLimits
    pipeline_depth: int
    request_rate: float = math.inf
    replicas: int = 1
    routing: Routing = "round-robin"


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """A load, an engine's costs, and the objectives by which runs are judged.

    Attributes
    ----------
    seed
        Seed for the scatter of step times; ``None`` for no scatter.
    objectives
        Metric (``ttft``, ``tpot``, ``e2el``) -> maximal seconds of a good request.
    """

    calibration: Calibration
    load: Load
    seed: int | None = 0
    percents: tuple[float, ...] = (90, 99)
    objectives: dict[str, float] = {}

    def run(self, setup: Setup, progress: Callable[[int], None] | None = None) -> Outcome:
        """Simulate one setup."""
        return simulate(
            self.load.requests(setup.request_rate),
            setup.limits,
            self.calibration.cost,
            depth=setup.pipeline_depth,
            replicas=setup.replicas,
            routing=setup.routing,
            seed=self.seed,
            percents=self.percents,
            objectives=self.objectives,
            progress=progress,
        )

    def run_all(self, setups: Sequence[Setup], jobs: int) -> Iterator[Outcome]:
        """Simulate setups in ``jobs`` processes; outcomes are in the setups' order."""
        if jobs < 2 or len(setups) < 2:
            yield from map(self.run, setups)
            return
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(jobs, len(setups)), context) as pool:
            yield from pool.map(self.run, setups)

    def greatest_rate(self, setup: Setup, share: float) -> tuple[float, Outcome]:
        """The highest rate at which a ``share`` (0 to 1) of requests is good, within 1 %.

        Raises
        ------
        ConfigError
            There are no objectives, or no rate meets them.
        """
        if not self.objectives:
            raise ConfigError("--find-rate needs objectives: give --goodput")

        def attempt(rate: float) -> tuple[bool, Outcome]:
            found = self.run(msgspec.structs.replace(setup, request_rate=rate))
            asked = found.completed + found.refused
            good = (found.request_goodput or 0.0) * found.duration
            return good >= share * asked - 1e-6, found

        low, high = 0.0, 1.0
        best: Outcome | None = None
        while high <= _MAX_RATE:
            holds, found = attempt(high)
            if not holds:
                break
            low, high, best = high, 2 * high, found
        for _ in range(_HALVINGS if low else 2 * _HALVINGS):
            middle = (low + high) / 2
            holds, found = attempt(middle)
            if holds:
                low, best = middle, found
            else:
                high = middle
        if best is None:
            raise ConfigError("not even a lone request meets the objectives")
        return low, best


def setups_of(
    base: Setup, variations: Sequence[tuple[str, Sequence[str]]]
) -> list[tuple[Changes, Setup]]:
    """All combinations of the given values; each setup comes with the values that it changes.

    Parameters
    ----------
    variations
        Names and values as text; names are ``request_rate``, ``replicas``, ``routing``,
        ``pipeline_depth`` and those of a scheduler's limits.

    Raises
    ------
    ConfigError
        A name is unknown, or a value is invalid.
    """
    names = [name for name, _ in variations]
    combinations = itertools.product(*(values for _, values in variations))
    found = [dict(zip(names, values, strict=True)) for values in combinations]
    return [(changes, _changed(base, changes)) for changes in found]


def _changed(base: Setup, changes: Changes) -> Setup:
    own: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    for name, text in changes.items():
        if name in _OWN:
            own[name] = _value(name, text, Setup)
        elif name == "max_drafts" and not base.limits.max_drafts:
            raise ConfigError(
                "--vary: max_drafts cannot vary: no step of the calibration had drafts, so nothing "
                "is known of what they bring"
            )
        elif name in _LIMITS:
            limits[name] = _value(name, text, SchedulerLimits)
        else:
            known = ", ".join((*_OWN, *_LIMITS))
            raise ConfigError(f"--vary: unknown name {name}; known are {known}")
    changed = msgspec.structs.replace(base, **own)
    return msgspec.structs.replace(changed, limits=msgspec.structs.replace(base.limits, **limits))


def _value(name: str, text: str, owner: type[msgspec.Struct]) -> Any:
    kind = next(f.type for f in msgspec.structs.fields(owner) if f.name == name)
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        choices = " or ".join(map(str, get_args(kind))) or kind.__name__
        raise ConfigError(f"--vary: {name} must be {choices}, got {text!r}") from None
