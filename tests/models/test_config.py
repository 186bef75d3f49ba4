from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import ModelLoadError
from src.models import ModelConfig, load_config, supported_architectures
from src.models.families.family import Family
from src.models.loading.loader import resolve_max_positions
from src.models.registry import FAMILIES
from tests.support.checkpoints import CLASSES, make_checkpoint

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"]}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}

MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = MIXTRAL | {"architectures": ["Qwen3MoeForCausalLM"]}
GRANITE_HYBRID = LLAMA | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
}
QWEN3_NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"]}

Write = Callable[..., Path]


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in config.layers)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def test_defaults_are_those_of_the_family(write: Write) -> None:
    config = load_config(write(LLAMA))
    attention = config.layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim, config.dtype) == (4, 16, "float32")
    assert config.tie_word_embeddings is False
    assert config.rope.theta == 10000.0
    qwen3 = load_config(write(LLAMA | {"architectures": ["Qwen3ForCausalLM"]}))
    assert qwen3.layers[0].attention.head_dim == 128
    for given in ({}, {"rope_theta": None}):
        mixtral = load_config(write(MIXTRAL | given))
        assert mixtral.rope.theta == mixtral.layers[0].attention.rope.theta == 1e6
    mistral = load_config(write(MISTRAL | {"num_attention_heads": 8}))
    assert (mistral.layers[0].attention.num_kv_heads, windows_of(mistral)) == (8, (4096,) * 3)


class TestSpellings:
    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    @pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
    def test_dtype(self, write: Write, key: str, value: str) -> None:
        assert load_config(write(LLAMA | {key: value})).dtype == "bfloat16"

    @pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
    @pytest.mark.parametrize("kind", ["type", "rope_type"])
    def test_rope(self, write: Write, key: str, kind: str) -> None:
        scaling = {kind: "linear", "factor": 4}
        config = load_config(write(LLAMA | {key: scaling, "rope_theta": 5e5}))
        assert (config.rope.rope_type, config.rope.factor) == ("linear", 4.0)
        assert config.rope.theta == 5e5

    def test_theta_within_the_rope_parameters_wins(self, write: Write) -> None:
        parameters = {"rope_type": "default", "rope_theta": 777.0}
        config = load_config(write(LLAMA | {"rope_parameters": parameters, "rope_theta": 5.0}))
        assert config.rope.theta == 777.0

    def test_null_is_as_good_as_absent(self, write: Write) -> None:
        nulls = {"rope_scaling": None, "num_key_value_heads": None, "head_dim": None}
        assert load_config(write(LLAMA | nulls)) == load_config(write(LLAMA))


