"""Captures repeated launches of the same shape as graphs, each of which is replayed in one call.

Nothing here depends on models or steps. `ladder` defines the shapes, `backend` the interface to a
device, and `cuda` implements it with CUDA graphs. docs/cuda-graphs.md describes how graphs are
used.
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
