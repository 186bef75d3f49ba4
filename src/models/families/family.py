"""The base class of families, and functions that most families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from src.core.errors import ModelLoadError
from src.models.builder import ProgramBuilder
from src.models.config import (
    HEAD_DIM_MULTIPLE,
    MAX_HEAD_DIM,
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MixingConfig,
    MLPConfig,
    ModelConfig,
    PredictorConfig,
)
from src.models.decoder import write_decoder
from src.models.fields import LAYER_TYPES, Fields
from src.models.layers.activations import SPELLINGS
from src.models.layers.norms import NormSpec
from src.models.layers.rope import RopeConfig
from src.ops.attention.spec import ALL_AHEAD
from src.ops.projections.experts import ACTIVATIONS as EXPERT_ACTIVATIONS

# Names of the field with the number of experts. transformers writes other ones than it reads.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A class of models that take more than text; of its checkpoints the text part is served.

    Its configuration has the family's in `text_config`.

    Attributes
    ----------
    architecture, model_type
        As in its `config.json`.
    prefix
        What the names of the text part's tensors begin with.
    others
        Beginnings of the names of all other tensors, which are not read.
    """

    architecture: str
    model_type: str
    prefix: str
    others: tuple[str, ...]


class Family:
    """A family of checkpoints. Each has one file here and one line in `registry.FAMILIES`.

    Attributes
    ----------
    architectures
        The values of `architectures` in `config.json` that it supports.
    model_type
        `model_type` in `config.json`. Selects the first architecture if the file names none.
    wrappers
        Classes of models that contain one of this family.
    packings
        Values of `quant_method` in `quantization_config` that it reads.
    defaults
        Values of fields that `config.json` may leave out.
    overflows_float16
        Whether its hidden states leave the range of float16, up to 65,504.
    generates
        Whether it continues text. Others end in hidden states, and their tokens may see later ones.
    """

    architectures: ClassVar[tuple[str, ...]] = ()
    model_type: ClassVar[str] = ""
    wrappers: ClassVar[tuple[Wrapper, ...]] = ()
    packings: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    overflows_float16: ClassVar[bool] = False
    generates: ClassVar[bool] = True

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Read `config.json`.

        Raises
        ------
        ModelLoadError
            a field is missing, has the wrong type, is out of bounds, or asks for something that is
            not supported; the message names the field.
        """
        raise NotImplementedError

    @classmethod
    def write(cls, builder: ProgramBuilder, config: ModelConfig) -> None:
        """Write the program. The default is a decoder of layers; a family may override it."""
        write_decoder(builder, config)


def attention(
    fields: Fields, rope: RopeConfig | None = None, **differences: Any
) -> AttentionConfig:
    """The attention that `config.json` describes in the usual fields.

    Parameters
    ----------
    fields
        The fields of `config.json`.
    rope
        None: read from the file, which has only one.
    differences
        Values of `AttentionConfig` that override the usual ones.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", default=max(hidden // heads, 1))
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        raise ModelLoadError(
            f"head_dim must be a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, "
            f"got {head_dim}"
        )
    rope = rope or fields.rope(fields.integer("max_position_embeddings", default=2048))
    given: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope": rope,
        "rotary_dim": rope.rotary_dim(head_dim),
    }
    return AttentionConfig(**(given | differences))


def mlp(fields: Fields, **differences: Any) -> MLPConfig:
    """The MLP that `config.json` describes in the usual fields; see `attention`."""
    given: dict[str, Any] = {
        "intermediate_size": fields.integer("intermediate_size"),
        "activation": fields.activation("hidden_act"),
    }
    return MLPConfig(**(given | differences))