class TestContextLength:
    @pytest.mark.parametrize(
        ("scaling", "length"),
        [
            (None, 256),
            ({"rope_type": "linear", "factor": 4.0}, 1024),
            ({"rope_type": "dynamic", "factor": 4.0}, 256),
            ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
            ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
            ({"type": "yarn", "original_max_position_embeddings": 64}, 256),
            (
                {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                256,
            ),
        ],
    )
    def test_is_what_the_position_encoding_is_made_for(
        self, write: Write, scaling: dict[str, Any] | None, length: int
    ) -> None:
        assert load_config(write(LLAMA | {"rope_scaling": scaling})).max_positions == length

    def test_files_of_gemma3_state_it_stretched(self, write: Write) -> None:
        scaling = {"rope_type": "linear", "factor": 8.0}
        config = load_config(write(GEMMA3 | {"num_key_value_heads": 2, "rope_scaling": scaling}))
        assert config.max_positions == resolve_max_positions(256, config) == 256
        assert config.layers[2].attention.rope.factor == 1.0
        whole = load_config(write(GEMMA3 | {"rope_scaling": scaling, "sliding_window_pattern": 3}))
        assert whole.layers[2].attention.rope.factor == 8.0
        with pytest.raises(ModelLoadError, match="from 1 to 256"):
            resolve_max_positions(257, config)

    def test_without_max_model_len_it_is_bounded(self, write: Write) -> None:
        """Llama 4 Scout states 10,485,760 tokens, whose table of RoPE would take 5 GiB."""
        config = load_config(write(LLAMA | {"max_position_embeddings": 10 * 2**20}))
        assert config.max_positions == 10 * 2**20
        assert resolve_max_positions(None, config) == 2**20
        assert resolve_max_positions(3 * 2**20, config) == 3 * 2**20

    @pytest.mark.parametrize("rope_type", ["linear", "yarn", "dynamic"])
    def test_a_factor_beyond_all_positions_is_refused(self, write: Write, rope_type: str) -> None:
        scaling = {"rope_type": rope_type, "factor": 2.0**30}
        with pytest.raises(ModelLoadError, match=r"rope factor .* positions"):
            load_config(write(LLAMA | {"rope_scaling": scaling}))


class TestPhi3:
    def test_max_model_len_may_go_beyond_the_original_length(self, write: Write) -> None:
        for name in ("longrope", "su"):
            settings = {"original_max_position_embeddings": 64, "rope_scaling": LONGROPE}
            settings["rope_scaling"] = LONGROPE | {"type": name}
            config = load_config(write(PHI3 | settings))
            assert (config.rope.rope_type, config.rope.factor) == ("longrope", 4.0)
            assert config.max_positions == 64
            assert config.rope.limit(config.max_position_embeddings) == 256

    @pytest.mark.parametrize("where", ["file", "rope_parameters"])
    def test_a_part_of_a_head_is_rotated(self, write: Write, where: str) -> None:
        factor = {"partial_rotary_factor": 0.75}
        change = factor if where == "file" else {"rope_parameters": factor}
        config = load_config(write(PHI3 | change))
        assert {layer.attention.rotary_dim for layer in config.layers} == {12}

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "default or longrope"),
            ({"partial_rotary_factor": 0.07}, "even number of the 16 elements of a head, got 1"),
            ({"partial_rotary_factor": 1.5}, "got 24"),
            (
                {"partial_rotary_factor": 0.5, "rope_scaling": LONGROPE},
                "short_factor must be a list of 4 numbers, got 8",
            ),
        ],
    )
    def test_refusals(self, write: Write, change: dict[str, Any], reason: str) -> None:
        with pytest.raises(ModelLoadError, match=reason):
            load_config(write(PHI3 | change))


class TestWindows:
    @pytest.mark.parametrize(
        ("settings", "windows"),
        [
            ({}, (None,) * 3),
            ({"sliding_window": 8, "max_window_layers": 0}, (None,) * 3),
            ({"use_sliding_window": True, "sliding_window": None}, (None,) * 3),
            ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8,) * 3),
            (
                {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
                (None, None, 8),
            ),
            ({"use_sliding_window": True, "sliding_window": 8}, (None,) * 3),
            (
                {
                    "use_sliding_window": True,
                    "sliding_window": 8,
                    "max_window_layers": 0,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                },
                (8, None, 8),
            ),
        ],
    )
    def test_qwen(
        self, write: Write, settings: dict[str, Any], windows: tuple[int | None, ...]
    ) -> None:
        assert windows_of(load_config(write(QWEN2 | settings))) == windows

    @pytest.mark.parametrize(("window", "want"), [(None, (None,) * 3), (8, (8,) * 3)])
    def test_mistral(self, write: Write, window: int | None, want: tuple[int | None, ...]) -> None:
        settings = {"num_key_value_heads": 2, "sliding_window": window}
        assert windows_of(load_config(write(MISTRAL | settings))) == want


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_type_without_architectures_is_the_class_of_transformers(
    family: type[Family], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = {name: kind for kind, name in CLASSES.items()}[family.architectures[0]]
    saved = make_checkpoint(tmp_path, kind)
    whole = load_config(saved)
    raw = json.loads((saved / "config.json").read_text())
    for spelling in ({}, {"architectures": None}, {"architectures": []}):
        rest = {key: value for key, value in raw.items() if key != "architectures"}
        (saved / "config.json").write_text(json.dumps(rest | spelling))
        chosen = AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(saved))]
        assert load_config(saved).architecture == chosen.__name__
        assert load_config(saved) == whole


def test_code_that_is_not_needed_is_not_run(write: Write) -> None:
    """Files of families that transformers learnt later name the code that they came with."""
    code = {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}
    assert load_config(write(LLAMA | code)) == load_config(write(LLAMA))


