"""Runs a recorded arrival trace and writes down every plan.

A trace is JSON: ``limits``, pipeline ``depth`` and ``events``. Each is at a ``step`` of the loop
and is an ``add`` with a request's fields, a ``finish`` with a key or an ``expire`` with a time.

A plan log has one JSON line per plan: ``[step_id, installs, block_appends, rows]`` with

- installs ``[row, generation, key, number of tokens, prompt_len, block_ids]``,
- block appends ``[row, index, block_ids]``,
- rows ``[row, generation, start, num_tokens, samples]``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from src.core.plan import StepPlan
from tests.engine.pure.simulation import Simulation, make_limits, make_request

HERE = Path(__file__).parent
TRACES = sorted(HERE.glob("*.trace.json"))


def plans_path(trace: Path) -> Path:
    return trace.with_name(trace.name.replace(".trace.json", ".plans.jsonl"))


def log_line(plan: StepPlan) -> str:
    installs = [
        [i.row, i.generation, i.request_key, len(i.token_ids), i.prompt_len, i.block_ids]
        for i in plan.installs
    ]
    appends = [[a.row, a.index, a.block_ids] for a in plan.block_appends]
    rows = [[r.row, r.generation, r.start, r.num_tokens, int(r.samples)] for r in plan.rows]
    return json.dumps([plan.step_id, installs, appends, rows], separators=(",", ":"))


def replay(trace: Path) -> tuple[list[str], Simulation]:
    """The plan log's lines, and the simulation after it has come to rest."""
    recorded: dict[str, Any] = json.loads(trace.read_text())
    simulation = Simulation(make_limits(**recorded["limits"]), recorded["depth"])
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
