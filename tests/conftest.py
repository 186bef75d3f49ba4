"""What every test shares."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Machines that run tests are shared and slow at times: no example has a deadline of its own, the
# test as a whole has one.
settings.register_profile(
    "slipstream", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("slipstream")


@pytest.fixture
def anyio_backend() -> str:
    """The engine belongs to asyncio."""
    return "asyncio"