class TestGenerationDefaults:
    def test_come_from_their_own_file(self, write: Write) -> None:
        generation = {
            "eos_token_id": [7, 9],
            "temperature": 0.6,
            "top_p": 0.9,
            "top_k": 20,
            "repetition_penalty": 1,
            "do_sample": True,
            "transformers_version": "5.0",
        }
        defaults = load_config(write(LLAMA | {"eos_token_id": 2}, generation)).generation
        assert defaults.eos_token_ids == (7, 9)
        sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1}
        assert (defaults.sampling, defaults.do_sample) == (sampling, True)

    @pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None}])
    def test_token_ids_fall_back_to_the_config(
        self, write: Write, generation: dict[str, Any] | None
    ) -> None:
        config = LLAMA | {"eos_token_id": 2, "bos_token_id": 1}
        defaults = load_config(write(config, generation)).generation
        assert (defaults.eos_token_ids, defaults.bos_token_id) == ((2,), 1)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("temperature", "hot"), ("top_k", 1.5), ("eos_token_id", ["x"]), ("top_k", True)],
    )
    def test_a_wrong_type_is_named(self, write: Write, name: str, value: object) -> None:
        with pytest.raises(ModelLoadError, match=name):
            load_config(write(LLAMA, {name: value}))


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"architectures": ["JambaForCausalLM"]}, "JambaForCausalLM is not supported"),
            ({"architectures": None}, "architectures must name a class, or model_type one of"),
            ({"architectures": []}, "model_type is None"),
            ({"architectures": None, "model_type": "bert"}, "encoders .* class alone: BertModel, "),
            (
                {
                    "architectures": ["BertModel"],
                    "model_type": "bert",
                    "auto_map": {"AutoModel": "modeling.NewModel"},
                },
                "auto_map asks for code .*BertModel may give other vectors; remote code is refused",
            ),
            ({"architectures": [], "model_type": "jamba"}, "model_type is 'jamba'"),
            ({"architectures": None, "model_type": ["llama"]}, r"model_type is \['llama'\]"),
            ({"architectures": "LlamaForCausalLM", "model_type": "llama"}, "must name a class"),
            (
                {
                    "architectures": ["EvilForCausalLM"],
                    "auto_map": {"AutoModelForCausalLM": "modeling.Evil"},
                },
                "remote code is refused",
            ),
            ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
            ({"hidden_act": "relu"}, "hidden_act must be one of silu, .*got 'relu'"),
            ({"hidden_act": ["silu"]}, "hidden_act must be one of"),
            ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number"),
            ({"head_dim": 20}, "head_dim must be a multiple of 8 up to 256, got 20"),
            ({"head_dim": 264}, "got 264"),
            ({"hidden_size": 100}, "head_dim must be a multiple of 8 up to 256, got 25"),
            ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of"),
            ({"vocab_size": None}, "vocab_size must be a positive integer"),
            ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
            ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
            ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a positive number"),
            ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
            ({"partial_rotary_factor": 0}, "partial_rotary_factor must be a positive number"),
            ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk' is not supported"),
            ({"rope_scaling": {"type": ["yarn"]}}, r"\['yarn'\] is not supported"),
            ({"rope_theta": float("inf")}, "rope_theta must be a number >= 0, got inf"),
            ({"rope_theta": "1e4"}, "rope_theta must be a number >= 0, got '1e4'"),
            (
                {"original_max_position_embeddings": "64", "rope_scaling": LONGROPE},
                "original_max_position_embeddings must be a number",
            ),
            ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024"),
            ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647"),
            ({"rope_scaling": LONGROPE | {"long_factor": 2.0}}, "long_factor must be a list"),
            ({"rope_scaling": LONGROPE | {"long_factor": [2.0]}}, "list of 8 numbers, got 1"),
            ({"rope_scaling": LONGROPE | {"short_factor": ["1"] * 8}}, "short_factor must be a"),
            ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, got None"),
            ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be from 1 to"),
            ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
            ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor must be"),
            ({"rope_scaling": [1]}, "rope parameters must be an object"),
            (
                {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
                r"by layer type \(full_attention\)",
            ),
        ],
    )
    def test_each_names_its_reason(self, write: Write, change: dict[str, Any], reason: str) -> None:
        with pytest.raises(ModelLoadError, match=reason):
            load_config(write(LLAMA | change))

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types must be a list of 3"),
            (QWEN2 | {"layer_types": ["full_attention", "mamba", "mamba"]}, "mamba"),
            (QWEN2 | {"layer_types": [["full_attention"]] * 3}, "layer_types must be made of"),
            (QWEN2 | {"use_sliding_window": True, "sliding_window": -1}, "sliding_window"),
            (
                MISTRAL
                | {
                    "num_key_value_heads": 2,
                    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                },
                "layer_types must be the same",
            ),
        ],
    )
    def test_windows(self, write: Write, config: dict[str, Any], reason: str) -> None:
        with pytest.raises(ModelLoadError, match=reason):
            load_config(write(config))

    @pytest.mark.parametrize("config", [MIXTRAL, QWEN3_MOE])
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"num_experts_per_tok": 5}, "num_experts_per_tok must be at most the 4 experts"),
            (
                {"hidden_act": "gelu"},
                "hidden_act must be one of .*, gelu_pytorch_tanh, .* for experts",
            ),
        ],
    )
    def test_experts(
        self, write: Write, config: dict[str, Any], change: dict[str, Any], reason: str
    ) -> None:
        assert load_config(write(config | {"hidden_act": "gelu_new"}))
        with pytest.raises(ModelLoadError, match=reason):
            load_config(write(config | change))

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
            ({"rope_parameters": {"rope_theta": 5.0}}, r"rope_parameters must be by .*rope_theta"),
        ],
    )
    def test_gemma3(self, write: Write, change: dict[str, Any], reason: str) -> None:
        with pytest.raises(ModelLoadError, match=reason):
            load_config(write(GEMMA3 | change))

    @pytest.mark.parametrize(
        ("config", "change", "reason"),
        [
            (GRANITE_HYBRID, {"layer_types": ["mamba"] * 3}, "layer_types must be a list in which"),
            (GRANITE_HYBRID, {"layer_types": None}, "layer_types must be a list in which"),
            (GRANITE_HYBRID, {"layer_types": ["mamba", "mamba", "rwkv"]}, "not .'rwkv'"),
            (GRANITE_HYBRID, {"hidden_act": "gelu"}, "hidden_act must be silu"),
            (GRANITE_HYBRID, {"mamba_n_heads": 7}, "mamba_n_heads must be 128"),
            (GRANITE_HYBRID, {"mamba_d_head": 5}, "mamba_n_heads must be 128"),
            (GRANITE_HYBRID, {"mamba_n_groups": 3}, "mamba_n_groups must be a divisor"),
            (GRANITE_HYBRID, {"position_embedding_type": "alibi"}, "must be rope, nope or null"),
            (GRANITE_HYBRID, {"time_step_limit": [2.0, 1.0]}, "time_step_limit must be two"),
            (GRANITE_HYBRID, {"time_step_limit": [True, 1.0]}, "time_step_limit must be two"),
            (GRANITE_HYBRID, {"time_step_limit": [0, 10**400]}, "time_step_limit must be two"),
            (GRANITE_HYBRID, {"time_step_limit": [10**400, math.inf]}, "time_step_limit must be"),
            (GRANITE_HYBRID, {"mamba_d_conv": 17}, "mamba_d_conv must be at most 16"),
            (QWEN3_NEXT, {"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim must be at most"),
            (QWEN3_NEXT, {"full_attention_interval": 5}, "layer_types must be a list in which"),
            (QWEN3_NEXT, {"linear_num_value_heads": 3}, "linear_num_value_heads must be a multip"),
            (QWEN3_NEXT, {"hidden_act": "relu2"}, "hidden_act must be"),
        ],
    )
    def test_recurrent_states(
        self, write: Write, config: dict[str, Any], change: dict[str, Any], reason: str
    ) -> None:
        assert load_config(write(config))
        with pytest.raises(ModelLoadError, match=reason):
            load_config(write(config | change))

    def test_an_unsupported_architecture_lists_the_supported(self, write: Write) -> None:
        with pytest.raises(ModelLoadError) as caught:
            load_config(write(LLAMA | {"architectures": ["T5Model"]}))
        assert all(name in str(caught.value) for name in supported_architectures())

    @pytest.mark.parametrize("text", ["", "[]", "{", "\ufeff{}"])
    def test_a_file_that_is_no_object(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            load_config(tmp_path)

    def test_a_directory_without_a_config(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"has no config\.json"):
            load_config(tmp_path)


def test_the_page_about_adding_a_model_lists_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adding-a-model.md").read_text()
    for name in supported_architectures():
        assert f"`{name}`" in page
