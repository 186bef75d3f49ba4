"""Compiles pure functions on tensors: ahead of time in other processes, or just in time.

Nothing here depends on models. On the CPU, functions are compiled ahead of time (`ahead`): the
serving process only loads shared libraries. On CUDA they are compiled at their first call
(`just_in_time`); this package does not import that module, because it imports the compiler.
"""

from src.compile.ahead import Compilation, CompilationClosedError, CompilationError
from src.compile.artifacts import use_artifact_cache
from src.compile.job import Job, without_data
from src.compile.loaded import LoadedFunction

__all__ = [
    "Compilation",
    "CompilationClosedError",
    "CompilationError",
    "Job",
    "LoadedFunction",
    "use_artifact_cache",
    "without_data",
]
