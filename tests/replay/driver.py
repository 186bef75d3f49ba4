"""Runs a recorded arrival trace and writes down every plan.

A trace is JSON: ``limits``, pipeline ``depth`` and ``events``. Each is at a ``step`` of the loop
and is an ``add`` with a request's fields, a ``finish`` with a key or an ``expire`` with a time.

Plans are written as in a plan log (`src/engine/scheduling/replay.py`), one JSON line each:
``[step_id, installs, block_appends, rows]``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from src.core.plan import StepPlan
from src.engine.scheduling.replay import plan_line
from src.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request

HERE = Path(__file__).parent
TRACES = sorted(HERE.glob("*.trace.json"))


def plans_path(trace: Path) -> Path:
    return trace.with_name(trace.name.replace(".trace.json", ".plans.jsonl"))


def log_line(plan: StepPlan) -> str:
    return msgspec.json.encode(msgspec.structs.astuple(plan_line(plan))).decode()


def replay(
    trace: Path, build: Callable[[SchedulerLimits], Scheduler] = Scheduler
) -> tuple[list[str], Simulation]:
    """The lines of its plans, and the simulation after it has come to rest."""
    recorded: dict[str, Any] = json.loads(trace.read_text())
    limits = make_limits(**recorded["limits"])
    simulation = Simulation(limits, recorded["depth"], build(limits))
    events = recorded["events"]
    for step in range(events[-1]["step"] + 1):
        for event in events:
            if event["step"] != step:
                continue
            if "add" in event:
                simulation.add(make_request(**event["add"]))
            elif "finish" in event:
                simulation.finish(event["finish"])
            else:
                simulation.expire(event["expire"])
        simulation.step()
    simulation.drain()
    return [log_line(plan) for plan in simulation.plans], simulation
