"""Attention backends that own a group of layers: its pages, prefill and decode, latents too.

Layers of a group share block tables (`kv_groups`). A backend that owns a group computes everything
of it: it writes keys and values, in a layout of its own within a block's bytes, and attends. A
backend says what it honours, and is never given a group with a layer that it does not. Other groups
are computed by the ops, which is also what a library that only attends to prompts belongs to
(`ops.attention.libraries`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from src.engine.execution.inputs import AttentionRows
from src.engine.execution.kv_groups import KVGroupSpec
from src.ops.attention.spec import AttentionSpec


class LayerShape(NamedTuple):
    """What a layer asks of attention.

    Attributes
    ----------
    is_latent
        Whether it is latent attention: one vector per token and no values; ``head_dim`` is that of
        queries.
    value_dim
        Elements of a head's output.
    dtype, cache_dtype
        Of queries, and of what is cached.
    features
        See `AttentionSpec.features`.
    rotates
        Whether it leaves rotation to attention.
    deterministic
        Whether a token's result must be the same bits in every batch.
    """

    is_latent: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    features: frozenset[str]
    rotates: bool
    deterministic: bool


@dataclass(frozen=True, kw_only=True)
class Honours:
    """What a backend computes as the reference does.

    Attributes
    ----------
    device_types
        Where it runs.
    features
        Masks, caps and sinks: fields of `AttentionSpec` beside the scale.
    dtypes, cache_dtypes
        Of queries, and of what is cached.
    head_dims
        Elements of a head; ``None``: any.
    latent
        Whether it computes latent attention.
    rotates
        Whether it rotates queries and keys where a layer leaves it to attention.
    deterministic
        Whether a token's result is the same bits in every batch.
    captured
        Whether its kernels can be captured in a graph.
    """

    device_types: frozenset[str]
    features: frozenset[str]
    dtypes: frozenset[torch.dtype]
    cache_dtypes: frozenset[torch.dtype]
    head_dims: frozenset[int] | None = None
    latent: bool = False
    rotates: bool = False
    deterministic: bool = False
    captured: bool = False

    def refusal(self, layer: LayerShape, device_type: str) -> str | None:
        """Why a layer cannot be served, for the log; ``None``: it can."""
        lacking = sorted(layer.features - self.features)
        heads = {layer.head_dim, layer.value_dim}
        reasons = {
            f"runs on {', '.join(sorted(self.device_types))}": device_type not in self.device_types,
            f"has no {', '.join(lacking)}": bool(lacking),
            f"does not take queries in {layer.dtype}": layer.dtype not in self.dtypes,
            f"does not read a cache in {layer.cache_dtype}": layer.cache_dtype
            not in self.cache_dtypes,
            f"does not take heads of {layer.head_dim}": self.head_dims is not None
            and not heads <= self.head_dims,
            "has no latent attention": layer.is_latent and not self.latent,
            "does not rotate": layer.rotates and not self.rotates,
            "is not deterministic": layer.deterministic and not self.deterministic,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


class Rotation(NamedTuple):
    """How queries and keys are rotated, see `ops.rotate_and_cache`.

    Attributes
    ----------
    q_norm, k_norm
        [D], weights of norms of each head; ``None``: not normalized.
    eps
        Of the norms.
    table
        float32 [positions, D], cosines and sines.
    positions
        [T] int64.
    """

    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    table: Tensor
    positions: Tensor


class AttentionCall(NamedTuple):
    """One layer's attention in a step.

    Attributes
    ----------
    query, key, value
        [T, heads, head_dim]. Key and value are ``None`` if they are written already; of latent
        attention ``key`` is the vectors [T, rank + rope] and there is no value.
    pages
        What `GroupAttention.pages` made of the layer's memory.
    rows
        Lengths, and tables and slots of all groups.
    metadata
        What `GroupAttention.prepare` made of the rows.
    out
        [T, heads, value_dim]; tokens behind those of rows are padding, whose output is zeros.
    spec
        Scale and modifiers of the scores.
    rotation
        What is to be done to queries and keys first; ``None``: nothing.
    up
        Of latent attention: its projection [heads, nope + value, rank].
    deterministic
        See `LayerShape`.
    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    pages: Any
    rows: AttentionRows
    metadata: Any
    out: Tensor
    spec: AttentionSpec
    rotation: Rotation | None = None
    up: Tensor | None = None
    deterministic: bool = False


class GroupAttention:
    """A backend for one group of layers. A subclass fills in the doors that it uses.

    Parameters
    ----------
    number
        The group's, by which rows have its block tables and slots.
    group
        Its layers and blocks.

    Attributes
    ----------
    name
        For the log.
    honours
        What it computes.
    """

    name: ClassVar[str]
    honours: ClassVar[Honours]

    def __init__(self, number: int, group: KVGroupSpec) -> None:
        self.number = number
        self.group = group

    def pages(self, kept: Sequence[Tensor]) -> Any:
        """A layer's memory as the backend lays it out: by default [blocks, block_size, ...].

        ``kept`` are the layer's tensors, contiguous, filled with zeros. Another layout is a view of
        them, or of their bytes: a block's bytes are its own.
        """
        return tuple(kept)

    def prepare(self, rows: AttentionRows, lengths_b: np.ndarray | None) -> Any:
        """Metadata of a step's rows, once for layers of the group that are alike.

        Parameters
        ----------
        lengths_b
            See `StepInputs`.
        """
        return None

    def attend(self, call: AttentionCall) -> None:
        """Write the keys and values of the step's tokens, and attend."""
        raise NotImplementedError

    def attend_latent(self, call: AttentionCall) -> None:
        """The same for latent attention."""
        raise NotImplementedError


BACKENDS: dict[str, type[GroupAttention]] = {}
"""Name -> a backend that owns groups, in order of preference. There is none in this release: what
is here serves every group that it honours, on any device."""


def find_backends(
    shapes: Mapping[int, LayerShape], groups: Sequence[KVGroupSpec], device_type: str
) -> tuple[dict[int, GroupAttention], list[str]]:
    """The backends of groups, by number, and why others do not serve one.

    Parameters
    ----------
    shapes
        Layer -> what it asks of attention.
    """
    found: dict[int, GroupAttention] = {}
    passed_over: list[str] = []
    for number, group in enumerate(groups):
        if not group.layers:
            continue
        for name, kind in BACKENDS.items():
            reasons = [kind.honours.refusal(shapes[layer], device_type) for layer in group.layers]
            if not any(reasons):
                found[number] = kind(number, group)
                break
            reason = next(reason for reason in reasons if reason)
            passed_over.append(f"{name} {reason}")
    return found, list(dict.fromkeys(passed_over))
