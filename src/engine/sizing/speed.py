"""How fast a model can be on a device: what its memory's bandwidth and its arithmetic allow.

A step reads every weight that it needs and the keys and values of its rows, and multiplies every
token with every weight. It takes no less than the longer of the two (S. Williams, A. Waterman, D.
Patterson, "Roofline", CACM 2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from src.core.blocks import most_seen
from src.engine.sizing.device_table import DeviceDescription
from src.engine.sizing.weight_parts import links_of
from src.models import LayerKVSpec, Model, ServedModel

# Share of the bandwidth that one stream has reached, by the format of weights: the newest line of
# each format in benchmarks/results/decode_bandwidth.jsonl (0.35 B parameters, two CPUs of an EPYC).
DECODE_SHARE_ON_CPU: Final = {"bfloat16": 0.98, "int8": 0.73, "int4": 0.68}
# Share of the arithmetic that a prompt has reached: 579 tokens per second of a prompt of 2,048 with
# 0.35 B parameters (benchmarks/results/peers.jsonl), each 0.667 GFLOP, on two cores that do 221
# GFLOP/s each (benchmarks/results/suites.jsonl), both of the same day.
PREFILL_SHARE_ON_CPU: Final = {"bfloat16": 0.87}


class Speed(msgspec.Struct, frozen=True):
    """What a device allows for one batch, and what our benchmarks say is reached of it.

    Attributes
    ----------
    rows, context
        Requests at once, and the tokens that each has behind it.
    seconds_per_token
        The least time between two tokens of a request.
    bound
        What takes longer: ``memory`` or ``arithmetic``.
    share
        Share of the limit that our benchmarks have reached on such a device with such weights; null
        where there are none.
    """

    rows: int
    context: int
    seconds_per_token: float
    bound: str
    share: float | None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all rows together."""
        return self.rows / self.seconds_per_token


class PrefillSpeed(msgspec.Struct, frozen=True):
    """The most prompt tokens per second, for prompts of ``context`` tokens; see `Speed`."""

    context: int
    tokens_per_second: float
    bound: str
    share: float | None


class TextSpeed(msgspec.Struct, frozen=True):
    """The most texts per second of which each becomes a vector, labels or a score.

    Attributes
    ----------
    tokens
        Of each text.
    rows_per_step
        Texts that a step computes at once.
    texts_per_second
        What the device allows.
    bound
        What takes longer: ``memory`` or ``arithmetic``.
    """

    tokens: int
    rows_per_step: int
    texts_per_second: float
    bound: str


@dataclass(frozen=True)
class _Layer:
    """A layer's memory of a sequence: bytes, and the operations of a token that meets one key."""

    window: int | None
    bytes_per_token: int
    bytes_per_row: int
    flops_per_key: int

    def keys(self, context: int) -> int:
        """Keys that a token meets which has ``context`` tokens behind it."""
        return min(context, self.window or context)


class Work:
    """Bytes and operations of a model's steps, from its outline.

    Parameters
    ----------
    model
        A program, or a model of which every weight but the embedding is used for each token.
    """

    def __init__(self, model: ServedModel) -> None:
        # Bytes and elements of weights that every token needs, and of the head, which only tokens
        # that are followed by a sampled one need.
        self._bytes = self._elements = self._head_bytes = self._head_elements = 0
        # (bytes, elements, share of it that a token needs) of experts
        self._experts: list[tuple[int, int, float]] = []
        if isinstance(model, Model):
            self._take_program(model)
        else:
            for name, tensor in model.parameters().items():
                if "embed" not in name:
                    self._bytes += tensor.nbytes
                    self._elements += tensor.numel()
        self._layers = [
            _layer_of(layer, getattr(mixer.spec, "num_heads", 1))
            for layer, mixer in zip(model.kv_cache_spec(), model.mixers, strict=True)
        ]

    def _take_program(self, model: Model) -> None:
        shares = _expert_shares(model)
        for name, parameter in model.table.items():
            taken, elements = model.weights[name].nbytes, math.prod(parameter.shape)
            if parameter.kind == "head":
                self._head_bytes, self._head_elements = taken, elements
            elif parameter.kind == "experts":
                self._experts.append((taken, elements, shares[name]))
            elif parameter.kind != "embedding":
                self._bytes += taken
                self._elements += elements if parameter.kind != "vector" else 0
        if not self._head_bytes:
            # A tied head reads the embedding.
            tied = [one for one in model.table.values() if one.kind == "embedding"]
            self._head_bytes = sum(model.weights[one.name].nbytes for one in tied)
            self._head_elements = sum(math.prod(one.shape) for one in tied)

    def bytes_of_step(
        self, rows: int, tokens: int, context: int, *, has_head: bool = True
    ) -> float:
        """Bytes that a step of ``tokens`` tokens of ``rows`` requests reads.

        Without ``has_head`` the head for text is left out.
        """
        # A token takes some experts; many tokens take all.
        experts = sum(taken * (1 - (1 - share) ** tokens) for taken, _, share in self._experts)
        kept = sum(
            layer.bytes_per_row + layer.bytes_per_token * layer.keys(context)
            for layer in self._layers
        )
        head = self._head_bytes if has_head else 0
        return self._bytes + head + experts + rows * kept

    def flops_of_step(self, rows: int, tokens: int, context: int) -> float:
        """Operations of a step; every token meets ``context`` keys, and ``rows`` are sampled."""
        experts = sum(elements * share for _, elements, share in self._experts)
        attention = sum(layer.flops_per_key * layer.keys(context) for layer in self._layers)
        weights = 2 * (self._elements + experts)
        return tokens * (weights + attention) + 2 * rows * self._head_elements


