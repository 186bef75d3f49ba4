"""Writes attention over keys and values, and the output projection of attention of any kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from src.models.builder import Name
from src.models.config import AttentionConfig, LatentAttentionConfig
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
from src.models.parts.layer import RESIDUAL, LayerWriter
from src.models.program import POSITIONS, ROPE_POSITIONS, StepInput, StepTensor
from src.models.weights.parameters import Placement, rows_of
from src.models.weights.transforms import InHalves, PartByPart

QUERY, KEY, VALUE, ATTENDED = "query", "key", "value", "attended"
OUTPUT_GATE = "output_gate"
# Time, height and width.
ROPE_AXES = 3


def write_attention(
    layer: LayerWriter,
    config: AttentionConfig,
    between: Callable[[], None] = lambda: None,
    reads: StepTensor | None = None,
) -> None:
    """Write attention over keys and values; see `PartWriter`.

    ``reads`` is what it projects; None: the residual stream.
    """
    builder, dim, norm = layer.builder, config.head_dim, layer.model.norm
    heads = builder.group.shard(config.num_heads)
    kv_heads = builder.group.shard(config.num_kv_heads)
    rotary_dim = 0 if config.rope is None else config.rotary_dim or dim
    # The kernel supports rotation of whole heads, after a plain norm per head or none.
    leaves_rotation = (
        builder.rotates_in_op
        and rotary_dim == dim
        and not config.rotated_norm
        and config.temperature is None
        and not config.sections
        and (config.qk_norm is None or (config.qk_norm == "head" and norm.is_plain))
    )
    norms = _qk_norms(layer, config, heads, kv_heads, rotary_dim)
    rotation = (*norms, _rope_table(layer, config, rotary_dim))
    spec = AttentionInSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        norm=layer.norm_spec(layer.config.attention_norm),
        qk_norm=None if config.qk_norm is None else norm,
        whole=config.qk_norm == "whole",
        rotary_dim=rotary_dim,
        rotated_norm=norm if config.rotated_norm else None,
        temperature=config.temperature,
        leaves_rotation=leaves_rotation,
        has_gate=config.has_gate,
        deterministic=builder.deterministic,
        sections=config.sections,
    )
    left = rotation if leaves_rotation else (None, None, None)
    rotates = (None, None, None) if leaves_rotation else rotation
    _attention_in(layer, config, spec, rotates, reads or layer.residual)
    between()
    builder.mixer(
        "attention",
        AttentionMixerSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            dtype=builder.dtype,
            scale=dim**-0.5 if config.scale is None else config.scale,
            window=config.window,
            cap=config.cap,
            rotates=norm if leaves_rotation else None,
            deterministic=builder.deterministic,
            chunk=config.chunk,
            ahead=config.ahead,
        ),
        AttentionMixerWeights(
            q_norm=left[0],
            k_norm=left[1],
            rope_table=left[2],
            sinks=_sinks(layer, config, heads),
        ),
        (QUERY, KEY, VALUE),
        builder.step_tensor(ATTENDED, heads * dim),
    )
    if config.has_gate:
        attended = builder.step_tensor(ATTENDED, heads * dim)
        builder.segment(scale_attended, None, (), (ATTENDED, OUTPUT_GATE), (attended,))
    write_attention_out(layer, config, heads * dim)


def _positions(layer: LayerWriter) -> str:
    """The step input of positions with axes, which all layers share."""
    return layer.builder.step_input(
        StepInput(
            StepTensor(ROPE_POSITIONS, (ROPE_AXES,), torch.int64),
            beyond="onwards",
            below=layer.builder.max_positions,
        )
    ).name


def _sinks(layer: LayerWriter, config: AttentionConfig, heads: int) -> Name:
    if config.sinks_name is None:
        return None
    return layer.builder.parameter(
        layer.own + "sinks",
        (heads,),
        "vector",
        (Placement(layer.stored + config.sinks_name, shard=0),),
        fill=0.0,
        dtype=torch.float32,
    )


def _rope_table(layer: LayerWriter, config: AttentionConfig, rotary_dim: int) -> Name:
    if config.rope is None:
        return None
    trained = layer.model.max_position_embeddings
    return layer.builder.rope_table(config.rope, rotary_dim, trained)


def _qk_norms(
    layer: LayerWriter, config: AttentionConfig, heads: int, kv_heads: int, rotary_dim: int
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
        return layer.builder.parameter(
            layer.own + name,
            shape,
            "vector",
            (Placement(f"{layer.stored}{tensor}.weight", shard=shard, transform=order),),
            fill=layer.model.norm.neutral,
        )

    return (
        norm("q_norm", heads, config.q_norm_name),
        norm("k_norm", kv_heads, config.k_norm_name),
    )


def _attention_in(
    layer: LayerWriter,
    config: AttentionConfig,
    spec: AttentionInSpec,
    rotation: tuple[Name, ...],
    reads: StepTensor,
) -> None:
    counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    sizes = [count * spec.head_dim for count in counts]
    gates = sizes[0] if spec.has_gate else 0
    sizes[0] += gates

    def placed(kind: str) -> tuple[Placement, ...]:
        rows = rows_of(layer.names(config.qkv_names, kind), sizes)
        if gates:
            by_head = PartByPart(spec.num_heads, (spec.head_dim, spec.head_dim))
            return (replace(rows[0], transform=by_head), *rows[1:])
        if not config.interleaved or not spec.rotary_dim:
            return rows
        # Values, separate or the last rows of one fused tensor, are not rotated.
        heads = spec.num_heads + spec.num_kv_heads if len(rows) == 1 else None
        order = InHalves(spec.head_dim, spec.rotary_dim, heads=heads)
        return (*(replace(each, transform=order) for each in rows[:2]), *rows[2:])

    q_norm, k_norm, rope_table = rotation
    layer.builder.segment(
        attention_in,
        spec,
        AttentionInWeights(
            norm=layer.block_norm("input_norm", layer.config.attention_norm),
            qkv_weight=layer.matrix("qkv_weight", (sum(sizes), reads.shape[0]), placed("weight")),
            qkv_bias=layer.fused_bias("qkv_bias", sum(sizes), placed("bias"))
            if config.qkv_bias
            else None,
            q_norm=q_norm,
            k_norm=k_norm,
            rope_table=rope_table,
        ),
        (reads.name, _positions(layer) if config.sections else POSITIONS),
        [
            *(
                layer.builder.step_tensor(name, count, spec.head_dim)
                for name, count in zip((QUERY, KEY, VALUE), counts, strict=True)
            ),
            *((layer.builder.step_tensor(OUTPUT_GATE, gates),) if gates else ()),
        ],
    )


def write_attention_out(
    layer: LayerWriter, config: AttentionConfig | LatentAttentionConfig, size: int
) -> None:
    """Write the projection of what attention of any kind has written, [T, size]."""
    tensor = f"{layer.stored}{config.output_name}"
    layer.builder.segment(
        attention_out,
        AttentionOutSpec(
            post_norm=layer.norm_spec(layer.config.attention_post_norm),
            multiplier=layer.model.residual_multiplier,
            group=layer.builder.group,
        ),
        AttentionOutWeights(
            output_weight=layer.matrix(
                "output_weight",
                (layer.hidden, size),
                (Placement(f"{tensor}.weight", shard=1),),
            ),
            output_bias=layer.vector(
                "output_bias",
                layer.hidden,
                f"{config.output_name}.bias" if config.output_bias else None,
            ),
            post_norm=layer.block_norm("attention_post_norm", layer.config.attention_post_norm),
        ),
        (ATTENDED, RESIDUAL),
        (layer.residual,),
    )
