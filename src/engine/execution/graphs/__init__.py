"""Steps that are captured once per padded shape, and replayed.

`decode` captures a whole decode step, head, sampler and row update with it; `mixed` captures what
lies between the attention calls of any step; `pool` keeps both, decides when which shape is
captured, and finds the one that serves a plan; `memory` tells beforehand what they will take.
"""

from src.engine.execution.graphs.decode import DecodeGraph, DecodeOutput
from src.engine.execution.graphs.memory import trial_bytes
from src.engine.execution.graphs.mixed import MixedGraph
from src.engine.execution.graphs.planning import GraphPlan, plan_graphs
from src.engine.execution.graphs.pool import GraphPool, GraphStats

__all__ = [
    "DecodeGraph",
    "DecodeOutput",
    "GraphPlan",
    "GraphPool",
    "GraphStats",
    "MixedGraph",
    "plan_graphs",
    "trial_bytes",
]
