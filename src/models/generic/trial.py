"""Shows that a model can be served by our attention, or says why not.

transformers computes a short sequence its own way. Then its attention calls are recorded over the
same sequence, and at last the sequence comes in pieces, beside another one, as in the engine. All
three have to agree. So state of its own, positions that are counted from a cache, a bias that our
attention is not told of, and whatever else lets tokens meet outside attention is found at load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from src.core.errors import ModelLoadError
from src.models.generic.body import Body, base_called
from src.models.generic.passes import IMPLEMENTATION, AttentionCall, StepPass
from src.models.generic.positions import position_limit
from src.models.generic.recording import Recording
from src.models.program import Mixer
from src.ops import paged_attention

_LENGTH = 7
# Tokens of the one beside it, which come first, and of the sequence, step by step.
_PIECES = ((2, 1), (1, 2), (2, 2), (1, 2))
_BLOCK_SIZE = 16
# Allowed error relative to the norm of a token's logits: of the worst token in 32 bits, of the
# median token in 16 bits, where rounding may change a token's experts.
_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_OF_16_BITS = 0.25
# An error so much smaller than the tolerance is rounding for certain.
CERTAINLY = 0.1


@dataclass(frozen=True)
class Findings:
    """What a trial has shown.

    Attributes
    ----------
    vocab_size
        Tokens that have an embedding and a logit.
    """

    calls: tuple[AttentionCall, ...]
    hidden_size: int
    vocab_size: int


@torch.inference_mode()
def try_out(module: Any, device: torch.device) -> tuple[Body, Findings]:
    """Record a model's attention calls, and hold what they give against transformers' own.

    ``module`` is filled, in evaluation mode, with our attention.

    Raises
    ------
    ModelLoadError
        It cannot be served this way; the message says what stands against it.
    """
    ids = trial_ids(module, device)
    wanted, base = _own_logits(module, ids)
    body = Body(module, base)
    best = math.inf
    for first in first_positions(module.config):
        body.first_position = first
        recorded, hidden = _record(body, ids)
        error = error_of(body.logits(hidden), wanted, hidden.dtype)
        # By rounding alone another number is not taken.
        if error < best / 2:
            best, chosen, calls = error, first, tuple(recorded.calls)
        if best <= CERTAINLY * tolerance_of(hidden.dtype):
            break
    if best > tolerance_of(hidden.dtype):
        raise ModelLoadError(
            "with our attention it does not give what it gives with its own: its scores, masks or "
            "positions depend on something that attention functions are not told of"
        )
    body.first_position = chosen
    if not calls:
        raise ModelLoadError("it calls no attention function")
    # How far rounding takes this model is known by now.
    most = min(tolerance_of(hidden.dtype), max(CERTAINLY * tolerance_of(hidden.dtype), 3 * best))
    if error_of(_in_pieces(body, ids, calls), wanted, hidden.dtype) > most:
        raise ModelLoadError(
            "a sequence in pieces does not get what it gets as a whole: its tokens meet outside "
            "attention, in a recurrent state, a convolution or positions counted from a cache"
        )
    vocab_size = min(wanted.shape[1], num_embeddings(module))
    return body, Findings(calls, hidden.shape[1], vocab_size)


def num_embeddings(module: Any) -> int:
    """Tokens that have an embedding."""
    return int(module.get_input_embeddings().weight.shape[0])


def trial_ids(module: Any, device: torch.device) -> Tensor:
    """Distinct tokens, none of which is padding, which some models treat apart."""
    count = num_embeddings(module)
    step = max(1, count // (_LENGTH + 2))
    padding = getattr(module.config, "pad_token_id", None)
    ids = [(one * step + 1) % count for one in range(1, _LENGTH + 2)]
    ids = [one for one in ids if one != padding][:_LENGTH]
    return torch.tensor(ids, dtype=torch.int64, device=device)


def _own_logits(module: Any, ids: Tensor) -> tuple[Tensor, nn.Module]:
    """What transformers gives, float32 [T, V], and the base model that it has called."""
    module.set_attn_implementation("eager")
    try:
        with base_called(module) as called:
            logits: Tensor = module(input_ids=ids.unsqueeze(0), use_cache=False).logits
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    return logits[0].float(), called[0]


def first_positions(config: Any) -> tuple[int, ...]:
    """Numbers that a model's first position may have: 0, or that behind the padding token's."""
    padding = getattr(config, "pad_token_id", None)
    # Learned positions have an end.
    most = position_limit(config.get_text_config())[0]
    if padding is None or padding < 0 or padding + 1 + _LENGTH > most:
        return (0,)
    return 0, int(padding) + 1


def _record(body: Body, ids: Tensor) -> tuple[Recording, Tensor]:
    memory = SmallMemory(ids.device)
    positions, mix = memory.step((len(ids), 0))
    recording = Recording(
        positions + body.first_position, lambda call, given: mix(call.mixer, given, call)
    )
    return recording, body.hidden(ids, recording)


def _in_pieces(body: Body, ids: Tensor, calls: Sequence[AttentionCall]) -> Tensor:
    """Logits of the sequence, in pieces behind its own reverse."""
    memory = SmallMemory(ids.device)
    beside, found = ids.flip(0), []
    done = [0, 0]
    for counts in _PIECES:
        positions, attend = memory.step(counts)
        parts = [
            one[start : start + count]
            for one, start, count in zip((beside, ids), done, counts, strict=True)
        ]
        done = [start + count for start, count in zip(done, counts, strict=True)]

        def mix(mixer: Mixer, given: Sequence[Tensor], attend: Any = attend) -> Tensor:
            out: Tensor = attend(mixer, given, calls[mixer.layer])
            return out

        step = StepPass(calls, positions + body.first_position, mix, None)
        hidden = body.hidden(torch.cat(parts), step)
        step.finish()
        found.append(hidden[counts[0] :])
    return body.logits(torch.cat(found))


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest error that counts as rounding."""
    return _TOLERANCES.get(dtype, _TOLERANCE_OF_16_BITS)


