"""Finds out which attention calls a pass of a model makes, and what each of them computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from src.core.errors import ModelLoadError
from src.models.config import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from src.models.generic.masks import Reach, reach_of
from src.models.generic.passes import AttentionCall, GivenCall
from src.models.layers.attention import AttentionMixerSpec, AttentionMixerWeights
from src.models.program import Mixer, StepTensor
from src.ops.attention.spec import ALL_AHEAD

Attend = Callable[[AttentionCall, Sequence[Tensor]], Tensor]

# Options that are tensors and say nothing about attention that the mixer does not know.
_HARMLESS = {"position_ids", "cache_position", "input_ids", "attention_scaling"}


class Recording:
    """A pass over one sequence that notes its attention calls, in order, as it computes them.

    Parameters
    ----------
    attend
        Computes a call that has been noted: ``attend(call, (query, key, value))``, [T, Q D].
    looks_ahead
        Whether all tokens see later ones. Otherwise none may.
    """

    def __init__(self, positions: Tensor, attend: Attend, *, looks_ahead: bool = False) -> None:
        self.positions = positions
        self.calls: list[AttentionCall] = []
        self._attend = attend
        self._looks_ahead = looks_ahead
        self._masks: dict[int, tuple[Tensor, Callable[..., Any], int | None]] = {}
        # What each of them lets through, once a layer has used it; by the same keys.
        self._reaches: dict[int, Reach] = {}

    def notice_mask(self, mask: Tensor, sees: Callable[..., Any], local_size: int | None) -> None:
        """See `passes.Pass`."""
        self._masks[id(mask)] = mask, sees, local_size

    def attend(self, given: GivenCall) -> Tensor:
        """See `passes.Pass`.

        Raises
        ------
        ModelLoadError
            It is not attention as we know it.
        """
        reach = self._reach(given)
        if reach.ahead is not None and not self._looks_ahead:
            raise ModelLoadError("its tokens attend to later ones: it is no decoder")
        if reach.ahead is None and self._looks_ahead:
            raise ModelLoadError("not all of its tokens attend to later ones: it is no encoder")
        spec = _spec(given, reach)
        layer = len(self.calls)
        writes = StepTensor(f"attended.{layer}", (spec.num_heads * spec.head_dim,), spec.dtype)
        mixer = Mixer("attention", layer, spec, None, ("query", "key", "value"), writes)
        weights = AttentionMixerWeights(sinks=_sinks(given, spec.num_heads))
        call = AttentionCall(given.module, mixer, weights, given.value.shape[-1])
        self.calls.append(call)
        return call.result(self._attend(call, call.tensors(given)), given)

    def _reach(self, given: GivenCall) -> Reach:
        mask = given.mask
        if mask is None and self._looks_ahead and _is_causal(given) is False:
            return Reach(ahead=ALL_AHEAD)
        if not isinstance(mask, Tensor):
            raise ModelLoadError("it calls attention without a causal mask")
        if not self._looks_ahead and given.options.get("is_causal") is False:
            raise ModelLoadError("its tokens attend to later ones: it is no decoder")
        if id(mask) not in self._masks and mask._base is not None:
            mask = mask._base if mask.shape == mask._base.shape else mask
        known = self._masks.get(id(mask))
        if known is None:
            raise ModelLoadError(
                "it makes masks of its own, of position biases or of what tokens attend to"
            )
        # Only now: models also make masks that none of their layers uses.
        if id(mask) not in self._reaches:
            self._reaches[id(mask)] = reach_of(known[1], known[2], self.positions.device)
        return self._reaches[id(mask)]


def _spec(given: GivenCall, reach: Reach) -> AttentionMixerSpec:
    query, key, value = given.query, given.key, given.value
    _refuse_unknown_options(given)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    is_of_step = query.shape[2] == key.shape[2] == value.shape[2]
    if not is_of_step or value.shape[1] != num_kv_heads or query.shape[-1] != key.shape[-1]:
        raise ModelLoadError(
            f"a call of attention has queries {list(query.shape)}, keys {list(key.shape)} and "
            f"values {list(value.shape)}: not one key and value of each head for each token"
        )
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"{num_heads} query heads for {num_kv_heads} key heads")
    wide = max(query.shape[-1], value.shape[-1])
    head_dim = math.ceil(wide / HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
    if head_dim > MAX_HEAD_DIM:
        raise ModelLoadError(f"heads of {wide} elements: more than {MAX_HEAD_DIM}")
    cap = given.options.get("softcap")
    return AttentionMixerSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=query.dtype,
        scale=query.shape[-1] ** -0.5 if given.scaling is None else float(given.scaling),
        window=reach.window,
        cap=None if cap is None else float(cap),
        rotates=None,
        deterministic=False,
        chunk=reach.chunk,
        ahead=reach.ahead,
    )


def _refuse_unknown_options(given: GivenCall) -> None:
    for name, value in given.options.items():
        if isinstance(value, Tensor) and name not in _HARMLESS | {"s_aux"}:
            raise ModelLoadError(f"its attention takes {name}, which ours does not know")


def _is_causal(given: GivenCall) -> Any:
    """What is said of a call that has no mask."""
    return given.options.get("is_causal", getattr(given.module, "is_causal", None))


def _sinks(given: GivenCall, num_heads: int) -> Tensor | None:
    sinks = given.options.get("s_aux")
    if sinks is None:
        return None
    if not any(sinks is one for one in given.module.parameters()):
        raise ModelLoadError("its attention sinks are not the same in every pass")
    if sinks.numel() != num_heads:
        raise ModelLoadError(f"{sinks.numel()} attention sinks for {num_heads} heads")
    logits: Tensor = sinks.detach().reshape(-1).to(torch.float32)
    return logits.contiguous()
