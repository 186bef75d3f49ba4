"""gpt-oss (OpenAI 2025): attention sinks, windows in every other layer, experts with biases."""

from __future__ import annotations

from fnmatch import fnmatchcase

from src.models.config import ExpertsConfig, ModelConfig, StackedExperts
from src.models.families.family import Family, attention, decoder, experts, windowed
from src.models.fields import LAYER_TYPES, Fields
from src.models.layers.norms import NormSpec
from src.models.weights.packing import Mxfp4
from src.ops.projections.experts import ClampedSwiglu


class GptOss(Family):
    """Sinks, biases on all projections, and experts whose weights may be packed as MXFP4."""

    architectures = ("GptOssForCausalLM",)
    model_type = "gpt_oss"
    packings = ("mxfp4",)
    defaults = {  # noqa: RUF012
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Without `layer_types`, layers have a window in turn, from the first on."""
        layers = fields.integer("num_hidden_layers")
        kinds = fields.strings("layer_types", layers, LAYER_TYPES)
        if kinds is None:
            kinds = tuple(reversed(LAYER_TYPES)) * layers
        windows = fields.windows(kinds[:layers], fields.optional_integer("sliding_window"))
        positions = fields.integer("max_position_embeddings")
        rope = fields.rope(positions, theta=("rope_theta", 150000.0))
        bias = fields.boolean("attention_bias")
        base = attention(
            fields, rope, qkv_bias=bias, output_bias=bias, sinks_name="self_attn.sinks"
        )
        mlps = [
            _experts(fields, Mxfp4() if is_packed else None)
            for is_packed in _packed_layers(fields, layers)
        ]
        norm = NormSpec(fields.number("rms_norm_eps"), scales_wide=True)
        return decoder(fields, windowed(base, windows), mlps, norm=norm, rope=rope)


def _experts(fields: Fields, packing: Mxfp4 | None) -> ExpertsConfig:
    sizes = {name: fields.integer(name) for name in ("hidden_size", "intermediate_size")}
    for name, size in sizes.items():
        if packing is not None and size % Mxfp4.BLOCK:
            raise fields.error(name, f"a multiple of {Mxfp4.BLOCK} for mxfp4")
    limits = ClampedSwiglu(fields.number("swiglu_alpha"), fields.number("swiglu_limit"))
    return experts(
        fields,
        intermediate_size=sizes["intermediate_size"],
        renormalize=False,
        scoring="softmax_of_chosen",
        activation=limits,
        bias=True,
        router_name="mlp.router",
        router_bias=True,
        names=StackedExperts(interleaved=True, packing=packing),
    )


def _packed_layers(fields: Fields, layers: int) -> list[bool]:
    """Per layer, whether its experts are packed: all are, but those of modules left out by name."""
    quantization = fields.raw("quantization_config")
    if not quantization:
        return [False] * layers
    left_out = quantization.get("modules_to_not_convert") or []
    if not isinstance(left_out, list) or not all(isinstance(name, str) for name in left_out):
        raise fields.error("quantization_config", "with a list of names in modules_to_not_convert")
    modules = [f"model.layers.{layer}.mlp.experts" for layer in range(layers)]
    return [not any(_is_of(module, pattern) for pattern in left_out) for module in modules]


def _is_of(module: str, pattern: str) -> bool:
    """Whether a pattern names the module, one that it lies in, or the end of its name."""
    return (
        fnmatchcase(module, pattern)
        or fnmatchcase(module, f"{pattern}.*")
        or module.endswith(pattern)
    )
