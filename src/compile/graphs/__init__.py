"""Captures work that is launched again and again in the same shape, and replays it in one call.

Nothing here knows of models or of steps. `ladder` says which shapes there are, `backend` what a
device must offer, and `cuda` offers it with CUDA graphs. docs/cuda-graphs.md tells what is done
with them.
"""

from src.compile.graphs.backend import CaptureBackend, Captured
from src.compile.graphs.ladder import GraphShape, PaddingLadder, ShapeKind, rungs

__all__ = [
    "CaptureBackend",
    "Captured",
    "GraphShape",
    "PaddingLadder",
    "ShapeKind",
    "rungs",
]
