"""Captured steps: one capture per padded shape, which is then replayed.

`decode` captures a whole decode step, with head, sampler and row update; `verify` one whose rows
have drafts. `mixed` captures the parts of any step between its attention calls. `pool` keeps them,
decides when a shape is captured, and finds the graph for a plan. `memory` estimates the memory that
graphs will take.
"""

from src.engine.execution.graphs.decode import DecodeGraph, DecodeOutput
from src.engine.execution.graphs.memory import trial_bytes
from src.engine.execution.graphs.mixed import MixedGraph
from src.engine.execution.graphs.planning import (
    DraftsNotCapturedError,
    GraphPlan,
    bounds_of,
    ladder_of,
    plan_graphs,
)
from src.engine.execution.graphs.pool import GraphPool, GraphStats
from src.engine.execution.graphs.verify import VerifyGraph, VerifyOutput

__all__ = [
    "DecodeGraph",
    "DecodeOutput",
    "DraftsNotCapturedError",
    "GraphPlan",
    "GraphPool",
    "GraphStats",
    "MixedGraph",
    "VerifyGraph",
    "VerifyOutput",
    "bounds_of",
    "ladder_of",
    "plan_graphs",
    "trial_bytes",
]
