"""torch.compile policy: which functions are compiled, with which symbolic sizes, cached where."""

from src.compile.artifacts import use_artifact_cache
from src.compile.functions import CompiledFunction, compile_functions

__all__ = ["CompiledFunction", "compile_functions", "use_artifact_cache"]
