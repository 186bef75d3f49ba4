"""A loaded model of transformers, as the engine runs it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from src.models.config import ClassifierConfig
from src.models.generation import GenerationDefaults
from src.models.generic.body import Body
from src.models.generic.layers import compile_layers
from src.models.generic.passes import AttentionCall, StepPass
from src.models.generic.trial import tolerance_of
from src.models.layer_kv import LayerKVSpec, kv_of
from src.models.layers.attention import AttentionMixerWeights
from src.models.model import ModelSpec
from src.models.program import Function, Mix, Mixer, StepInput
from src.models.served import ImplementationName

logger = logging.getLogger(__name__)


class TransformersModel:
    """See `served.ServedModel`. Every call of attention is a layer of its own, with its own memory.

    Parameters
    ----------
    calls
        Of attention in every pass, in order.
    classifier
        What its head for labels is; None: it has none.
    own_inputs
        See `served.ServedModel`.
    """

    implementation: ImplementationName = "transformers"
    is_program = False
    cache_dtype: torch.dtype | None = None
    adapters = None
    functions: tuple[Function, ...] = ()

    def __init__(
        self,
        body: Body,
        calls: Sequence[AttentionCall],
        spec: ModelSpec,
        generation: GenerationDefaults,
        classifier: ClassifierConfig | None = None,
        own_inputs: tuple[StepInput, ...] = (),
    ) -> None:
        self.classifier = classifier
        self.own_inputs = own_inputs
        self.spec = spec
        self.generation = generation
        self.mixers: tuple[Mixer, ...] = tuple(call.mixer for call in calls)
        self.mixer_weights: tuple[AttentionMixerWeights, ...] = tuple(c.weights for c in calls)
        self._body = body
        self._calls = tuple(calls)

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
        """See `served.ServedModel`; there are no functions, adapters and outputs.

        Layers behind the last attention compute every token, those that are not ``kept`` too.
        """
        step = StepPass(self._calls, positions + self._body.first_position, mix, kept)
        hidden = self._body.hidden(input_ids, step, own_inputs)
        step.finish()
        return hidden if kept is None else hidden[kept]

    @torch.inference_mode()
    def compile_layers(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile the layers, see `layers.compile_layers`; takes minutes, before the first step."""

        def run_pass(count: int) -> Tensor:
            ids = torch.arange(count, device=self.spec.device) % self.spec.vocab_size
            return self.forward((), ids, torch.arange(count, device=self.spec.device), mix)

        def mix(mixer: Mixer, given: Sequence[Tensor]) -> Tensor:
            # Of what each token itself has, whatever the number of heads: queries and keys too, or
            # nobody would see that they are computed wrongly.
            size = math.prod(mixer.writes.shape)
            query, key, value = (
                one.flatten(1).repeat(1, -(-size // one[0].numel()))[:, :size] for one in given
            )
            return query * key.sigmoid() + value

        attentions = [call.module for call in self._calls]
        tolerance = tolerance_of(self.spec.dtype)
        names = compile_layers(self._body.module, attentions, run_pass, tolerance, backend)
        if names:
            logger.info("layers are compiled: %s", ", ".join(names))

    def logits(self, functions: Sequence[Function], hidden: Tensor) -> Tensor:
        """See `served.ServedModel`."""
        scores = self._body.logits(hidden)
        return scores if self.classifier is not None else scores[:, : self.spec.vocab_size]

    def kv_cache_spec(self) -> tuple[LayerKVSpec, ...]:
        """See `served.ServedModel`."""
        return kv_of(self.mixers, self.cache_dtype)

    def parameters(self) -> dict[str, Tensor]:
        """See `served.ServedModel`."""
        return dict(self._body.module.named_parameters())

    def buffers(self) -> dict[str, Tensor]:
        """See `served.ServedModel`."""
        return dict(self._body.module.named_buffers())
