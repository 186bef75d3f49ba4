"""From token ids to hidden states: the model's program, with mixers over KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from src.core.errors import SlipstreamError
from src.engine.execution.inputs import StepInputs
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.mixers import MIXERS
from src.models import Mixer, ServedModel
from src.models.program import Function, Mix
from src.ops.cpu.step import CompiledStep
from src.ops.declaration import Backend


class WorkerClosedError(SlipstreamError):
    """The worker was closed while it was in use."""


class Code(NamedTuple):
    """What a step runs.

    Attributes
    ----------
    functions
        Per call of the program: compiled, or the model's own.
    step
        Everything from rows to tokens in one call; ``None``: call by call.
    """

    functions: Sequence[Function]
    step: CompiledStep | None = None


class ForwardPass:
    """A model with its KV memory.

    Parameters
    ----------
    attention
        What attends on a GPU; ``None`` for the device's own kernels. Kept, for its handle is what
        calls have of it.
    """

    def __init__(
        self, model: ServedModel, kv_cache: KVCache, attention: Backend | None = None
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv_cache = kv_cache
        self._mixers = {
            mixer.layer: MIXERS[mixer.kind](
                mixer, model.mixer_weights[mixer.layer], kv_cache, attention
            )
            for mixer in model.mixers
        }
        self._last = len(self._mixers) - 1
        self._stopped = False

    def stop(self) -> None:
        """Let no pass go on behind the call that it is in, in whatever thread."""
        self._stopped = True

    def __call__(self, inputs: StepInputs, functions: Sequence[Function]) -> Tensor:
        """Hidden states [T, hidden_size], or [S, hidden_size] with ``inputs.last``.

        Raises
        ------
        WorkerClosedError
            After :meth:`stop`.
        """

        def mix(mixer: Mixer, given: Sequence[Tensor]) -> Tensor:
            if inputs.last is not None and mixer.layer == self._last:
                self._check()
                return self._mixers[mixer.layer].mix_sampled(inputs, inputs.last, given)
            # Not empty_like: a slice of one token would hand its row stride on.
            out = given[0].new_empty(len(given[0]), *mixer.writes.shape)
            self.mix(inputs, mixer, given, self.view_of(mixer, out, given))
            return out

        kept = None if inputs.last is None else inputs.sample_index_s
        return self.run(functions, inputs.input_ids_t, inputs.positions_t, mix, kept)

    def run(
        self,
        functions: Sequence[Function],
        input_ids: Tensor,
        positions: Tensor,
        mix: Mix,
        kept: Tensor | None = None,
    ) -> Tensor:
        """The same with other mixers; arguments as of `Model.forward`."""
        return self.model.forward(functions, input_ids, positions, mix, kept)

    def view_of(self, mixer: Mixer, out: Tensor, given: Sequence[Tensor]) -> Tensor:
        """What a mixer leaves, [T, *mixer.writes.shape], as `mix` computes into it."""
        return self._mixers[mixer.layer].view_of(out, given)

    def mix(self, inputs: StepInputs, mixer: Mixer, given: Sequence[Tensor], out: Tensor) -> None:
        """Compute a mixer into ``out``, see `view_of`; what is given may be overwritten.

        Raises
        ------
        WorkerClosedError
            After :meth:`stop`.
        """
        self._check()
        self._mixers[mixer.layer].mix(inputs, given, out)

    def _check(self) -> None:
        if self._stopped:
            raise WorkerClosedError("the worker was closed")
