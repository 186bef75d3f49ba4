"""One layer while it is written: its description, and how its parameters are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from src.models.builder import Name, ProgramBuilder
from src.models.config import LayerConfig, ModelConfig
from src.models.layers.norms import NormSpec
from src.models.program import StepTensor
from src.models.weights.parameters import Placement

RESIDUAL = "residual"


class LayerWriter:
    """What writers of a layer's parts share.

    Attributes
    ----------
    own, stored
        What names of the layer's parameters, and of its tensors in the checkpoint, begin with.
    hidden
        Size of the residual stream.
    """

    def __init__(self, builder: ProgramBuilder, model: ModelConfig, number: int) -> None:
        self.builder = builder
        self.model = model
        self.config: LayerConfig = model.layers[number]
        self.own = f"layers.{number}."
        self.stored = model.layer_name.format(number) + "."
        self.hidden = model.hidden_size

    @property
    def residual(self) -> StepTensor:
        """The residual stream."""
        return self.builder.step_tensor(RESIDUAL, self.hidden)

    def vector(
        self,
        name: str,
        size: int,
        tensor: str | None,
        *,
        fill: float = 0.0,
        shard: int | None = None,
    ) -> Name:
        """Declare a norm or a bias [size] that a tensor of the layer fills; None without one."""
        if tensor is None:
            return None
        return self.builder.vector(
            self.own + name, size, self.stored + tensor, fill=fill, shard=shard
        )

    def block_norm(self, name: str, tensor: str | None) -> Name:
        """Declare the weight of a norm of the residual stream; None without one."""
        suffixed = None if tensor is None else f"{tensor}.weight"
        return self.vector(name, self.hidden, suffixed, fill=self.model.norm.neutral)

    def norm_spec(self, tensor: str | None) -> NormSpec | None:
        """How the norm of that tensor computes; None without one."""
        return None if tensor is None else self.model.norm

    def matrix(self, name: str, shape: tuple[int, int], placements: tuple[Placement, ...]) -> Name:
        """Declare a projection."""
        return self.builder.parameter(self.own + name, shape, "matrix", placements)

    def fused_bias(self, name: str, size: int, placements: tuple[Placement, ...]) -> Name:
        """Declare the bias of a projection that several tensors may fill."""
        return self.builder.parameter(self.own + name, (size,), "vector", placements, fill=0.0)

    def names(self, names: tuple[str, ...], kind: str) -> list[str]:
        """Names of tensors in the checkpoint."""
        return [f"{self.stored}{name}.{kind}" for name in names]


class PartWriter(Protocol):
    """Writes one part of a layer into its program.

    ``config`` is the part's description, of the class under which the writer stands in a table.
    ``between`` writes what is computed after the part has read the residual stream, and before its
    mixer.
    """

    def __call__(
        self, layer: LayerWriter, config: Any, between: Callable[[], None] = lambda: None
    ) -> None: ...