def experts(fields: Fields, *counts: str, **differences: Any) -> ExpertsConfig:
    """The experts that `config.json` describes in the usual fields.

    Parameters
    ----------
    fields
        The fields of `config.json`.
    counts
        Names of the field with the number of experts, beside those of `EXPERT_COUNTS`.
    differences
        Values of `ExpertsConfig` that override the usual ones.
    """
    count = fields.same_integer(*dict.fromkeys((*counts, *EXPERT_COUNTS)))
    chosen = fields.integer("num_experts_per_tok")
    if chosen > count:
        raise fields.error("num_experts_per_tok", f"at most the {count} experts that there are")
    activation = fields.activation("hidden_act")
    if activation not in EXPERT_ACTIVATIONS:
        known = [name for name, kind in SPELLINGS.items() if kind in EXPERT_ACTIVATIONS]
        raise fields.error("hidden_act", f"one of {', '.join(known)} for experts")
    given: dict[str, Any] = {
        "num_experts": count,
        "num_chosen": chosen,
        "activation": activation,
    }
    own = ExpertsConfig(**(given | differences))
    if count % own.groups:
        raise fields.error("n_group", f"a divisor of the number of experts, {count}")
    if not chosen <= own.chosen_groups * (count // own.groups):
        raise fields.error("topk_group", f"enough groups to choose {chosen} experts from")
    if own.chosen_groups > own.groups:
        raise fields.error("topk_group", f"at most n_group={own.groups}")
    most = count // own.groups_ranked_by
    if own.chosen_groups < own.groups > most:
        ranks = f"its best {own.groups_ranked_by} experts rank a group"
        raise fields.error("n_group", f"at most {most}, since {ranks}")
    return own


def kinds_of_layers(fields: Fields, layers: int, pattern: int) -> tuple[str, ...]:
    """`layer_types`; by default every ``pattern``-th layer has full attention, others a window."""
    return fields.strings("layer_types", layers, LAYER_TYPES) or tuple(
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(layers)
    )


def windowed(base: AttentionConfig, windows: Sequence[int | None]) -> list[AttentionConfig]:
    """The same attention for each layer, with its own window."""
    return [replace(base, window=window) for window in windows]


def decoder(
    fields: Fields,
    attentions: Sequence[MixingConfig],
    mlps: Sequence[MLPConfig | ExpertsConfig],
    *,
    norm: NormSpec | None = None,
    layer_norms: Mapping[str, str | None] | None = None,
    parallel: bool = False,
    rope: RopeConfig | None = None,
    **differences: Any,
) -> ModelConfig:
    """A decoder of these layers, with the usual fields of `config.json` for the rest.

    Parameters
    ----------
    fields
        The fields of `config.json`.
    attentions
        One per layer; a recurrent state may be in attention's place.
    mlps
        One per layer.
    norm
        None: a plain norm with `rms_norm_eps`.
    layer_norms
        Values of `LayerConfig` that override the usual ones.
    parallel
        See `LayerConfig.parallel`.
    rope
        Determines the model's context length; None: read from the file, which has only one.
    differences
        Values of `ModelConfig` that override the usual ones.
    """
    if not fields.boolean("is_causal", default=True):
        attentions = [both_ways(fields, each) for each in attentions]
    positions = fields.integer("max_position_embeddings", default=2048)
    given: dict[str, Any] = {
        "architecture": fields.raw("architectures")[0],
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "max_position_embeddings": positions,
        "rope": rope or fields.rope(positions),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings"),
        "dtype": fields.dtype(),
        "norm": norm or NormSpec(fields.number("rms_norm_eps", default=1e-6)),
        "layers": tuple(
            LayerConfig(attention=one, mlp=other, parallel=parallel, **(layer_norms or {}))
            for one, other in zip(attentions, mlps, strict=True)
        ),
    }
    config = ModelConfig(**(given | differences))
    if config.looks_ahead:
        return replace(config, unread=(*config.unread, f"{config.head_name}."))
    return config


def predicting(
    fields: Fields, one: MixingConfig, other: MLPConfig | ExpertsConfig
) -> dict[str, Any]:
    """What `decoder` is told of layers behind the last that predict further tokens.

    They are numbered like the others, as in DeepSeek-V3 (DeepSeek-AI 2024, section 2.2). Only the
    first is ever read. Embedding and head in them are copies of the model's.

    Parameters
    ----------
    fields
        The fields of `config.json`.
    one, other
        What the first of them consists of.
    """
    count = fields.count("num_nextn_predict_layers", "num_mtp_layers")
    if not count:
        return {}
    name = f"model.layers.{fields.integer('num_hidden_layers')}"
    return {
        "unread_layers": count,
        "predictor": PredictorConfig(
            layer=LayerConfig(attention=one, mlp=other),
            layer_name=name,
            join_name=f"{name}.eh_proj",
            embedding_norm_name=f"{name}.enorm",
            hidden_norm_name=f"{name}.hnorm",
            final_norm_name=f"{name}.shared_head.norm",
            prefix=f"{name}.",
            unread=(f"{name}.embed_tokens.", f"{name}.shared_head.head."),
        ),
    }


def both_ways(fields: Fields, one: MixingConfig) -> AttentionConfig:
    """The attention of a file with `is_causal` false: a window is as wide on both sides.

    Raises
    ------
    ModelLoadError
        It cannot see later tokens.
    """
    if not isinstance(one, AttentionConfig) or one.chunk is not None:
        raise fields.error("is_causal", "true: not all layers of this family can see later tokens")
    if one.window is None:
        return replace(one, ahead=ALL_AHEAD)
    return replace(one, window=one.window + 1, ahead=one.window)