def error_of(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """How far logits are from those of transformers; what is no number is infinitely far."""
    errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
    errors = errors.nan_to_num(nan=math.inf)
    return float(errors.max() if dtype in _TOLERANCES else errors.median())


class SmallMemory:
    """Keys and values of two short sequences, with a block for each, and the op that serves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths = [0, 0]

    def step(self, counts: tuple[int, int]) -> tuple[Tensor, Any]:
        """Positions of the next tokens of both, one sequence behind the other, and a mixer."""
        rows = [row for row in (0, 1) if counts[row]]
        starts = list(self._lengths)
        self._lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = [starts[row] + i for row in rows for i in range(counts[row])]
        slots = [row * _BLOCK_SIZE + starts[row] + i for row in rows for i in range(counts[row])]
        ends = [sum(counts[row] for row in rows[: i + 1]) for i in range(len(rows))]

        def on_device(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        tables = on_device([[row] for row in rows], torch.int32)
        first_tokens = on_device([0, *ends], torch.int32)
        lengths = on_device([self._lengths[row] for row in rows], torch.int32)
        slot_mapping = on_device(slots, torch.int64)

        def mix(mixer: Mixer, given: Sequence[Tensor], call: AttentionCall) -> Tensor:
            query, key, value = given
            if mixer.layer not in self._layers:
                shape = (2, _BLOCK_SIZE, *key.shape[1:])
                self._layers[mixer.layer] = key.new_zeros(shape), key.new_zeros(shape)
            out = query.new_empty(query.shape)
            paged_attention(
                *(query, key, value, *self._layers[mixer.layer]),
                *(tables, first_tokens, lengths, slot_mapping, out),
                mixer.spec.attention(call.weights),
                max(counts),
                max(self._lengths),
            )
            return out.flatten(1)

        return on_device(positions, torch.int64), mix
