"""Models as programs, and their checkpoints.

`resolve_model` turns a directory or hub id into a local directory, `load_config` reads its
configuration, `load_model` builds and fills a `Model`. If there is no native family,
`choose_implementation` selects transformers. Otherwise no model library is imported.
"""

from src.models.config import ModelConfig
from src.models.generation import GenerationDefaults
from src.models.hub import resolve_model
from src.models.implementations import Implementation, choose_implementation
from src.models.layer_kv import LayerKVSpec, keys_and_values
from src.models.loading.loader import load_model, outline_model
from src.models.model import Model, ModelSpec
from src.models.program import Call, Mixer, Program
from src.models.registry import load_config, supported_architectures
from src.models.served import ImplementationName, ServedModel, device_of

__all__ = [
    "Call",
    "GenerationDefaults",
    "Implementation",
    "ImplementationName",
    "LayerKVSpec",
    "Mixer",
    "Model",
    "ModelConfig",
    "ModelSpec",
    "Program",
    "ServedModel",
    "choose_implementation",
    "device_of",
    "keys_and_values",
    "load_config",
    "load_model",
    "outline_model",
    "resolve_model",
    "supported_architectures",
]
