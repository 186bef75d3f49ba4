"""The dense decoder: fused parameters, where the checkpoint's tensors go, and the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from src.core.errors import ModelLoadError
from src.distributed import Group
from src.models.config import Fields, ModelConfig, Variant
from src.models.quantization import Method, QuantizedWeight, Weight, plain, quantize
from src.models.regions import (
    EAGER_REGIONS,
    PostAttention,
    PreAttention,
    Regions,
    RegionSpec,
)
from src.models.rope import rope_table
from src.ops.attention_spec import AttentionSpec
from src.ops.host_memory import lazy_zeros
from src.ops.linear import fits_strips, to_strips

# (layer index, query [T, Q, D], key [T, K, D], value [T, K, D]) -> attention output [T, Q D]; with
# `RegionSpec.rotates_in_op` it has queries and keys to normalise and rotate first
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LayerKVSpec(NamedTuple):
    """What one layer keeps per token of context."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # How many tokens a query sees, itself included; None is the whole context.
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape, numerics and placement of a loaded model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    sliding_windows: tuple[int | None, ...]  # one per layer
    max_positions: int  # rows of the RoPE table: no sequence may be longer, in tokens
    dtype: torch.dtype
    device: torch.device

    @property
    def attention_scale(self) -> float:
        """The factor on query-key products."""
        return float(self.head_dim**-0.5)


