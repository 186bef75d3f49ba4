"""What sentence-transformers' modules behind the pooling make of vectors: `Dense` and others.

They compute in float32, on the model's device. Nothing that a file says is imported or unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from src.core.errors import ModelLoadError
from src.models.checkpoint import TensorReader, open_checkpoint
from src.models.fields import read_json
from src.models.layers.linear import linear
from src.models.layers.norms import layer_norm
from src.models.weights.parameters import allocate
from src.ops.elementwise import by_token

# Classes of torch.nn, with their default arguments.
_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
    "LeakyReLU": functional.leaky_relu,
    "ELU": functional.elu,
}
# What a vector is called among the features that modules hand on; others are of tokens.
_VECTOR: Final = "sentence_embedding"
_MOST_FEATURES: Final = 1 << 20
# Those of `torch.nn.functional.normalize` and of `torch.nn.LayerNorm`.
_LEAST_LENGTH: Final = 1e-12
_NORM_EPS: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Dense:
    """A projection, perhaps with an activation, and perhaps added to what it projects.

    Attributes
    ----------
    directory
        Where its weights are.
    inputs, outputs
        Numbers of a vector.
    activation
        One of torch.nn's classes.
    adds_input
        Whether the input is added to the output, projected where the sizes differ.
    """

    directory: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str
    adds_input: bool

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each tensor that its file has."""
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (self.outputs, self.inputs)}
        if self.has_bias:
            shapes["linear.bias"] = (self.outputs,)
        if self.adds_input and self.inputs != self.outputs:
            shapes["residual.weight"] = (self.outputs, self.inputs)
        return shapes

    def apply(self, weights: Mapping[str, Tensor], vectors: Tensor) -> Tensor:
        """Float32 [S, inputs] to [S, outputs]."""
        made = linear(vectors, weights["linear.weight"], weights.get("linear.bias"))
        made = by_token(_ACTIVATIONS[self.activation], made)
        if not self.adds_input:
            return made
        projection = weights.get("residual.weight")
        return made + (vectors if projection is None else linear(vectors, projection))


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm with weight and bias."""

    directory: Path
    size: int

    @property
    def outputs(self) -> int:
        """Numbers of a vector."""
        return self.size

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each tensor that its file has."""
        return {"norm.weight": (self.size,), "norm.bias": (self.size,)}

    def apply(self, weights: Mapping[str, Tensor], vectors: Tensor) -> Tensor:
        """Float32 [S, size] to the same shape."""
        return layer_norm(vectors, weights["norm.weight"], weights["norm.bias"], _NORM_EPS)


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scales to length 1, before another module."""

    outputs: int

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """There are none."""
        return {}

    def apply(self, weights: Mapping[str, Tensor], vectors: Tensor) -> Tensor:
        """Float32 [S, outputs] to the same shape."""
        lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        return vectors / lengths.clamp_min(_LEAST_LENGTH)


VectorModule: TypeAlias = Dense | LayerNorm | Normalize


def describe_dense(directory: Path, size: int) -> Dense:
    """What `config.json` says of a projection of vectors of ``size`` numbers.

    Raises
    ------
    ModelLoadError
        It cannot be read, or asks for what is not supported; names the field.
    """
    source, settings = _settings(
        directory,
        {
            "in_features",
            "out_features",
            "bias",
            "activation_function",
            "module_input_name",
            "module_output_name",
            "use_residual",
        },
    )
    for name in ("module_input_name", "module_output_name"):
        if settings.get(name) not in (None, _VECTOR):
            raise ModelLoadError(
                f"{source}: {name} must be {_VECTOR!r}: a projection of tokens is not supported, "
                f"got {settings[name]!r}"
            )
    inputs, outputs = (_size(source, settings, name) for name in ("in_features", "out_features"))
    if inputs != size:
        raise ModelLoadError(f"{source}: in_features must be {size}, got {inputs}")
    return Dense(
        directory,
        inputs,
        outputs,
        has_bias=_flag(source, settings, "bias", default=True),
        activation=_activation(source, settings),
        adds_input=_flag(source, settings, "use_residual", default=False),
    )


def describe_layer_norm(directory: Path, size: int) -> LayerNorm:
    """What `config.json` says of a layer norm of vectors of ``size`` numbers.

    Raises
    ------
    ModelLoadError
        It cannot be read, or has another size.
    """
    source, settings = _settings(directory, {"dimension"})
    if (given := _size(source, settings, "dimension")) != size:
        raise ModelLoadError(f"{source}: dimension must be {size}, got {given}")
    return LayerNorm(directory, size)


class VectorModules:
    """Modules with their weights. Call it on the device thread only.

    Attributes
    ----------
    nbytes
        Bytes of the weights.
    """

    def __init__(self, modules: Sequence[tuple[VectorModule, Mapping[str, Tensor]]]) -> None:
        self._modules = tuple(modules)
        self.nbytes = sum(each.nbytes for _, weights in modules for each in weights.values())

    def __call__(self, vectors: Tensor) -> Tensor:
        """Pooled vectors, float32 [S, hidden_size], to float32 [S, size]."""
        for module, weights in self._modules:
            vectors = module.apply(weights, vectors)
        return vectors


def load_vector_modules(
    modules: Sequence[VectorModule], device: torch.device, *, is_dummy: bool = False
) -> VectorModules | None:
    """Read the modules' weights; None if there are no modules.

    Parameters
    ----------
    is_dummy
        Whether weights are made up and no file is read.

    Raises
    ------
    ModelLoadError
        A file is missing, damaged or pickled, or its tensors are not those of its module.
    """
    if not modules:
        return None
    make = _drawn if is_dummy else _read
    return VectorModules([(each, make(each, device)) for each in modules])


def _drawn(module: VectorModule, device: torch.device) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=source).mul_(0.02).to(device)
        for name, shape in module.tensors.items()
    }


def _read(module: VectorModule, device: torch.device) -> dict[str, Tensor]:
    wanted = module.tensors
    if isinstance(module, Normalize):
        return {}
    stored, reader = open_checkpoint(module.directory), TensorReader(lambda count: None)
    shapes = {name: each.shape for name, each in stored.items()}
    if shapes != wanted:
        raise ModelLoadError(
            f"{module.directory}: its config.json asks for the tensors {_told(wanted)}, its file "
            f"has {_told(shapes)}"
        )
    weights = {name: allocate(shape, torch.float32, device) for name, shape in wanted.items()}
    for name, values in weights.items():
        reader.read(stored[name], values)
    return weights


def _told(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())[:5])


def _settings(directory: Path, known: set[str]) -> tuple[Path, dict[str, Any]]:
    """A module's `config.json`, in which nothing is skipped."""
    source = directory / "config.json"
    settings = read_json(source)
    if unknown := sorted(settings.keys() - known):
        raise ModelLoadError(
            f"{source}: {', '.join(unknown[:5])} not supported, and without it vectors might be "
            "others"
        )
    return source, settings


def _size(source: Path, settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if type(value) is not int or not 1 <= value <= _MOST_FEATURES:
        raise ModelLoadError(
            f"{source}: {name} must be an integer from 1 to {_MOST_FEATURES}, got {value!r}"
        )
    return value


def _flag(source: Path, settings: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = settings.get(name, default)
    if type(value) is not bool:
        raise ModelLoadError(f"{source}: {name} must be true or false, got {value!r}")
    return value


def _activation(source: Path, settings: Mapping[str, Any]) -> str:
    """The class of torch.nn that the file names, without its modules."""
    given = settings.get("activation_function", "torch.nn.Tanh")
    package, _, name = str(given).rpartition(".")
    if not f"{package}.".startswith("torch.nn.") or name not in _ACTIVATIONS:
        raise ModelLoadError(
            f"{source}: activation_function must be one of torch.nn's {', '.join(_ACTIVATIONS)}, "
            f"got {given!r}"
        )
    return name
