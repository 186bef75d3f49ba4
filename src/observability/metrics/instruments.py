"""Counters, gauges and histograms that cost a fraction of a microsecond per observation.

Only the event loop's thread writes; any thread may read. So nothing here takes a lock, and a reader
may see a histogram whose sum lacks the newest observation. prometheus_client's own instruments take
a lock per observation, and an engine makes thousands of observations per second. These instruments
also work in its registry, for programs that expose metrics themselves.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Literal, Protocol, TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

Kind = Literal["counter", "gauge", "histogram"]
# (suffix of the name, additional labels, value, exemplar)
Point = tuple[str, Mapping[str, str], float, Exemplar | None]

# Maximal number of label values per family; further ones are counted as OTHER.
MAX_CHILDREN = 64
OTHER = "other"


class Instrument(Protocol):
    """The state of one combination of label values."""

    def points(self) -> Iterator[Point]:
        """Its current samples."""


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``, at least 0."""
        self.value += amount

    def points(self) -> Iterator[Point]:
        """One sample."""
        yield "_total", {}, self.value, None


class Gauge:
    """A number that can go up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value

    def points(self) -> Iterator[Point]:
        """One sample."""
        yield "", {}, self.value, None


class Histogram:
    """Observations in buckets; each bucket keeps the newest observation that has a trace id.

    ``bounds`` are inclusive upper bounds in rising order; a last bucket without a bound is implied.
    """

    __slots__ = ("_bounds", "_counts", "_exemplars", "_les", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        # Bucket -> (trace, value, seconds since the epoch)
        self._exemplars: dict[int, tuple[str, float, float]] = {}
        self._les = [{"le": floatToGoString(bound)} for bound in (*self._bounds, float("inf"))]
        self.sum = 0.0

    def observe(self, value: float, trace_id: str = "") -> None:
        """Count one observation."""
        index = bisect_left(self._bounds, value)
        self._counts[index] += 1
        self.sum += value
        if trace_id:
            self._exemplars[index] = (trace_id, value, time.time())

    def points(self) -> Iterator[Point]:
        """Cumulative buckets, the count and the sum."""
        total = self.sum
        running = 0
        # A copy, so that no bucket can exceed the count if observations arrive meanwhile.
        for index, count in enumerate(self._counts.copy()):
            running += count
            yield "_bucket", self._les[index], running, self._exemplar(index)
        yield "_count", {}, running, None
        yield "_sum", {}, total, None

    def _exemplar(self, index: int) -> Exemplar | None:
        if (kept := self._exemplars.get(index)) is None:
            return None
        trace_id, value, when = kept
        return Exemplar({"trace_id": trace_id}, value, when)


T = TypeVar("T", bound=Instrument)


class Family(Generic[T]):
    """All instruments of one name, by label values.

    Parameters
    ----------
    constant
        Labels with the same value for all of them.
    labels
        Names of the labels whose values distinguish them.
    """

    def __init__(
        self,
        name: str,
        about: str,
        kind: Kind,
        make: Callable[[], T],
        *,
        constant: Mapping[str, str],
        labels: Sequence[str],
    ) -> None:
        self.name = name
        self._about = about
        self._kind = kind
        self._make = make
        self._constant = dict(constant)
        self._labels = tuple(labels)
        self._children: dict[tuple[str, ...], T] = {}

    def child(self, *values: str) -> T:
        """The instrument of these label values; created on first use."""
        child = self._children.get(values)
        if child is None:
            if len(self._children) >= MAX_CHILDREN:
                values = (OTHER,) * len(values)
            child = self._children.setdefault(values, self._make())
        return child

    def put(self, child: T, *values: str) -> None:
        """Add an instrument that also belongs to another family, or one of a special kind."""
        self._children[values] = child

    def clear(self) -> None:
        """Remove all instruments."""
        self._children.clear()

    def metric(self) -> Metric:
        """The family as an object of prometheus_client, for its encoders."""
        metric = Metric(self.name, self._about, self._kind)
        for values, child in list(self._children.items()):
            labels = self._constant | dict(zip(self._labels, values, strict=True))
            metric.samples += [
                Sample(self.name + suffix, {**labels, **more}, value, None, exemplar)
                for suffix, more, value, exemplar in child.points()
            ]
        return metric


class Families(Collector):
    """Families with common labels, in the order of their declaration."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._constant = dict(labels)
        self._families: list[Family[Counter] | Family[Gauge] | Family[Histogram]] = []

    def counter(self, name: str, about: str, *labels: str) -> Family[Counter]:
        """Declare counters; ``name`` without ``_total``."""
        return self._add(self._family(name, about, "counter", Counter, labels))

    def gauge(
        self, name: str, about: str, *labels: str, without: Iterable[str] = ()
    ) -> Family[Gauge]:
        """Declare gauges; ``without`` names common labels that these gauges lack."""
        return self._add(self._family(name, about, "gauge", Gauge, labels, without))

    def histogram(
        self, name: str, about: str, bounds: Sequence[float], *labels: str
    ) -> Family[Histogram]:
        """Declare histograms with these inclusive upper bounds."""
        return self._add(self._family(name, about, "histogram", lambda: Histogram(bounds), labels))

    def collect(self) -> Iterator[Metric]:
        """All families as metrics of prometheus_client."""
        for family in self._families:
            yield family.metric()

    def _add(self, family: F) -> F:
        self._families.append(family)
        return family

    def _family(
        self,
        name: str,
        about: str,
        kind: Kind,
        make: Callable[[], T],
        labels: Sequence[str],
        without: Iterable[str] = (),
    ) -> Family[T]:
        constant = {key: value for key, value in self._constant.items() if key not in without}
        return Family(self._prefix + name, about, kind, make, constant=constant, labels=labels)


F = TypeVar("F", Family[Counter], Family[Gauge], Family[Histogram])
