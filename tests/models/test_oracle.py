"""Every architecture and RoPE variant against transformers, on small random checkpoints.

float32: logits within 1e-4 of the row's largest, greedy tokens equal. bfloat16: logits as near to
exact ones as rounding lets them be (`tests/support/rounding.py`), which differs by family: on
average 0.3 % of the row's largest in one and 1.4 % in another, and 15 % for a token of the latter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from src.models import Model, load_model
from src.models.loading.options import LoadOptions
from tests.models.harness import PagedSequence, dense_logits
from tests.support.checkpoints import CLASSES, TINY, load_reference, make_checkpoint, ropes_of
from tests.support.rounding import (
    LARGEST_OF_16_BITS,
    MEAN_OF_16_BITS,
    MEAN_WITH_EXPERTS,
    expected_logits,
)

FLOAT32_TOLERANCE = 1e-4
WITH_EXPERTS = {name for name, own in TINY.items() if any("experts" in key for key in own)}
VOCAB_SIZE = 320
NEW_TOKENS = 20
# Of one token; shorter than a block; longer than blocks, windows and RoPE's original lengths.
PROMPT_LENGTHS = (1, 3, 90)

Pair = tuple[Model, Any]


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB_SIZE), k=length)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Of each logit, relative to the largest magnitude in its row."""
    return (got - want).abs() / want.abs().amax(dim=-1, keepdim=True)


@torch.inference_mode()
def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).logits[0].float()


