"""The collector overlooks what stays, is away during captures, and can be brought back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from src.core.collector import (
    freeze_collector,
    frozen_collector,
    paused_collector,
    thaw_collector,
)

Away = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_what_is_frozen_is_not_looked_at_until_it_is_thawed() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    freeze_collector()
    del cycle
    assert gc.collect() == 0
    thaw_collector()
    assert gc.collect() > 0


def test_what_exists_stays_frozen_and_the_rest_is_collected_again() -> None:
    with frozen_collector():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)
    thaw_collector()
    assert gc.get_freeze_count() == 0


def test_a_pause_freezes_nothing() -> None:
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("away", [frozen_collector, paused_collector])
def test_a_collector_that_was_off_stays_off(away: Away) -> None:
    gc.disable()
    with away():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("away", [frozen_collector, paused_collector])
def test_a_failure_brings_it_back(away: Away) -> None:
    with pytest.raises(ValueError, match="capture"), away():
        raise ValueError("capture")
    assert gc.isenabled()


@pytest.mark.parametrize("collect", [True, False])
def test_garbage_is_looked_for_before_and_only_if_wanted(collect: bool) -> None:
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with frozen_collector(collect=collect):
            inside = len(collections)
        assert (inside > 0) == collect
    finally:
        gc.callbacks.pop()
