"""What the files of a directory mean is what transformers reads in them, however it is spelled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from src.core.errors import ModelLoadError
from src.models import load_config, load_model
from src.models.checkpoint import SINGLE_FILE
from src.models.config import (
    AttentionConfig,
    ExpertsConfig,
    MLPConfig,
    RecurrenceConfig,
    ShortConvolutionConfig,
)
from src.models.families.family import EXPERT_COUNTS
from src.models.layers.rope import inverse_frequencies
from src.models.loading.options import LoadOptions
from tests.models.harness import dense_logits
from tests.support.checkpoints import CLASSES, load_reference, make_checkpoint

PROMPT = [5, 17, 200, 9, 31]


def change(directory: Path, changes: dict[str, Any], *, file: str = "config.json") -> Path:
    """Set fields of a file; those that are ``...`` are left out."""
    path = directory / file
    old = json.loads(path.read_text()) if path.exists() else {}
    new = {key: value for key, value in (old | changes).items() if value is not ...}
    path.write_text(json.dumps(new))
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


LINEAR = {"factor": 4.0, "rope_theta": 300.0}
YARN = {"factor": 4.0, "attention_factor": 0.7, "rope_theta": 300.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 64}
# Family -> the fields of `config.json` that say how it rotates.
ROPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_theta": 500.0}),
    ("llama", {"rope_scaling": None, "rope_theta": 500.0}),
    ("llama", {"rope_scaling": {}, "rope_parameters": {"type": "linear", **LINEAR}}),
    ("llama", {"rope_scaling": {"type": "linear", **LINEAR}}),
    ("llama", {"rope_scaling": {"rope_type": "linear", **LINEAR}, "rope_theta": 500.0}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_theta": 500}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "type": "yarn", **LINEAR}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", **LINEAR}}),
    (
        "llama",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "dynamic", **LINEAR},
        },
    ),
    ("llama", {"rope_scaling": {"type": "yarn", **YARN, **ORIGINAL}}),
    ("llama", {"rope_scaling": {"type": "yarn", **YARN}, **ORIGINAL}),
    ("llama", {"rope_scaling": {"type": "yarn", **YARN}}),
    (
        "llama",
        {
            "rope_scaling": {"type": "yarn", **YARN, **ORIGINAL},
            "original_max_position_embeddings": 32,
        },
    ),
    ("llama", {"rope_scaling": {**LLAMA3, **ORIGINAL}, "rope_theta": 100.0}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 100.0}, **ORIGINAL}),
    ("glm4", {}),
    ("glm4", {"partial_rotary_factor": 1.0}),
    ("glm4", {"partial_rotary_factor": 0.25, "rope_theta": 100.0}),
    ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 100.0}}),
    ("glm4", {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}}),
    ("glm4", {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("glm4_moe", {"rope_scaling": {"type": "yarn", **YARN}}),
    (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            },
        },
    ),
    ("gpt_oss", {}),
    ("gpt_oss", {"rope_parameters": None, "rope_theta": 500.0}),
    ("gpt_oss", {"rope_parameters": {}}),
    ("cohere", {}),
    ("smollm3", {}),
    ("cohere2", {"rope_theta": 50000}),
    ("exaone4", {}),
    ("exaone4", {"rope_theta": 100.0, "rope_scaling": {**LLAMA3, **ORIGINAL}}),
    ("olmo3", {}),
    ("olmo3", {"rope_theta": 100.0}),
    ("olmo3", {"rope_theta": 100.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("olmo3", {"rope_parameters": {"full_attention": {"type": "yarn", **YARN, **ORIGINAL}}}),
    (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0},
                "sliding_attention": {"rope_theta": 77.0},
            },
            "rope_theta": 100.0,
        },
    ),
    ("gpt_oss", {}),
    ("gpt_oss", {"rope_parameters": None}),
    ("gpt_oss", {"rope_parameters": {}, "rope_theta": 500.0}),
    ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("llama4", {}),
    ("llama4", {"rope_scaling": {**LLAMA3, **ORIGINAL}}),
    ("qwen3next", {}),
    ("qwen3next", {"partial_rotary_factor": 0.5, "rope_theta": 500.0}),
    ("qwen3next", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("qwen3next", {"rope_scaling": {"type": "yarn", **YARN}}),
    ("granite_moehybrid", {"position_embedding_type": "rope", "rope_theta": 500.0}),
    ("gemma3", {"rope_theta": 500.0, "rope_local_base_freq": 50.0}),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3", {"rope_parameters": {"full_attention": {"type": "linear", **LINEAR}}}),
]


def frequencies(attention: AttentionConfig) -> tuple[torch.Tensor, float]:
    """What a layer rotates by, and the factor of its rotation."""
    assert attention.rope is not None
    return inverse_frequencies(attention.rope, attention.rotary_dim or 0, 256, 1)


@pytest.mark.parametrize(("name", "fields"), ROPES)
def test_rope_is_the_reference_s(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    unsaid = dict.fromkeys(("rope_parameters", "rope_theta", "partial_rotary_factor"), ...)
    change(make_checkpoint(tmp_path, name), unsaid | fields)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    rotary, seen = reference.model.rotary_emb, 0
    for layer in load_config(tmp_path).layers:
        if isinstance(layer.attention, RecurrenceConfig) or layer.attention.rope is None:
            continue
        kind = "full_attention" if layer.attention.window is None else "sliding_attention"
        prefix = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
        got, scale = frequencies(layer.attention)
        torch.testing.assert_close(got, getattr(rotary, f"{prefix}inv_freq"))
        assert scale == pytest.approx(getattr(rotary, f"{prefix}attention_scaling"))
        seen += 1
    assert seen


class TestDtype:
    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "fields",
        [
            {"dtype": ...},
            {"dtype": None},
            {"dtype": ..., "torch_dtype": None},
            {"dtype": "float16"},
            {"dtype": ..., "torch_dtype": "float16"},
            {"dtype": "bfloat16", "torch_dtype": "float16"},
            {"dtype": None, "torch_dtype": "float16"},
        ],
    )
    @pytest.mark.parametrize("shards", ["5GB", "30KB"])
    def test_is_the_reference_s(
        self, fields: dict[str, Any], stored: torch.dtype, shards: str, tmp_path: Path
    ) -> None:
        directory = make_checkpoint(
            tmp_path, num_hidden_layers=1, dtype=stored, max_shard_size=shards
        )
        change(directory, fields)
        from transformers import AutoModelForCausalLM

        wanted = AutoModelForCausalLM.from_pretrained(directory).dtype
        assert load_model(directory).spec.dtype == wanted

    def test_of_mixed_ones_the_first_by_name_counts(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        directory = make_checkpoint(tmp_path, num_hidden_layers=1, dtype=torch.bfloat16)
        stored = load_file(directory / SINGLE_FILE)
        for name, dtype in (
            ("lm_head.weight", torch.float16),
            ("model.norm.weight", torch.float32),
        ):
            stored[name] = stored[name].to(dtype)
        save_file(stored, directory / SINGLE_FILE, {"format": "pt"})
        change(directory, {"dtype": ...})
        wanted = AutoModelForCausalLM.from_pretrained(directory).dtype
        assert load_config(directory).dtype == str(wanted).removeprefix("torch.") == "float16"

    def test_auto_is_as_good_as_none(self, tmp_path: Path) -> None:
        directory = make_checkpoint(tmp_path, num_hidden_layers=1, dtype=torch.bfloat16)
        for name in ("dtype", "torch_dtype"):
            change(directory, {"dtype": ..., "torch_dtype": ...} | {name: "auto"})
            assert load_config(directory).dtype == "bfloat16"

    def test_without_weights_it_is_float32(self, llama: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((llama / "config.json").read_text())
        assert load_config(change(tmp_path, {"dtype": ...})).dtype == "float32"

    def test_one_that_is_not_supported_is_named(self, llama: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((llama / "config.json").read_text())
        with pytest.raises(ModelLoadError, match="got 'float8_e4m3fn'"):
            load_model(
                change(tmp_path, {"dtype": "float8_e4m3fn"}), LoadOptions(load_format="dummy")
            )


class TestEndTokens:
    @pytest.mark.parametrize("generation", [..., {}, {"eos_token_id": 9}, {"eos_token_id": [9, 7]}])
    @pytest.mark.parametrize("own", [..., None, 5, [5, 6]])
    def test_are_the_reference_s(self, own: Any, generation: Any, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        directory = make_checkpoint(tmp_path, num_hidden_layers=1)
        file = directory / "generation_config.json"
        file.unlink()
        if generation is not ...:
            file.write_text(json.dumps(generation))
        change(directory, {"eos_token_id": own})
        wanted = AutoModelForCausalLM.from_pretrained(directory).generation_config.eos_token_id
        if generation == {}:
            # The reference would never end by itself.
            wanted = None if own is ... else own
        as_list = wanted if isinstance(wanted, list) else [] if wanted is None else [wanted]
        assert list(load_config(directory).generation.eos_token_ids) == as_list


class TestNames:
    """A decoder that was saved without its head, or by a class that trains something else."""

    def body(self, directory: Path, name: str, *, tie: bool) -> Path:
        import transformers

        whole = load_reference(make_checkpoint(directory, name, tie=tie))
        for file in directory.iterdir():
            file.unlink()
        body = whole.model
        assert type(body).__name__ in dir(transformers)
        body.save_pretrained(directory)
        return directory

    @pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "cohere2"])
    def test_a_tied_head_is_the_embedding(self, name: str, tmp_path: Path) -> None:
        directory = self.body(tmp_path, name, tie=True)
        assert not any(each.startswith("model.") for each in load_file(directory / SINGLE_FILE))
        model = load_model(directory)
        assert model.config.architecture == CLASSES[name]
        with torch.inference_mode():
            want = load_reference(directory)(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(dense_logits(model, PROMPT), want, rtol=1e-4, atol=1e-4)

    def test_a_head_that_is_missing_is_named(self, tmp_path: Path) -> None:
        # The reference would draw one at random.
        directory = self.body(tmp_path, "llama", tie=False)
        with pytest.raises(ModelLoadError, match=r"missing: lm_head\.weight$"):
            load_model(directory)

    def test_the_model_type_decides_as_in_the_reference(self, tmp_path: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        directory = make_checkpoint(tmp_path, "mistral", num_hidden_layers=1)
        for names in (["LlamaForCausalLM"], ["MistralModel"], [], None):
            change(directory, {"architectures": names})
            chosen = AutoModelForCausalLM._model_mapping[
                type(AutoConfig.from_pretrained(directory))
            ]
            assert load_config(directory).architecture == chosen.__name__ == "MistralForCausalLM"

    @pytest.mark.parametrize(
        "names", [["LlamaForQuestionAnswering"], ["Qwen2Model"], ["EvilModel"]]
    )
    def test_other_classes_are_refused(self, names: list[str], llama: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((llama / "config.json").read_text())
        change(tmp_path, {"architectures": names})
        with pytest.raises(ModelLoadError, match=f"{names[0]} is not supported"):
            load_config(tmp_path)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu", ...])
def test_the_activation_of_gemma_is_the_reference_s(activation: Any, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gemma")
    # Files of the first days have another field too, which the reference does not read.
    change(directory, {"hidden_act": activation, "hidden_activation": None})
    with torch.inference_mode():
        want = load_reference(directory)(torch.tensor([PROMPT])).logits[0]
    made = dense_logits(load_model(directory), PROMPT)
    torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-5)


def test_a_gemma_both_ways_is_refused_by_name(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gemma", num_hidden_layers=1)
    change(directory, {"use_bidirectional_attention": True})
    with pytest.raises(ModelLoadError, match="use_bidirectional_attention"):
        load_config(directory)


class TestExperts:
    @pytest.fixture(
        params=[
            *("mixtral", "qwen2_moe", "glm4_moe", "granite_moe", "deepseekv2", "deepseekv3"),
            "lfm2_moe",
        ]
    )
    def directory(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return make_checkpoint(tmp_path, request.param)

    @pytest.mark.parametrize("name", EXPERT_COUNTS)
    def test_their_number_has_three_names(self, directory: Path, name: str) -> None:
        unsaid = dict.fromkeys(EXPERT_COUNTS, ...)
        before = _experts_of(directory)
        assert _experts_of(change(directory, unsaid | {name: before.num_experts})) == before

    def test_names_that_disagree_are_refused(self, directory: Path) -> None:
        change(directory, {"num_experts": 5, "n_routed_experts": 6})
        with pytest.raises(ModelLoadError, match="num_experts must be equal to"):
            load_config(directory)


def _experts_of(directory: Path) -> ExpertsConfig:
    return next(
        layer.mlp for layer in load_config(directory).layers if isinstance(layer.mlp, ExpertsConfig)
    )


@pytest.mark.parametrize("architecture", ["glm4_moe", "deepseekv3"])
def test_layers_that_predict_further_tokens_are_passed_over(
    tmp_path: Path, architecture: str
) -> None:
    directory = make_checkpoint(tmp_path, architecture)
    file = directory / SINGLE_FILE
    tensors, want = load_file(file), dense_logits(load_model(directory), PROMPT)
    extra = {
        f"model.layers.3.{name}": torch.zeros(3) for name in ("eh_proj.weight", "enorm.weight")
    }
    save_file(tensors | extra, file, {"format": "pt"})
    assert torch.equal(dense_logits(load_model(directory), PROMPT), want)
    change(directory, {"num_nextn_predict_layers": 0, "num_mtp_layers": 0})
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.3\.eh_proj"):
        load_model(directory)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"intermediate_size": 500},
        {"block_ff_dim": 700},
        {"block_ff_dim": 700, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3},
        {"block_auto_adjust_ff_dim": False, "block_ff_dim": 50},
        {"block_auto_adjust_ff_dim": ..., "block_multiple_of": ..., "conv_bias": ...},
        {"layer_types": ..., "full_attn_idxs": [0, 2]},
        {"layer_types": None, "full_attn_idxs": [1, 5]},
        {"layer_types": ...},
        {"tie_embedding": False},
        {"tie_word_embeddings": ..., "num_key_value_heads": ..., "num_attention_heads": 8},
        {"tie_word_embeddings": False, "tie_embedding": True},
        {"conv_L_cache": ..., "norm_eps": ..., "max_position_embeddings": ...},
    ],
)
def test_files_of_lfm2_of_all_ages_mean_what_the_reference_reads(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    change(make_checkpoint(tmp_path, "lfm2"), fields)
    found, wanted = load_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(wanted).model
    for layer, other, kind in zip(found.layers, reference.layers, wanted.layer_types, strict=True):
        assert isinstance(layer.mlp, MLPConfig)
        assert layer.mlp.intermediate_size == other.feed_forward.w1.out_features
        if isinstance(layer.attention, ShortConvolutionConfig):
            assert kind == "conv"
            convolution = other.conv.conv
            assert layer.attention.taps == convolution.kernel_size[0]
            assert layer.attention.bias == (convolution.bias is not None)
        else:
            assert isinstance(layer.attention, AttentionConfig)
            assert kind == "full_attention"
            assert layer.attention.num_kv_heads == wanted.num_key_value_heads
    assert found.tie_word_embeddings == wanted.tie_word_embeddings
    assert found.norm.eps == wanted.norm_eps
    assert found.max_position_embeddings == wanted.max_position_embeddings


LONG_LISTS = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 8}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("glm4_moe", {"n_group": 3}, "n_group must be a divisor of the number of experts, 8"),
    ("glm4_moe", {"n_group": 8, "topk_group": 2}, "topk_group must be enough groups"),
    ("glm4_moe", {"topk_group": 3}, "topk_group must be at most n_group=2"),
    ("glm4_moe", {"n_group": 8, "topk_group": 4}, "n_group must be at most 4"),
    ("deepseekv3", {"n_group": 8, "topk_group": 4}, "n_group must be at most 4"),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer >= 0"),
    ("glm4_moe", {"num_nextn_predict_layers": True}, "must be an integer >= 0"),
    ("lfm2", {"layer_types": ["conv"] * 3}, "layer_types must be a list with full_attention"),
    ("lfm2", {"layer_types": ["conv", "window", "conv"]}, "layer_types must be made of"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [True]}, "full_attn_idxs must be a list of"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [3, -1]}, "with one of the layers at least"),
    ("lfm2", {"block_multiple_of": 0}, "block_multiple_of must be a positive integer"),
    ("lfm2", {"block_multiple_of": 2**25}, "of which a width from 1 to 16777216 follows"),
    ("lfm2", {"block_ff_dim": 1, "block_ffn_dim_multiplier": None}, "block_ff_dim must be one of"),
    ("lfm2", {"conv_L_cache": 17}, "conv_L_cache must be at most 16"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be at least 2"),
    ("lfm2", {"hidden_act": "gelu"}, "hidden_act must be silu"),
    ("lfm2_moe", {"layer_types": ...}, "layer_types must be a list of 3 entries"),
    ("lfm2_moe", {"hidden_act": "gelu"}, "hidden_act must be silu"),
    ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers must be an integer >= 0"),
    ("deepseekv2", {"topk_method": "noaux_tc"}, "topk_method must be 'greedy' or"),
    ("deepseekv2", {"scoring_func": "sigmoid"}, "scoring_func must be 'softmax'"),
    ("deepseekv2", {"norm_topk_prob": True}, "norm_topk_prob must be false"),
    ("deepseekv2", {"mlp_bias": True}, "mlp_bias must be false"),
    ("deepseekv2", {"attention_bias": True}, "attention_bias must be false without q_lora_rank"),
    ("deepseekv2", {"num_key_value_heads": 2}, "num_key_value_heads must be equal to"),
    ("deepseekv2", {"topk_group": 1, "num_experts_per_tok": 3}, "topk_group must be enough groups"),
    ("deepseekv3", {"kv_lora_rank": 576}, "kv_lora_rank=576 .* up to 576"),
    ("deepseekv3", {"qk_rope_head_dim": 15}, "must be a multiple of 8"),
    ("deepseekv3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
    ("deepseekv3", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
    ("deepseekv3", {"rope_parameters": LONG_LISTS}, "short_factor must be a list of 8 numbers"),
    ("granite_moehybrid", {"time_step_limit": [0, 10**400]}, "time_step_limit must be two numbers"),
    ("gpt_oss", {"swiglu_limit": 1e300}, "swiglu_limit must be a positive number that float32"),
    ("granite", {"embedding_multiplier": 10**400}, "embedding_multiplier must be a positive"),
    ("granite", {"logits_scaling": 0}, "logits_scaling must be a positive number"),
    ("granite_moe", {"num_experts_per_tok": 9}, "at most the 6 experts"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window must be true"),
    ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers must be a list of a 0 or a 1"),
    ("smollm3", {"no_rope_layers": [2] * 5}, "no_rope_layers must be a list of a 0 or a 1"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 5}, "layer_types must be full_attention"),
    ("smollm3", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 5}, "layer_ty"),
    ("cohere2", {"head_dim": 32}, "head_dim must be hidden_size / num_attention_heads = 16"),
    ("cohere2", {"sliding_window": None}, "sliding_window must be a positive integer"),
    ("exaone4", {"sliding_window": None}, "sliding_window must be a positive integer for layers"),
    (
        "exaone4",
        {"layer_types": None, "sliding_window_pattern": "LLLG"},
        "_pattern must be a posit",
    ),
    ("olmo3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters must be"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "by layer type"),
    ("cohere", {"layer_norm_eps": None}, "layer_norm_eps must be a positive number"),
]


@pytest.mark.parametrize(("name", "fields", "reason"), REFUSED)
def test_what_cannot_be_honoured_is_named(
    name: str, fields: dict[str, Any], reason: str, shared: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((shared(name) / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=reason):
        load_config(change(tmp_path, fields))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of each family, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


@pytest.mark.parametrize("name", ["cohere2", "exaone4", "olmo3"])
@pytest.mark.parametrize("pattern", [..., 3])
def test_kinds_of_layers_that_are_not_said_are_the_reference_s(
    name: str, pattern: Any, shared: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text((shared(name) / "config.json").read_text())
    change(tmp_path, {"layer_types": ..., "sliding_window_pattern": pattern})
    windows = [layer.attention.window for layer in load_config(tmp_path).layers]
    kinds = AutoConfig.from_pretrained(tmp_path).layer_types
    assert windows == [12 if kind == "sliding_attention" else None for kind in kinds]


def test_a_model_without_windows_needs_no_kinds_of_layers(
    shared: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((shared("exaone4") / "config.json").read_text())
    change(tmp_path, {"layer_types": None, "sliding_window": None, "sliding_window_pattern": None})
    for layer in load_config(tmp_path).layers:
        assert layer.attention.window is None
        assert layer.attention.rope is not None


def test_old_names_of_kinds_of_layers(shared: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((shared("cohere2") / "config.json").read_text())
    kinds = ["attention", "sliding_attention"] * 2 + ["attention"]
    windows = [
        layer.attention.window
        for layer in load_config(change(tmp_path, {"layer_types": kinds})).layers
    ]
    assert windows == [None, 12, None, 12, None]
