"""The way from transformers' attention calls to the pass of a model that they belong to.

transformers looks attention functions up by name in a table of the process. Ours finds the pass
that is under way by a context variable, so that engines beside each other, in threads of their own,
never meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from src.models.layers.attention import AttentionMixerWeights
from src.models.program import Mix, Mixer

IMPLEMENTATION = "slipstream"
"""Our name in transformers' tables."""


@dataclass(frozen=True, slots=True)
class GivenCall:
    """One call of attention, as transformers makes it.

    Attributes
    ----------
    module
        Who calls.
    query, key, value
        [1, Q, T, D], [1, K, T, D] and [1, K, T, V].
    mask
        What our mask function left, or whatever else the model has for a mask.
    scaling
        Factor of query-key products; None is ``D ** -0.5``.
    options
        Everything else by name.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scaling: Any
    options: dict[str, Any]


class Pass(Protocol):
    """One forward pass of a model, or of its head."""

    positions: Tensor  # int64 [T]

    def attend(self, given: GivenCall) -> Tensor:
        """What attention leaves, [1, T, Q, V]."""

    def notice_mask(self, mask: Tensor, sees: Callable[..., Any], local_size: int | None) -> None:
        """A mask was made; ``sees(batch, head, query, key)`` says what it lets through."""


_CURRENT: ContextVar[Any] = ContextVar("slipstream_pass")


@contextlib.contextmanager
def under_way(current: Any) -> Iterator[None]:
    """Within it, calls of attention in this thread belong to this pass."""
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_pass() -> Any:
    """The pass that is under way, or None."""
    return _CURRENT.get(None)


def register() -> None:
    """Enter our functions into transformers' tables; as often as one likes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def leave_out_attention() -> None:
    """Have compiled code end before a call of attention and begin again behind it."""
    from transformers import AttentionInterface

    # Not in `register`, since it imports torch's compiler.
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(_attend))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    current = _CURRENT.get()
    given = GivenCall(module, query, key, value, attention_mask, scaling, options)
    return current.attend(given), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    **_: Any,
) -> Tensor:
    """No mask: a tensor of its shape without memory, by which an attention call can be told."""
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    _CURRENT.get().notice_mask(mask, mask_function, local_size)
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of attention in every pass: who makes it, and what the engine computes for it.

    Attributes
    ----------
    value_dim
        Elements of a head of values, which are filled up to those of keys, or these to those.
    """

    module: nn.Module
    mixer: Mixer
    weights: AttentionMixerWeights
    value_dim: int

    def tensors(self, given: GivenCall) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, Q, D], key and value [T, K, D], contiguous, as the mixer takes them."""
        spec = self.mixer.spec
        query, key, value = (
            functional.pad(one[0].transpose(0, 1), (0, spec.head_dim - one.shape[-1]))
            .to(spec.dtype)
            # Flat first, or the stride of a single head could be anything.
            .reshape(one.shape[2], -1)
            .contiguous()
            .view(one.shape[2], one.shape[1], spec.head_dim)
            for one in (given.query, given.key, given.value)
        )
        return query, key, value

    def result(self, attended: Tensor, given: GivenCall) -> Tensor:
        """What transformers gets, [1, T, Q, V], of what the mixer leaves, [T, Q D]."""
        spec = self.mixer.spec
        heads = attended.view(1, -1, spec.num_heads, spec.head_dim)[..., : self.value_dim]
        return heads.to(given.query.dtype)


class StepPass:
    """A pass over the tokens of a step, of one or more sequences; all attention is the engine's.

    Parameters
    ----------
    calls
        Of every pass, in order.
    kept
        As of `program.run_program`: what the last mixer leaves is of these tokens alone.
    """

    def __init__(
        self, calls: Sequence[AttentionCall], positions: Tensor, mix: Mix, kept: Tensor | None
    ) -> None:
        self.positions = positions
        self._calls = calls
        self._mix = mix
        self._kept = kept
        self._done = 0

    def attend(self, given: GivenCall) -> Tensor:
        """See `Pass`."""
        call = self._calls[self._done] if self._done < len(self._calls) else None
        if call is None or call.module is not given.module:
            raise RuntimeError(f"call {self._done} of attention is not the one that was recorded")
        self._done += 1
        attended = self._mix(call.mixer, call.tensors(given))
        if self._kept is not None and self._done == len(self._calls):
            # The model goes on with every token; those that nobody asks for come to nothing.
            whole = attended.new_zeros(given.query.shape[2], *attended.shape[1:])
            whole[self._kept] = attended
            attended = whole
        return call.result(attended, given)

    def notice_mask(self, mask: Tensor, sees: Callable[..., Any], local_size: int | None) -> None:
        """See `Pass`: it is known already what each call sees."""

    def finish(self) -> None:
        """Make sure that every layer was computed.

        Raises
        ------
        RuntimeError
            One was not: its keys and values are missing from now on.
        """
        if self._done != len(self._calls):
            raise RuntimeError(
                f"{self._done} calls of attention were made, {len(self._calls)} were recorded"
            )


@dataclass(frozen=True, slots=True)
class HeadPass:
    """A pass over hidden states: the body is left out, and ``output`` is what it gave."""

    output: Any