class Decoder:
    """A dense decoder-only transformer with preallocated, fused parameters, of no value yet.

    A family is a subclass that names its architectures, its defaults for `config.json` and its
    `variant`. A family whose layers compute something else overrides `regions`.

    Attributes:
        config: the checkpoint's configuration.
        spec: shape, numerics and placement.
        region_spec: the static argument of the regions.
        embedding: [V, H].
        head: [V, H]; the embedding itself when tied and not quantized.
        final_norm: [H].
        pre: per layer, the weights up to attention.
        post: per layer, the weights after attention.
        rope_table: float32 [max_positions, D].
    """

    architectures: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[dict[str, Any]] = {}
    regions: ClassVar[Regions] = EAGER_REGIONS

    @classmethod
    def variant(cls, fields: Fields) -> Variant:
        """What this family's `config.json` says about biases, norms and windows."""
        return Variant(sliding_windows=(None,) * fields.integer("num_hidden_layers"))

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        group: Group | None = None,
        deterministic: bool = False,
    ) -> None:
        group = group or Group()
        self.config = config
        self.spec = DecoderSpec(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            sliding_windows=config.variant.sliding_windows,
            max_positions=max_positions,
            dtype=dtype,
            device=device,
        )
        self.region_spec = RegionSpec(
            num_heads=group.shard(config.num_heads),
            num_kv_heads=group.shard(config.num_kv_heads),
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            group=group,
            deterministic=deterministic,
            # Its kernel takes every head_dim and dtype that a configuration may have.
            rotates_in_op=device.type == "cuda",
        )
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.head: Weight = (
            self.embedding
            if config.tie_word_embeddings
            else self._empty(config.vocab_size, config.hidden_size)
        )
        self.final_norm = self._empty(config.hidden_size)
        self.pre = [self._pre_attention() for _ in range(config.num_layers)]
        self.post = [self._post_attention() for _ in range(config.num_layers)]
        self.rope_table = rope_table(
            config.rope, config.head_dim, config.max_position_embeddings, max_positions
        ).to(device)

    def quantize(
        self,
        method: Method,
        group_size: int,
        before_each: Callable[[], None] = lambda: None,
        *,
        rounds_inputs: bool = False,
    ) -> None:
        """Replace the projections' weights by quantized ones, matrix by matrix.

        Each original is freed before the next one is quantized. The head is `int8` in either case:
        its errors go straight into the logits. An embedding that was also the head stays as it is.

        Args:
            method: see `quantization.quantize`.
            group_size: of int4.
            before_each: called before each matrix.
            rounds_inputs: whether inputs of the projections are rounded to 8 bits as well, of those
                whose matrices can be laid out for that.

        Raises:
            ModelLoadError: a matrix cannot be cut into such groups.
        """

        def smaller(weight: Weight) -> QuantizedWeight:
            before_each()
            return quantize(plain(weight), method, group_size, in_strips=rounds_inputs)

        try:
            for _ in self._changed_projections(smaller):
                pass
            self.head = quantize(plain(self.head), "int8", group_size, in_strips=rounds_inputs)
        except ValueError as error:
            raise ModelLoadError(f"quantization = {method!r}: {error}") from None

    def lay_out(
        self,
        lay_out: Callable[[torch.Tensor], torch.Tensor] = to_strips,
        *,
        includes_head: bool = True,
    ) -> Iterator[None]:
        """Lay bfloat16 weights of the projections out in strips.

        One matrix with each step of the iterator; between two of them the model can be used. What
        is quantized or cannot be cut stays as it is, and so does an embedding that is also the
        head.

        Args:
            lay_out: `ops.linear.to_strips`, or `KernelLibrary.lay_out`, which does it in place.
            includes_head: whether the head is laid out, too.
        """

        def in_strips(weight: Weight) -> Weight:
            if isinstance(weight, QuantizedWeight) or not fits_strips(weight):
                return weight
            return lay_out(weight)

        yield from self._changed_projections(in_strips)
        if includes_head and self.head is not self.embedding:
            self.head = in_strips(self.head)
            yield

    def _changed_projections(self, change: Callable[[Weight], Weight]) -> Iterator[None]:
        for layer in range(self.spec.num_layers):
            self.pre[layer] = self.pre[layer]._replace(
                qkv_weight=change(self.pre[layer].qkv_weight)
            )
            yield
            for name in ("output_weight", "gate_up_weight", "down_weight"):
                changed: dict[str, Any] = {name: change(getattr(self.post[layer], name))}
                self.post[layer] = self.post[layer]._replace(**changed)
                yield

    def forward(
        self,
        regions: Regions,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, [T, H] or [K, H] in the model's dtype.

        Args:
            regions: the model's own (`decoder.regions`), or compiled replacements.
            input_ids: int64 [T], below `vocab_size`.
            positions: int64 [T], each token's index in its own sequence, below `max_positions`.
            attend: writes keys and values to the cache and attends, per layer; before that it
                calls `ops.rotate_and_cache` where `region_spec.rotates_in_op` says so.
            kept: int64 [K], the tokens whose hidden states are wanted, of the last layer; its
                attention output [K, Q D] is of these alone. None: all.
        """
        spec, table = self.region_spec, self.rope_table
        query, key, value, residual = regions.first(
            spec, self.embedding, self.pre[0], table, input_ids, positions
        )
        for layer in range(self.spec.num_layers - 1):
            attn_out = attend(layer, query, key, value)
            # Their memory serves what comes next, in a capture too.
            del query, key, value
            query, key, value, residual = regions.middle(
                spec, self.post[layer], self.pre[layer + 1], table, attn_out, residual, positions
            )
        attn_out = attend(self.spec.num_layers - 1, query, key, value)
        if kept is not None:
            residual = residual[kept]
            if not len(kept):
                return residual
        return regions.last(spec, self.post[-1], self.final_norm, attn_out, residual)

    def logits(self, regions: Regions, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary scores, float32 [S, V], of selected rows of hidden states [S, H]."""
        return regions.logits(self.region_spec, self.head, hidden)

    def region_arguments(self, num_tokens: int) -> tuple[tuple[Any, ...] | None, ...]:
        """Arguments of a call of each region, on the model's device, which may be meta.

        Token ids and positions are 0, so that the calls can be made; nothing else has a value.
        All of a region's calls have arguments of these shapes, strides and dtypes, but for the
        number of tokens. None stands for a region that this depth never calls.
        """
        spec, table, config = self.region_spec, self.rope_table, self.spec
        ids, positions = (
            torch.zeros(num_tokens, dtype=torch.int64, device=config.device) for _ in range(2)
        )
        attn_out = self._empty(num_tokens, spec.num_heads * spec.head_dim)
        hidden = self._empty(num_tokens, config.hidden_size)
        return (
            (spec, self.embedding, self.pre[0], table, ids, positions),
            (spec, self.post[0], self.pre[-1], table, attn_out, hidden, positions)
            if config.num_layers > 1
            else None,
            (spec, self.post[-1], self.final_norm, attn_out, hidden),
            (spec, self.head, hidden),
        )

    def calls(self, regions: Regions) -> list[tuple[Any, tuple[Any, ...]]]:
        """The regions that `forward` calls, in order, and the head, with their arguments.

        Those that count tokens are None: all calls' others are the same in every step.
        """
        spec, table = self.region_spec, self.rope_table
        middles = [
            (regions.middle, (spec, self.post[layer], self.pre[layer + 1], table, *(None,) * 3))
            for layer in range(self.spec.num_layers - 1)
        ]
        return [
            (regions.first, (spec, self.embedding, self.pre[0], table, None, None)),
            *middles,
            (regions.last, (spec, self.post[-1], self.final_norm, None, None)),
            (regions.logits, (spec, self.head, None)),
        ]

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """How each layer attends, in layer order."""
        return tuple(
            AttentionSpec(self.spec.attention_scale, window=window)
            for window in self.spec.sliding_windows
        )

    def kv_cache_spec(self) -> tuple[LayerKVSpec, ...]:
        """What each layer keeps per token, in layer order, so that memory is planned by group."""
        return tuple(
            LayerKVSpec(self.region_spec.num_kv_heads, self.spec.head_dim, self.spec.dtype, window)
            for window in self.spec.sliding_windows
        )

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every distinct fused parameter by name; a tied head is the embedding and not repeated.

        A quantized one is two tensors, ``<name>.values`` and ``<name>.scales``.
        """
        named: dict[str, Weight] = {"embedding": self.embedding, "final_norm": self.final_norm}
        if self.head is not self.embedding:
            named["head"] = self.head
        for layer, (pre, post) in enumerate(zip(self.pre, self.post, strict=True)):
            for name, value in (pre._asdict() | post._asdict()).items():
                if value is not None:
                    named[f"layers.{layer}.{name}"] = value
        tensors: dict[str, torch.Tensor] = {}
        for name, value in named.items():
            if isinstance(value, QuantizedWeight):
                tensors |= {f"{name}.values": value.values, f"{name}.scales": value.scales}
            else:
                tensors[name] = value
        return tensors

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes: its name to a contiguous view of a parameter."""
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if self.head is not self.embedding:
            views["lm_head.weight"] = plain(self.head)
        for layer, (pre, post) in enumerate(zip(self.pre, self.post, strict=True)):
            for name, view in (self._pre_views(pre) | self._post_views(post)).items():
                if view is not None:
                    views[f"model.layers.{layer}.{name}"] = view
        return views

    def _pre_views(self, pre: PreAttention) -> dict[str, torch.Tensor | None]:
        rows = [n * self.spec.head_dim for n in self._qkv_heads()]
        views: dict[str, torch.Tensor | None] = {
            "input_layernorm.weight": pre.input_norm,
            "self_attn.q_norm.weight": pre.q_norm,
            "self_attn.k_norm.weight": pre.k_norm,
        }
        for kind, fused in (("weight", pre.qkv_weight), ("bias", pre.qkv_bias)):
            if fused is not None:
                for name, view in zip("qkv", plain(fused).split(rows), strict=True):
                    views[f"self_attn.{name}_proj.{kind}"] = view
        return views

    def _post_views(self, post: PostAttention) -> dict[str, torch.Tensor | None]:
        views: dict[str, torch.Tensor | None] = {
            "self_attn.o_proj.weight": plain(post.output_weight),
            "self_attn.o_proj.bias": post.output_bias,
            "post_attention_layernorm.weight": post.post_norm,
            "mlp.down_proj.weight": plain(post.down_weight),
            "mlp.down_proj.bias": post.down_bias,
        }
        for kind, fused in (("weight", post.gate_up_weight), ("bias", post.gate_up_bias)):
            if fused is not None:
                gate, up = plain(fused).chunk(2)
                views |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
        return views

    def _qkv_heads(self) -> tuple[int, int, int]:
        return (
            self.region_spec.num_heads,
            self.region_spec.num_kv_heads,
            self.region_spec.num_kv_heads,
        )

    def _pre_attention(self) -> PreAttention:
        variant, head_dim = self.config.variant, self.spec.head_dim
        rows = sum(self._qkv_heads()) * head_dim
        return PreAttention(
            input_norm=self._empty(self.spec.hidden_size),
            qkv_weight=self._empty(rows, self.spec.hidden_size),
            qkv_bias=self._empty(rows) if variant.qkv_bias else None,
            q_norm=self._empty(head_dim) if variant.qk_norm else None,
            k_norm=self._empty(head_dim) if variant.qk_norm else None,
        )

    def _post_attention(self) -> PostAttention:
        variant, group = self.config.variant, self.region_spec.group
        hidden, inner = self.spec.hidden_size, group.shard(self.spec.intermediate_size)
        return PostAttention(
            output_weight=self._empty(hidden, self.region_spec.num_heads * self.spec.head_dim),
            output_bias=self._empty(hidden) if variant.output_bias else None,
            post_norm=self._empty(hidden),
            gate_up_weight=self._empty(2 * inner, hidden),
            gate_up_bias=self._empty(2 * inner) if variant.mlp_bias else None,
            down_weight=self._empty(hidden, inner),
            down_bias=self._empty(hidden) if variant.mlp_bias else None,
        )

    def _empty(self, *shape: int) -> torch.Tensor:
        if self.spec.device.type == "cpu":
            return lazy_zeros(shape, self.spec.dtype)
        return torch.empty(shape, dtype=self.spec.dtype, device=self.spec.device)
