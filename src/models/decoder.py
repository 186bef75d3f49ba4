"""Writes the program of a decoder from its description: one layer after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from src.models.builder import Name, ProgramBuilder
from src.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RecurrenceConfig,
)
from src.models.expert_placements import place_experts
from src.models.latent_decoder import LatentWriter
from src.models.layers import embedding as ends
from src.models.layers.attention import (
    AttentionInSpec,
    AttentionInWeights,
    AttentionMixerSpec,
    AttentionMixerWeights,
    AttentionOutSpec,
    AttentionOutWeights,
    attention_in,
    attention_out,
    scale_attended,
)
from src.models.layers.experts import ExpertsSpec, ExpertsWeights, experts
from src.models.layers.mlp import MLPSpec, MLPWeights, mlp
from src.models.layers.norms import NormSpec
from src.models.program import HIDDEN, INPUT_IDS, LOGITS, POSITIONS, StepTensor
from src.models.recurrence import write_recurrence
from src.models.weights.parameters import Placement, rows_of
from src.models.weights.transforms import InHalves, PartByPart
from src.ops.routing import Routing

RESIDUAL, QUERY, KEY, VALUE, ATTENDED = "residual", "query", "key", "value", "attended"
OUTPUT_GATE = "output_gate"


def write_decoder(builder: ProgramBuilder, config: ModelConfig) -> None:
    """Write the program and the parameters of a decoder."""
    residual = builder.step_tensor(RESIDUAL, config.hidden_size)
    rows = (config.vocab_size, config.hidden_size)
    stored = (Placement(f"{config.embedding_name}.weight"),)
    embedding = builder.parameter("embedding", rows, "embedding", stored)
    # The reference multiplies by a tensor of the model's dtype, so the factor is rounded to it.
    multiplier = float(torch.tensor(config.embedding_multiplier, dtype=builder.dtype))
    builder.segment(
        ends.embed,
        ends.EmbeddingSpec(multiplier),
        ends.EmbeddingWeights(embedding),
        (INPUT_IDS,),
        (residual,),
    )
    for layer in range(len(config.layers)):
        _LayerWriter(builder, config, layer).write()
    norm = _norm(builder, "final_norm", config.hidden_size, config.final_norm_name, config.norm)
    builder.segment(
        ends.final_norm,
        config.norm,
        ends.NormWeights(norm),
        (RESIDUAL,),
        (builder.step_tensor(HIDDEN, config.hidden_size),),
    )
    if config.tie_word_embeddings:
        head = builder.alias("head", of=embedding)
    else:
        head = builder.parameter("head", rows, "head", (Placement(f"{config.head_name}.weight"),))
    builder.head(
        ends.head,
        ends.HeadSpec(config.logit_cap, config.logit_multiplier),
        ends.HeadWeights(head),
        (HIDDEN,),
        (StepTensor(LOGITS, (config.vocab_size,), torch.float32),),
    )


def _norm(builder: ProgramBuilder, name: str, size: int, tensor: str, spec: NormSpec) -> Name:
    return builder.vector(name, size, f"{tensor}.weight", fill=spec.neutral)


class _LayerWriter:
    """Writes one layer."""

    def __init__(self, builder: ProgramBuilder, config: ModelConfig, layer: int) -> None:
        self._builder = builder
        self._config = config
        self._number = layer
        self._layer: LayerConfig = config.layers[layer]
        self._own = f"layers.{layer}."
        self._stored = config.layer_name.format(layer) + "."
        self._hidden = config.hidden_size

    def write(self) -> None:
        if isinstance(self._layer.attention, RecurrenceConfig):
            self._recurrence(self._layer.attention)
            self._feed_forward()
        elif self._layer.parallel:
            # The MLP adds to the residual stream after attention has read it.
            self._attention(self._layer.attention, between=self._feed_forward)
        else:
            self._attention(self._layer.attention)
            self._feed_forward()

    def _feed_forward(self) -> None:
        if isinstance(self._layer.mlp, ExpertsConfig):
            self._experts(self._layer.mlp)
        else:
            self._mlp(self._layer.mlp)

    def _vector(
        self,
        name: str,
        size: int,
        tensor: str | None,
        *,
        fill: float = 0.0,
        shard: int | None = None,
    ) -> Name:
        if tensor is None:
            return None
        return self._builder.vector(
            self._own + name, size, self._stored + tensor, fill=fill, shard=shard
        )

    def _block_norm(self, name: str, tensor: str | None) -> Name:
        suffixed = None if tensor is None else f"{tensor}.weight"
        return self._vector(name, self._hidden, suffixed, fill=self._config.norm.neutral)

    def _matrix(self, name: str, shape: tuple[int, int], placements: tuple[Placement, ...]) -> Name:
        return self._builder.parameter(self._own + name, shape, "matrix", placements)

    def _names(self, names: tuple[str, ...], kind: str) -> list[str]:
        return [f"{self._stored}{name}.{kind}" for name in names]

    def _spec_of(self, tensor: str | None) -> NormSpec | None:
        return None if tensor is None else self._config.norm

    def _fused_bias(self, name: str, size: int, placements: tuple[Placement, ...]) -> Name:
        return self._builder.parameter(self._own + name, (size,), "vector", placements, fill=0.0)

    def _recurrence(self, config: RecurrenceConfig) -> None:
        norm = self._layer.attention_norm
        write_recurrence(
            *(self._builder, self._config, config, self._number),
            (self._spec_of(norm), self._block_norm("input_norm", norm)),
            self._builder.step_tensor(RESIDUAL, self._hidden),
        )

    def _attention(
        self,
        config: AttentionConfig | LatentAttentionConfig,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Write attention; ``between`` writes what is computed before the mixer."""
        if isinstance(config, LatentAttentionConfig):
            self._latent_attention(config, between)
        else:
            self._paged_attention(config, between)

    def _latent_attention(self, config: LatentAttentionConfig, between: Callable[[], None]) -> None:
        layer, trained = self._layer, self._config.max_position_embeddings
        writer = LatentWriter(self._builder, config, self._own, self._stored, self._hidden)
        norm = self._block_norm("input_norm", layer.attention_norm)
        writer.write_in(RESIDUAL, norm, self._spec_of(layer.attention_norm), trained)
        between()
        self._attention_out(config, writer.write_mixer(ATTENDED))

    def _paged_attention(self, config: AttentionConfig, between: Callable[[], None]) -> None:
        builder, dim, norm = self._builder, config.head_dim, self._config.norm
        heads = builder.group.shard(config.num_heads)
        kv_heads = builder.group.shard(config.num_kv_heads)
        rotary_dim = 0 if config.rope is None else config.rotary_dim or dim
        # The kernel supports rotation of whole heads, after a plain norm per head or none.
        leaves_rotation = (
            builder.rotates_in_op
            and rotary_dim == dim
            and not config.rotated_norm
            and config.temperature is None
            and (config.qk_norm is None or (config.qk_norm == "head" and norm.is_plain))
        )
        norms = self._qk_norms(config, heads, kv_heads, rotary_dim)
        rotation = (*norms, self._rope_table(config, rotary_dim))
        spec = AttentionInSpec(
            heads,
            kv_heads,
            dim,
            self._spec_of(self._layer.attention_norm),
            None if config.qk_norm is None else norm,
            config.qk_norm == "whole",
            rotary_dim,
            norm if config.rotated_norm else None,
            config.temperature,
            leaves_rotation,
            config.has_gate,
            builder.deterministic,
        )
        left = rotation if leaves_rotation else (None, None, None)
        self._attention_in(config, spec, (None, None, None) if leaves_rotation else rotation)
        between()
        builder.mixer(
            "attention",
            AttentionMixerSpec(
                heads,
                kv_heads,
                dim,
                builder.dtype,
                dim**-0.5 if config.scale is None else config.scale,
                config.window,
                config.cap,
                norm if leaves_rotation else None,
                builder.deterministic,
                config.chunk,
            ),
            AttentionMixerWeights(left[0], left[1], left[2], self._sinks(config, heads)),
            (QUERY, KEY, VALUE),
            builder.step_tensor(ATTENDED, heads * dim),
        )
        if config.has_gate:
            attended = builder.step_tensor(ATTENDED, heads * dim)
            builder.segment(scale_attended, None, (), (ATTENDED, OUTPUT_GATE), (attended,))
        self._attention_out(config, heads * dim)

    def _sinks(self, config: AttentionConfig, heads: int) -> Name:
        if config.sinks_name is None:
            return None
        return self._builder.parameter(
            self._own + "sinks",
            (heads,),
            "vector",
            (Placement(self._stored + config.sinks_name, shard=0),),
            fill=0.0,
            dtype=torch.float32,
        )

    def _rope_table(self, config: AttentionConfig, rotary_dim: int) -> Name:
        if config.rope is None:
            return None
        trained = self._config.max_position_embeddings
        return self._builder.rope_table(config.rope, rotary_dim, trained)

    def _qk_norms(
        self, config: AttentionConfig, heads: int, kv_heads: int, rotary_dim: int
    ) -> tuple[Name, Name]:
        if config.qk_norm is None:
            return None, None
        dim, whole = config.head_dim, config.qk_norm == "whole"
        by_head = config.qk_norm == "each_head"
        order = None
        if config.interleaved and rotary_dim:
            order = InHalves(dim, rotary_dim, dim=1 if by_head else 0)

        def norm(name: str, count: int, tensor: str) -> Name:
            shape = (count, dim) if by_head else (count * dim,) if whole else (dim,)
            shard = 0 if by_head or whole else None
            return self._builder.parameter(
                self._own + name,
                shape,
                "vector",
                (Placement(f"{self._stored}{tensor}.weight", shard=shard, transform=order),),
                fill=self._config.norm.neutral,
            )

        return (
            norm("q_norm", heads, config.q_norm_name),
            norm("k_norm", kv_heads, config.k_norm_name),
        )

    def _attention_in(
        self, config: AttentionConfig, spec: AttentionInSpec, rotation: tuple[Name, ...]
    ) -> None:
        counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        sizes = [count * spec.head_dim for count in counts]
        gates = sizes[0] if spec.has_gate else 0
        sizes[0] += gates

        def placed(kind: str) -> tuple[Placement, ...]:
            rows = rows_of(self._names(config.qkv_names, kind), sizes)
            if gates:
                by_head = PartByPart(spec.num_heads, (spec.head_dim, spec.head_dim))
                return (replace(rows[0], transform=by_head), *rows[1:])
            if not config.interleaved or not spec.rotary_dim:
                return rows
            # Values, separate or the last rows of one fused tensor, are not rotated.
            heads = spec.num_heads + spec.num_kv_heads if len(rows) == 1 else None
            order = InHalves(spec.head_dim, spec.rotary_dim, heads=heads)
            return (*(replace(each, transform=order) for each in rows[:2]), *rows[2:])

        self._builder.segment(
            attention_in,
            spec,
            AttentionInWeights(
                self._block_norm("input_norm", self._layer.attention_norm),
                self._matrix("qkv_weight", (sum(sizes), self._hidden), placed("weight")),
                self._fused_bias("qkv_bias", sum(sizes), placed("bias"))
                if config.qkv_bias
                else None,
                *rotation,
            ),
            (RESIDUAL, POSITIONS),
            [
                *(
                    self._builder.step_tensor(name, count, spec.head_dim)
                    for name, count in zip((QUERY, KEY, VALUE), counts, strict=True)
                ),
                *((self._builder.step_tensor(OUTPUT_GATE, gates),) if gates else ()),
            ],
        )

    def _attention_out(self, config: AttentionConfig | LatentAttentionConfig, size: int) -> None:
        tensor = f"{self._stored}{config.output_name}"
        self._builder.segment(
            attention_out,
            AttentionOutSpec(
                self._spec_of(self._layer.attention_post_norm),
                self._config.residual_multiplier,
                self._builder.group,
            ),
            AttentionOutWeights(
                self._matrix(
                    "output_weight",
                    (self._hidden, size),
                    (Placement(f"{tensor}.weight", shard=1),),
                ),
                self._vector(
                    "output_bias",
                    self._hidden,
                    f"{config.output_name}.bias" if config.output_bias else None,
                ),
                self._block_norm("attention_post_norm", self._layer.attention_post_norm),
            ),
            (ATTENDED, RESIDUAL),
            (self._builder.step_tensor(RESIDUAL, self._hidden),),
        )

    def _mlp_norm_spec(self) -> NormSpec | None:
        layer = self._layer
        return self._spec_of(layer.attention_norm if layer.parallel else layer.mlp_norm)

    def _mlp_norm(self) -> Name:
        if self._layer.parallel:
            return None if self._layer.attention_norm is None else f"{self._own}input_norm"
        return self._block_norm("post_norm", self._layer.mlp_norm)

    def _mlp(self, config: MLPConfig) -> None:
        layer = self._layer
        self._builder.segment(
            mlp,
            self._mlp_spec(config, self._mlp_norm_spec(), self._spec_of(layer.mlp_post_norm)),
            self._mlp_weights(
                config,
                "",
                self._mlp_norm(),
                self._block_norm("mlp_post_norm", layer.mlp_post_norm),
            ),
            (RESIDUAL,),
            (self._builder.step_tensor(RESIDUAL, self._hidden),),
        )

    def _mlp_spec(
        self, config: MLPConfig, norm: NormSpec | None = None, post_norm: NormSpec | None = None
    ) -> MLPSpec:
        return MLPSpec(
            norm,
            post_norm,
            config.activation,
            self._config.residual_multiplier,
            self._builder.group,
            self._builder.deterministic,
        )

    def _mlp_weights(
        self, config: MLPConfig, own: str, norm: Name = None, post_norm: Name = None
    ) -> MLPWeights:
        """Weights whose parameters' names begin with ``own``."""
        inner = self._builder.group.shard(config.intermediate_size)
        names, sizes = config.gate_up_names, [inner, inner]
        bias = None
        if config.bias:
            rows = rows_of(self._names(names, "bias"), sizes)
            bias = self._fused_bias(f"{own}gate_up_bias", 2 * inner, rows)
        down = Placement(f"{self._stored}{config.down_name}.weight", shard=1)
        return MLPWeights(
            norm,
            self._matrix(
                f"{own}gate_up_weight",
                (2 * inner, self._hidden),
                rows_of(self._names(names, "weight"), sizes),
            ),
            bias,
            self._matrix(f"{own}down_weight", (self._hidden, inner), (down,)),
            self._vector(
                f"{own}down_bias",
                self._hidden,
                f"{config.down_name}.bias" if config.bias else None,
            ),
            post_norm,
        )

    def _experts(self, config: ExpertsConfig) -> None:
        builder, layer, shared = self._builder, self._layer, config.shared
        inner = builder.group.shard(config.intermediate_size)
        placed = place_experts(config, self._stored, inner)
        builder.segment(
            experts,
            ExpertsSpec(
                self._mlp_norm_spec(),
                self._spec_of(layer.mlp_post_norm),
                Routing(
                    config.num_chosen,
                    config.scoring,
                    config.renormalize,
                    config.scale,
                    config.groups,
                    config.chosen_groups,
                    config.groups_ranked_by,
                ),
                config.activation,
                config.weighs_inputs,
                self._config.residual_multiplier,
                builder.group,
                builder.deterministic,
                None if shared is None else self._mlp_spec(shared),
            ),
            ExpertsWeights(
                self._mlp_norm(),
                self._router("router", config.num_experts, config.router_name),
                builder.parameter(
                    self._own + "experts.gate_up",
                    (config.num_experts, 2 * inner, self._hidden),
                    "experts",
                    placed.gate_up,
                ),
                builder.parameter(
                    self._own + "experts.down",
                    (config.num_experts, self._hidden, inner),
                    "experts",
                    placed.down,
                ),
                self._block_norm("mlp_post_norm", layer.mlp_post_norm),
                self._choice_bias(config),
                None if shared is None else self._mlp_weights(shared, "shared."),
                self._router("shared.gate", 1, config.shared_gate_name),
                self._router_bias(config),
                self._expert_biases(
                    "gate_up", (config.num_experts, 2 * inner), placed.gate_up_bias
                ),
                self._expert_biases("down", (config.num_experts, self._hidden), placed.down_bias),
            ),
            (RESIDUAL,),
            (builder.step_tensor(RESIDUAL, self._hidden),),
        )

    def _router(self, name: str, count: int, tensor: str | None) -> Name:
        if tensor is None:
            return None
        placement = Placement(f"{self._stored}{tensor}.weight")
        shape = (count, self._hidden)
        return self._builder.parameter(
            self._own + name, shape, "router", (placement,), dtype=torch.float32
        )

    def _router_bias(self, config: ExpertsConfig) -> Name:
        if not config.router_bias:
            return None
        return self._builder.parameter(
            self._own + "router_bias",
            (config.num_experts,),
            "router",
            (Placement(f"{self._stored}{config.router_name}.bias"),),
            fill=0.0,
            dtype=torch.float32,
        )

    def _expert_biases(
        self, name: str, shape: tuple[int, int], placements: Sequence[Placement]
    ) -> Name:
        if not placements:
            return None
        name = f"{self._own}experts.{name}_bias"
        return self._builder.parameter(name, shape, "vector", placements, fill=0.0)

    def _choice_bias(self, config: ExpertsConfig) -> Name:
        if config.choice_bias_name is None:
            return None
        return self._builder.parameter(
            self._own + "choice_bias",
            (config.num_experts,),
            "router",
            (Placement(self._stored + config.choice_bias_name),),
            fill=0.0,
            dtype=torch.float32,
        )
