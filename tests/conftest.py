"""What every test shares."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.support.compiling import compile_engines
from tests.support.kernel_flags import refuse_warnings
from tests.support.lost_device import end_if_lost

# Machines that run tests are shared and slow at times: no example has a deadline of its own, the
# test as a whole has one.
# Examples are derived from the test itself, so that a run repeats the last one;
# HYPOTHESIS_PROFILE=search looks further, with fresh randomness.
_COMMON = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, database=None
)
settings.register_profile("slipstream", _COMMON, derandomize=True)
settings.register_profile("search", _COMMON, max_examples=2000)
# To know that an example fails is enough; the smallest one is not looked for.
_NO_SEARCH = (Phase.explicit, Phase.generate)
settings.register_profile("mutants", _COMMON, derandomize=True, phases=_NO_SEARCH)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "slipstream"))

# Of the kernels' sources, in whatever process they are compiled; see CONTRIBUTING.md.
refuse_warnings()

# A shell's background jobs ignore Ctrl-C, and would pass that on to what a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "compile the engines of tests that do not say themselves whether theirs are compiled"
    parser.addoption("--compiled", action="store_true", help=help)
    help = "of the matrix of drafters, run a quarter (tests/engine/speculation/matrix.py)"
    parser.addoption("--quarter", action="store_true", help=help)
    help = "run the tests of this file or folder before all others; may be given several times"
    parser.addoption("--first", action="append", default=[], metavar="PATH", help=help)


def pytest_configure(config: pytest.Config) -> None:
    compile_engines(config.getoption("--compiled"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if first := [config.rootpath / path for path in config.getoption("--first") or ()]:
        items.sort(key=lambda item: not any(map(item.path.is_relative_to, first)))
    if "PYTEST_XDIST_WORKER" in os.environ:
        # They measure the whole device, and others use it.
        alone = [item for item in items if item.get_closest_marker("alone") is not None]
        items[:] = [item for item in items if item not in alone]
        config.hook.pytest_deselected(items=alone)
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
    if config.getoption("--compiled"):
        for item in items:
            # Of which compilers take most, where nothing is in the cache.
            item.add_marker(pytest.mark.timeout(900), append=False)


@pytest.fixture
def anyio_backend() -> str:
    """The engine belongs to asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Commands that a test calls set the package's level, for their process."""
    logger = logging.getLogger("src")
    level, handlers = logger.level, logger.handlers[:]
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def lost_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Behind a test that broke the device, no other test of this process says anything."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        end_if_lost(request.node.nodeid)
