"""What drafts cost, where that is not to depend on who else uses the machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from src.core.plan import StepPlan
from src.engine.grammar import follower
from src.engine.speculation import Speculation, asking, verification

# Seconds of a step, and of each of its tokens: a draft costs a fiftieth of a lone row's step.
_STEP, _TOKEN = 1e-3, 2e-5


def steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell engines that a step takes as long as its tokens say, and that asking takes no time.

    No grammar is slow ahead of a row's text. Whether drafts pay is chosen as ever, from durations
    as they are on a machine that does nothing else. By the clock a few stalls among the first steps
    make drafts too dear for many more.
    """
    observe = Speculation.observe

    def steadily(self: Speculation, plan: StepPlan, seconds: float, **options: Any) -> None:
        observe(self, plan, _STEP + _TOKEN * plan.num_tokens, **options)

    monkeypatch.setattr(Speculation, "observe", steadily)
    stopped = SimpleNamespace(monotonic=lambda: 0.0)
    for module in (asking, verification):
        monkeypatch.setattr(module, "time", stopped)
    monkeypatch.setattr(follower, "ORDINARY_CALL", 60.0)