@torch.inference_mode()
def reference_greedy(reference: Any, prompt: list[int]) -> list[int]:
    # Without the reference's cache, which keeps too much for a window of one token.
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        logits = reference(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def check_float32(decoder: Model, reference: Any) -> None:
    for length in PROMPT_LENGTHS:
        prompt = prompt_of(length)
        want = reference_logits(reference, prompt)
        assert relative_error(dense_logits(decoder, prompt), want).max() < FLOAT32_TOLERANCE
        chunks = [
            PagedSequence(decoder).append(prompt),
            torch.cat(
                [(s := PagedSequence(decoder)).append(prompt[:1])]
                + [s.append(prompt[i : i + 7]) for i in range(1, length, 7)]
            ),
        ]
        for got in chunks:
            assert relative_error(got, want).max() < FLOAT32_TOLERANCE
        greedy = PagedSequence(decoder).greedy(prompt, NEW_TOKENS, chunk=13)
        assert greedy == reference_greedy(reference, prompt)


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., Pair]:
    """A random checkpoint, as this engine and as transformers load it."""

    def make(architecture: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Pair:
        directory = make_checkpoint(
            tmp_path / architecture, architecture, vocab_size=VOCAB_SIZE, dtype=dtype, **settings
        )
        return load_model(directory), load_reference(directory, dtype)

    return make


@pytest.mark.parametrize(
    ("architecture", "rope"), [(name, rope) for name in CLASSES for rope in ropes_of(name)]
)
def test_every_architecture_and_rope_variant(
    make_pair: Callable[..., Pair], architecture: str, rope: str
) -> None:
    check_float32(*make_pair(architecture, rope=rope))


@pytest.mark.parametrize("architecture", CLASSES)
def test_bfloat16(make_pair: Callable[..., Pair], architecture: str) -> None:
    decoder, reference = make_pair(architecture, dtype=torch.bfloat16)
    assert decoder.weights["embedding"].dtype == torch.bfloat16
    for length in PROMPT_LENGTHS:
        prompt = prompt_of(length)
        want = expected_logits(reference, prompt)
        for got in (dense_logits(decoder, prompt), PagedSequence(decoder).append(prompt)):
            # With experts, a few tokens show little but whether one of them was chosen otherwise.
            if architecture not in WITH_EXPERTS:
                assert want.mean_share(got) < MEAN_OF_16_BITS
            elif length > 10:
                assert want.mean_share(got) < MEAN_WITH_EXPERTS
            worst = want.share(got)
            if architecture in WITH_EXPERTS:
                # Where two experts are as near as rounding is large, another one may be taken
                # though no trial took it: of few tokens.
                assert (worst > LARGEST_OF_16_BITS).sum() <= len(worst) // 10
            else:
                assert worst.max() < LARGEST_OF_16_BITS


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie": True}),
    "qwen3-tied": ("qwen3", {"tie": True}),
    "head_dim-8": ("llama", {"head_dim": 8}),
    "head_dim-24": ("llama", {"head_dim": 24}),
    "head_dim-128": ("qwen3", {"head_dim": 128}),
    "head_dim-256": ("mistral", {"head_dim": 256, "num_attention_heads": 2}),
    "head_dim-72-yarn": ("qwen2", {"head_dim": 72, "rope": "yarn"}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "as-many-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "one-layer": ("llama", {"num_hidden_layers": 1}),
    "two-layers-odd-width": (
        "llama",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 50,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 8,
        },
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "granite-hybrid-experts": (
        "granite_moehybrid",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": None,
            "mamba_proj_bias": True,
            "attention_bias": True,
        },
    ),
    "granite-hybrid-one-group": (
        "granite_moehybrid",
        {"mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_n_heads": 2},
    ),
    "granite-hybrid-bounded-steps": ("granite_moehybrid", {"time_step_limit": [0.5, 1.5]}),
    "qwen3-next-dense": ("qwen3next", {"num_experts": 0, "attention_bias": True}),
    "qwen3-next-one-head": (
        "qwen3next",
        {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_conv_kernel_dim": 2},
    ),
    "lfm2-plain": (
        "lfm2",
        {"conv_bias": False, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie": True},
    ),
    "lfm2-attention-at-the-ends": (
        "lfm2",
        {"layer_types": ["full_attention", "conv", "full_attention"], "conv_L_cache": 2},
    ),
    "lfm2_moe-no-bias": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.0},
    ),
    "lfm2_moe-experts-alone": ("lfm2_moe", {"num_dense_layers": 0, "conv_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "qwen2-window-from-layer-1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3-window-by-layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo2-bias": ("olmo2", {"attention_bias": True}),
    "phi3-window": ("phi3", {"sliding_window": 8}),
    "phi3-part-of-a-head": (
        "phi3",
        {
            "rope": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3-longrope-of-a-part": (
        "phi3",
        {
            "rope": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "attention_factor": 0.7,
            },
        },
    ),
    "qwen2_moe-windows-without-biases": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 8, "qkv_bias": False, "num_experts": 5},
    ),
    "glm4-without-biases-all-of-a-head": (
        "glm4",
        {
            "attention_bias": False,
            "rope": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4_moe-norms-and-biases": (
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "topk_group": 2,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseekv2-greedy-query-rank-biases": (
        "deepseekv2",
        {"topk_method": "greedy", "q_lora_rank": 24, "attention_bias": True, "v_head_dim": 40},
    ),
    "deepseekv2-experts-in-every-layer": (
        "deepseekv2",
        {"first_k_dense_replace": 0, "n_shared_experts": 1, "num_attention_heads": 2}
        | {"num_key_value_heads": 2},
    ),
    "deepseekv3-halves-without-query-rank": (
        "deepseekv3",
        {"rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False},
    ),
    "deepseekv3-yarn-with-mscale": (
        "deepseekv3",
        {
            "rope": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
            },
        },
    ),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite_moe-biases": ("granite_moe", {"attention_bias": True}),
    "cohere-norms-and-biases": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2-biases": (
        "cohere2",
        {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"] * 2}
        | {"num_hidden_layers": 4},
    ),
    "exaone4-no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"]}),
    "exaone4-by-layer": (
        "exaone4",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window_pattern": "GL"},
    ),
    "olmo3-bias": ("olmo3", {"attention_bias": True}),
    "smollm3-windows-and-biases": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 8, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3-no-rope-layers": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "phi4-mini": (
        "phi3",
        {
            "tie": True,
            "sliding_window": 512,
            "rope": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            },
        },
    ),
    "gpt-oss-no-biases": ("gpt_oss", {"attention_bias": False}),
    "gpt-oss-low-limit": ("gpt_oss", {"swiglu_limit": 0.3, "swiglu_alpha": 1.1}),
    "gpt-oss-windows-by-layer": (
        "gpt_oss",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "llama4-experts-everywhere": (
        "llama4",
        {"interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "use_qk_norm": False},
    ),
    "llama4-by-layer": (
        "llama4",
        {
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [0, 2],
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "llama4-no-chunks": ("llama4", {"attention_chunk_size": None}),
    "llama4-chunk-1": ("llama4", {"attention_chunk_size": 1, "floor_scale": 1}),
    "large-eps": ("llama", {"rms_norm_eps": 0.1}),
    "large-theta": ("llama", {"rope": {"rope_type": "default", "rope_theta": 1e6}}),
    "yarn-attention-factor": (
        "llama",
        {
            "rope": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 0.7,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn-mscale-untruncated": (
        "llama",
        {
            "rope": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.5,
                "mscale_all_dim": 0.8,
                "truncate": False,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_biases_windows_and_parameters(make_pair: Callable[..., Pair], name: str) -> None:
    architecture, settings = SHAPES[name]
    check_float32(*make_pair(architecture, **settings))


def test_float16_checkpoint_loads_as_float16(make_pair: Callable[..., Pair]) -> None:
    decoder, reference = make_pair("llama", dtype=torch.float16)
    prompt = prompt_of(20)
    error = relative_error(dense_logits(decoder, prompt), reference_logits(reference, prompt))
    assert decoder.spec.dtype == torch.float16
    assert error.max() < 0.02


def table_of(decoder: Model) -> torch.Tensor:
    """The only RoPE table of a model, see `rope.rope_table`."""
    (table,) = decoder.buffers().values()
    return table


# A rope's parameters change with the length of the reference's pass beyond so many tokens.
CHANGING = {"dynamic": {"max_position_embeddings": 64}, "longrope": {}}


@pytest.mark.parametrize("rope", CHANGING)
class TestBeyondTheDefaultLength:
    """Past the default `max_model_len` the reference's table depends on the length of the pass."""

    LENGTH = 140

    def test_a_pass_of_max_model_len_tokens_is_the_reference(
        self, tmp_path: Path, rope: str
    ) -> None:
        directory = make_checkpoint(tmp_path, rope=rope, **CHANGING[rope])
        default = load_model(directory)
        length = min(self.LENGTH, 2 * len(table_of(default)))
        decoder = load_model(directory, LoadOptions(max_model_len=length))
        prompt = prompt_of(length)
        want = reference_logits(load_reference(directory), prompt)
        assert relative_error(dense_logits(decoder, prompt), want).max() < FLOAT32_TOLERANCE
        # And differs from the table of the default length, else the above would show nothing.
        shared = min(length, len(table_of(default)))
        assert shared < length
        difference = table_of(decoder)[:shared] - table_of(default)[:shared]
        assert difference.abs().max() > 0.1

    def test_chunking_does_not_change_the_result(self, tmp_path: Path, rope: str) -> None:
        directory = make_checkpoint(tmp_path, rope=rope, **CHANGING[rope])
        length = min(self.LENGTH, 2 * len(table_of(load_model(directory))))
        decoder, prompt = (
            load_model(directory, LoadOptions(max_model_len=length)),
            prompt_of(length),
        )
        sequence = PagedSequence(decoder)
        got = torch.cat([sequence.append(prompt[i : i + 16]) for i in range(0, len(prompt), 16)])
        assert relative_error(got, dense_logits(decoder, prompt)).max() < FLOAT32_TOLERANCE