def decode_speed(
    work: Work, device: DeviceDescription, dtype: str, weights: str, rows: int, context: int
) -> Speed | None:
    """The speed of ``rows`` requests that decode; ``None`` if the device's rate is not known.

    Parameters
    ----------
    dtype, weights
        The model's dtype, and the format of its weights: the same, ``int8`` or ``int4``.
    """
    rate = device.flops.get(dtype)
    if not rate:
        return None
    memory = work.bytes_of_step(rows, rows, context) / device.bandwidth
    arithmetic = work.flops_of_step(rows, rows, context) / rate
    bound = "memory" if memory >= arithmetic else "arithmetic"
    shares = DECODE_SHARE_ON_CPU if bound == "memory" else PREFILL_SHARE_ON_CPU
    share = shares.get(weights) if device.kind == "cpu" else None
    return Speed(rows, context, max(memory, arithmetic), bound, share)


def prefill_speed(
    work: Work, device: DeviceDescription, dtype: str, weights: str, context: int, chunk: int
) -> PrefillSpeed | None:
    """The speed of a prompt of ``context`` tokens that comes in pieces of ``chunk`` tokens."""
    rate = device.flops.get(dtype)
    if not rate:
        return None
    chunk = min(chunk, context)
    # On the mean a token meets half of the prompt.
    memory = work.bytes_of_step(1, chunk, context // 2) / device.bandwidth
    arithmetic = work.flops_of_step(1, chunk, max(1, context // 2)) / rate
    bound = "memory" if memory > arithmetic else "arithmetic"
    shares = DECODE_SHARE_ON_CPU if bound == "memory" else PREFILL_SHARE_ON_CPU
    share = shares.get(weights) if device.kind == "cpu" else None
    return PrefillSpeed(context, chunk / max(memory, arithmetic), bound, share)


def text_speed(
    work: Work,
    device: DeviceDescription,
    dtype: str,
    tokens: int,
    *,
    budget: int,
    most_rows: int,
    sees_all: bool,
) -> TextSpeed | None:
    """The speed of texts of ``tokens`` tokens that end without the head for text.

    Parameters
    ----------
    budget, most_rows
        The most tokens and requests of a step. Only texts whose tokens do not see later ones may be
        longer than the budget: they take several steps.
    sees_all
        Whether a token sees the whole text, or what is before it.
    """
    rate = device.flops.get(dtype)
    if not rate:
        return None
    rows = max(1, min(most_rows, budget // tokens))
    computed = min(budget, rows * tokens)
    # On the mean a token that sees earlier ones meets half of the text.
    keys = tokens if sees_all else max(1, tokens // 2)
    memory = work.bytes_of_step(rows, computed, keys, has_head=False) / device.bandwidth
    # No row is sampled.
    arithmetic = work.flops_of_step(0, computed, keys) / rate
    bound = "memory" if memory > arithmetic else "arithmetic"
    return TextSpeed(tokens, rows, computed / tokens / max(memory, arithmetic), bound)


def _layer_of(layer: LayerKVSpec, num_heads: int) -> _Layer:
    """``num_heads``: of queries."""
    taken = sum(tensor.nbytes for tensor in layer.tensors)
    window = None if layer.window is None else most_seen(layer.window)
    if layer.per == "sequence":
        return _Layer(window, 0, taken, 0)
    # A query is multiplied with the keys, and its weights with the values. A layer that keeps one
    # tensor has both in it.
    twice = 2 if len(layer.tensors) == 1 else 1
    flops = 0
    for tensor in layer.tensors:
        heads = tensor.shape[0] if len(tensor.shape) > 1 else 1
        flops += 2 * twice * (num_heads // heads) * math.prod(tensor.shape)
    return _Layer(window, taken, 0, flops)


def _expert_shares(model: Model) -> dict[str, float]:
    """Parameter of experts -> share of the experts that one token is given to."""
    return {
        name: link.spec.routing.chosen / model.table[name].shape[0]
        for link, names in links_of(model)
        for name in names
        if model.table[name].kind == "experts"
    }
