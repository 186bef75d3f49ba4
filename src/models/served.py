"""What an engine needs of a model, whatever computes it: our own programs, or another library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from src.models.adapters.memory import AdapterMemory
from src.models.config import ClassifierConfig
from src.models.generation import GenerationDefaults
from src.models.layer_kv import LayerKVSpec
from src.models.model import Model, ModelSpec
from src.models.program import Function, Mix, Mixer, StepInput

ImplementationName = Literal["native", "transformers"]


class ServedModel(Protocol):
    """A filled model. Its mixers are the engine's, for they need memory that outlives a step."""

    cache_dtype: torch.dtype | None
    """Codes of 8 bits in which keys and values are kept; None: in the model's dtype."""

    @property
    def spec(self) -> ModelSpec:
        """Shape, numerics and placement."""

    @property
    def generation(self) -> GenerationDefaults:
        """The sampling defaults that the checkpoint ships."""

    @property
    def implementation(self) -> ImplementationName:
        """What computes it."""

    @property
    def classifier(self) -> ClassifierConfig | None:
        """The head by which `logits` gives scores of labels; None: those of the vocabulary."""

    @property
    def is_program(self) -> bool:
        """Whether it is a `Model`, whose calls can be compiled."""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """All mixers, by their layer."""

    @property
    def mixer_weights(self) -> Sequence[Any]:
        """Per mixer, the weights that its kind takes."""

    @property
    def own_inputs(self) -> tuple[StepInput, ...]:
        """The step inputs that it declares, beside those that every step has."""

    @property
    def adapters(self) -> AdapterMemory | None:
        """Slots for adapters; None: it takes none."""

    @property
    def functions(self) -> Sequence[Function]:
        """What runs it uncompiled, as `forward` and `logits` take it."""

    def forward(
        self,
        functions: Sequence[Function],
        input_ids: Tensor,
        positions: Tensor,
        mix: Mix,
        kept: Tensor | None = None,
        adapter_slots: Tensor | None = None,
        own_inputs: Mapping[str, Tensor] = MappingProxyType({}),
        outputs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [T, H] or [K, H]; see `Model.forward`."""

    def logits(self, functions: Sequence[Function], hidden: Tensor) -> Tensor:
        """Scores of the vocabulary or of labels, float32 [S, V], of hidden states [S, H]."""

    def kv_cache_spec(self) -> tuple[LayerKVSpec, ...]:
        """What each layer keeps of a sequence, in layer order."""

    def parameters(self) -> dict[str, Tensor]:
        """Every distinct tensor of the parameters by name."""

    def buffers(self) -> dict[str, Tensor]:
        """Tables that were computed for it, by name."""


def device_of(model: ServedModel) -> torch.device:
    """The device that serves a model, also where it is an outline on the meta device."""
    if isinstance(model, Model) and model.options.served_on is not None:
        return model.options.served_on
    return model.spec.device
