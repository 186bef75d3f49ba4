"""`python -m pytest benchmarks --benchmark-only` beside a test-suite that skips benchmarks."""

from __future__ import annotations

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # The project's own options skip benchmarks, which contradicts the wish to run them alone.
    if config.option.benchmark_only:
        config.option.benchmark_skip = False


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Figures per core: two busy cores of a shared machine are rarely both ours."""
    torch.set_num_threads(1)
