"""What tests of drafters share."""

from __future__ import annotations

from functools import partial

import pytest

from src.engine.speculation import Widths, verification


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guess is verified, whether it pays or not."""
    monkeypatch.setattr(verification, "Widths", partial(Widths, always=True))
