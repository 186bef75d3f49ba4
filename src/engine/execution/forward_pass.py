"""The forward pass from token ids to hidden states: the model's program and its mixers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from src.core.errors import SlipstreamError
from src.engine.execution.group_attention import find_backends
from src.engine.execution.inputs import StepInputs
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.mixers import MIXERS, LayerMixer
from src.models import Mixer, ServedModel
from src.models.program import Function, Mix
from src.ops.declaration import Backend
from src.ops.runtime.step import CompiledStep


class WorkerClosedError(SlipstreamError):
    """The worker was closed while it was in use."""


class Code(NamedTuple):
    """The code that a step runs.

    Attributes
    ----------
    functions
        One per call of the program: compiled, or the model's own.
    step
        The whole step from rows to tokens as one call; ``None``: the step runs call by call.
    adapted
        The code of steps with adapters; ``None`` if there are no slots for any.
    """

    functions: Sequence[Function]
    step: CompiledStep | None = None
    adapted: Code | None = None

    @classmethod
    def eager(cls, model: ServedModel) -> Code:
        """A model's own functions."""
        adapted = None if model.adapters is None else cls(model.functions)
        return cls(model.functions, adapted=adapted)

    @classmethod
    def of_variants(cls, codes: Sequence[Code]) -> Code:
        """The code of a program, and perhaps of its variant with adapters."""
        return codes[0]._replace(adapted=codes[1] if len(codes) > 1 else None)

    def serving(self, *, adapts: bool) -> Code:
        """The code of a step, which has adapters or not."""
        if not adapts:
            return self
        assert self.adapted is not None, "it has no slots for adapters"
        return self.adapted


class ForwardPass:
    """A model with its KV memory.

    Parameters
    ----------
    attention
        The attention backend on a GPU; ``None`` for the device's own kernels. A reference is kept,
        because attention calls refer to it by its handle only.

    Attributes
    ----------
    owners
        Group of layers -> the backend that computes all of its attention, see `group_attention`.
    passed_over
        Why other backends own no group.
    """

    def __init__(
        self, model: ServedModel, kv_cache: KVCache, attention: Backend | None = None
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv_cache = kv_cache
        layers = [
            (MIXERS[mixer.kind], mixer, weights)
            for mixer, weights in zip(model.mixers, model.mixer_weights, strict=True)
        ]
        shapes = {
            mixer.layer: shape
            for kind, mixer, weights in layers
            if (shape := kind.layer_shape(mixer, weights, kv_cache)) is not None
        }
        groups = kv_cache.layout.groups
        self.owners, self.passed_over = find_backends(shapes, groups, model.spec.device.type)
        owner_of = {layer: owner for owner in self.owners.values() for layer in owner.group.layers}
        self._mixers: dict[int, LayerMixer[Any]] = {
            mixer.layer: kind(mixer, weights, kv_cache, attention, owner_of.get(mixer.layer))
            for kind, mixer, weights in layers
        }
        self._last = len(self._mixers) - 1
        # Per layer: which of the step's metadata is its own. Per metadata: a mixer that makes it.
        self._metadata_of: list[int] = []
        self._preparing: list[LayerMixer[Any]] = []
        numbers: dict[Hashable, int] = {}
        for layer in range(len(self._mixers)):
            mixer = self._mixers[layer]
            number = numbers.setdefault((type(mixer), mixer.shares), len(numbers))
            if number == len(self._preparing):
                self._preparing.append(mixer)
            self._metadata_of.append(number)
        # Whether the last layer shares its metadata with no other.
        self._is_last_alone = self._metadata_of.count(self._metadata_of[-1]) == 1
        self._stopped = False

    def stop(self) -> None:
        """Make every forward pass, in any thread, fail at its next mixer."""
        self._stopped = True

    def __call__(
        self,
        inputs: StepInputs,
        functions: Sequence[Function],
        outputs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden_size], or [S, hidden_size] with ``inputs.last``.

        ``outputs`` gets the program's outputs, see `run_program`.

        Raises
        ------
        WorkerClosedError
            After `stop`.
        """
        metadata = self.prepare(inputs)

        def mix(mixer: Mixer, given: Sequence[Tensor]) -> Tensor:
            if inputs.last is not None and mixer.layer == self._last:
                self._check()
                return self._mixers[mixer.layer].mix_sampled(inputs, inputs.last, given)
            # Not empty_like, because for one token that would keep the stride of a slice.
            out = given[0].new_empty(len(given[0]), *mixer.writes.shape)
            self.mix(inputs, metadata, mixer, given, self.view_of(mixer, out, given))
            return out

        kept = None if inputs.last is None else inputs.sample_index_s
        given = (inputs.input_ids_t, inputs.positions_t)
        return self.run(functions, *given, mix, kept, inputs.adapter_slots_t, inputs.own_t, outputs)

    def run(
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
        """Hidden states, with ``mix`` as the mixers; arguments as of `Model.forward`."""
        return self.model.forward(
            functions, input_ids, positions, mix, kept, adapter_slots, own_inputs, outputs
        )

    def prepare(self, inputs: StepInputs) -> list[Any]:
        """The metadata that the step's mixers share, as `mix` takes it."""
        preparing = self._preparing
        if inputs.last is not None and self._is_last_alone:
            # Only the last layer would need them, and it makes its own.
            preparing = preparing[:-1]
        return [mixer.prepare(inputs, inputs.lengths_b) for mixer in preparing]

    def view_of(self, mixer: Mixer, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """View a mixer's output buffer [T, *mixer.writes.shape] in the shape that `mix` takes."""
        return self._mixers[mixer.layer].view_of(out, given)

    def mix(
        self,
        inputs: StepInputs,
        metadata: Sequence[Any],
        mixer: Mixer,
        given: Sequence[Tensor],
        out: Tensor,
    ) -> None:
        """Compute a mixer into ``out``, see `view_of`. The tensors ``given`` may be overwritten.

        ``metadata`` are those of `prepare`.

        Raises
        ------
        WorkerClosedError
            After `stop`.
        """
        self._check()
        own = metadata[self._metadata_of[mixer.layer]]
        self._mixers[mixer.layer].mix(inputs, own, given, out)

    def _check(self) -> None:
        if self._stopped:
            raise WorkerClosedError("the worker was closed")
