"""Slipstream: an async-first LLM inference engine and OpenAI-compatible server.

::

    from src import AsyncEngine, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from src.core.config import Config
    from src.core.outputs import (
        Completion,
        Delta,
        Embedding,
        FinishReason,
        GenerationResult,
        Usage,
    )
    from src.core.sampling_params import LogitsProcessorCall, SamplingParams
    from src.core.structured_output import StructuredOutput
    from src.core.thinking import Thinking
    from src.engine.client import AsyncEngine
    from src.engine.llm import LLM
    from src.engine.requests.prompts import ChatOptions
    from src.engine.sampling.processors import LogitsProcessor

__all__ = [
    "LLM",
    "AsyncEngine",
    "ChatOptions",
    "Completion",
    "Config",
    "Delta",
    "Embedding",
    "FinishReason",
    "GenerationResult",
    "LogitsProcessor",
    "LogitsProcessorCall",
    "SamplingParams",
    "StructuredOutput",
    "Thinking",
    "Usage",
]

_HOMES = {
    "LLM": "src.engine.llm",
    "AsyncEngine": "src.engine.client",
    "ChatOptions": "src.engine.requests.prompts",
    "Config": "src.core.config",
    "LogitsProcessor": "src.engine.sampling.processors",
    "LogitsProcessorCall": "src.core.sampling_params",
    "SamplingParams": "src.core.sampling_params",
    "StructuredOutput": "src.core.structured_output",
    "Thinking": "src.core.thinking",
}


def __getattr__(name: str) -> Any:
    # Resolved on first use: importing one part of the package must not import all of it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "src.core.outputs")), name)
