"""What transformers computes for us, and what is refused, with its reason, when it is loaded."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from src.core.blocks import Chunk
from src.core.errors import ModelLoadError
from src.models import choose_implementation
from src.models.generic import recording, trial
from src.models.generic.body import Body
from src.models.generic.loading import load_by_transformers
from src.models.generic.masks import Reach, reach_of
from src.models.generic.positions import position_limit
from src.models.loading.options import LoadHooks, LoadOptions
from src.ops.attention.spec import ALL_AHEAD
from tests.architectures import tiny
from tests.architectures.tiny import make_tiny, make_tiny_encoder
from tests.support.checkpoints import make_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("phi")
    make_tiny(directory, "phi")
    return directory


def changed(directory: Path, target: Path, **fields: Any) -> Path:
    """A copy of a checkpoint with other fields in its `config.json`; None leaves one out."""
    shutil.copytree(directory, target)
    file = target / "config.json"
    raw = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return target


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_experts_for_which_a_device_is_waited_for_are_told(
    dtype: str, tmp_path: Path, phi: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny(tmp_path, "phimoe")
    for directory in (tmp_path, phi):
        # Nothing can be tried out there.
        with contextlib.suppress(ModelLoadError):
            load_by_transformers(directory, LoadOptions(dtype=dtype, device=torch.device("meta")))
    told = [line for line in caplog.messages if "waits for the device" in line]
    assert len(told) == (dtype != "bfloat16")
    assert all("Phimoe" in line and f"in {dtype}:" in line for line in told)


def test_weights_are_those_of_the_files_and_stay_so(phi: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    directory = changed(phi, tmp_path / "copy")
    model = load_by_transformers(
        directory, hooks=LoadHooks(progress=lambda *done: told.append(done))
    )
    stored = load_file(phi / "model.safetensors")
    parameters = model.parameters()
    # Who writes over a file changes nothing that is served.
    with (directory / "model.safetensors").open("r+b") as file:
        file.write(bytes((phi / "model.safetensors").stat().st_size))
    assert set(parameters) == set(stored)
    assert all(torch.equal(parameters[name], stored[name]) for name in stored)
    assert not any(tensor.requires_grad for tensor in parameters.values())
    assert {tensor.dtype for tensor in parameters.values()} == {torch.float32}
    size = sum(tensor.nbytes for tensor in stored.values())
    assert told[-1] == (size, size)
    assert told == sorted(told)


def test_dtype_and_length_are_as_asked(phi: Path) -> None:
    model = load_by_transformers(phi, LoadOptions(dtype="bfloat16", max_model_len=100))
    assert model.spec.dtype == torch.bfloat16
    assert model.spec.max_positions == 100
    kept = [tensor for layer in model.kv_cache_spec() for tensor in layer.tensors]
    assert {tensor.dtype for tensor in kept} == {torch.bfloat16}


def test_dummy_weights_follow_the_seed(phi: Path, tmp_path: Path) -> None:
    directory = changed(phi, tmp_path / "copy")
    (directory / "model.safetensors").unlink()
    state = torch.random.get_rng_state()
    one, same, other = (
        load_by_transformers(directory, LoadOptions(load_format="dummy", seed=seed)).parameters()
        for seed in (1, 1, 2)
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "unheard_of"}, "model_type 'unheard_of' is not known"),
        (
            {"model_type": "unheard_of", "auto_map": {"AutoModelForCausalLM": "code.Model"}},
            "code from the checkpoint .auto_map. is refused",
        ),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "not among its causal language"),
        (
            {"architectures": ["PhiForTokenClassification"]},
            "PhiForTokenClassification: its head is not served; PhiForCausalLM is",
        ),
        *(
            ({"model_type": kind, "architectures": [f"{name}ForSequenceClassification"]}, message)
            for kind, name, message in (
                ("gpt2", "GPT2", "its head is not served; GPT2LMHeadModel is"),
                ("phi3", "Phi3", "its head is not served; Phi3ForCausalLM is"),
                ("mixtral", "Mixtral", "its head is not served; MixtralForCausalLM is"),
                ("gemma3", "Gemma3", "its head is not served; Gemma3ForConditionalGeneration is"),
            )
        ),
        # Somebody's own class, whose head transformers would leave out.
        (
            {"architectures": ["PhiForRewardModel"]},
            "PhiForRewardModel: its head is not served; PhiForCausalLM is",
        ),
        ({"architectures": ["PhiBiModel"]}, "PhiBiModel is not a causal language model"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            r"quantization_config \(awq\) is for native families; use the unquantized checkpoint",
        ),
        ({"model_type": "mamba", "architectures": None}, "keep a state"),
        ({"model_type": "bloom", "architectures": None}, "does not use the attention interface"),
        ({"transformers_weights": "adapter_model.bin"}, "transformers_weights is not supported"),
        ({"dtype": "float64"}, "dtype must be"),
        ({"num_hidden_layers": 5}, "lacks tensors: model.layers.4"),
        ({"intermediate_size": 97}, "ize"),
    ],
)
def test_a_checkpoint_is_refused_with_its_reason(
    phi: Path, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        load_by_transformers(changed(phi, tmp_path / "copy", **fields))


def test_a_model_of_rewards_with_a_class_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen2", tie=True)
    file, weights = directory / "config.json", directory / "model.safetensors"
    raw = json.loads(file.read_text())
    tensors = load_file(weights)
    save_file({**tensors, "score.0.weight": torch.ones(1, 64)}, weights, {"format": "pt"})
    for further in ({}, {"auto_map": {"AutoModel": "modeling.Qwen2ForRewardModel"}}):
        file.write_text(json.dumps({**raw, "architectures": ["Qwen2ForRewardModel"], **further}))
        with pytest.raises(ModelLoadError, match="Qwen2ForRewardModel: its head is not served"):
            load_by_transformers(directory)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("T5", "T5EncoderModel: its attention has position biases"),
        ("UMT5", "UMT5EncoderModel: its attention has position biases"),
        ("T5Gemma", "T5GemmaEncoderModel: it is the encoder of an encoder-decoder"),
    ],
)
def test_encoders_of_encoder_decoders_are_refused_with_their_reason(
    tmp_path: Path, name: str, reason: str, is_whole: bool
) -> None:
    # As transformers saves them, and as the published files of sentence-t5 are.
    fields = {"model_type": name.lower(), "architectures": [f"{name}EncoderModel"]}
    raw = {**fields, "is_encoder_decoder": is_whole}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelLoadError, match=reason):
        load_by_transformers(tmp_path)


def test_models_without_heads_are_served_and_others_of_their_name_are_not(tmp_path: Path) -> None:
    make_tiny(tmp_path / "decoder", "phi")
    decoder = changed(tmp_path / "decoder", tmp_path / "bare", architectures=["PhiModel"])
    assert load_by_transformers(decoder).spec.hidden_size == 64
    make_tiny_encoder(tmp_path / "encoder", "albert")
    other = changed(
        tmp_path / "encoder", tmp_path / "other", architectures=["AlbertForRewardModel"]
    )
    with pytest.raises(ModelLoadError, match="AlbertForRewardModel has a head that is not served"):
        load_by_transformers(other)


@pytest.mark.parametrize("head", [None, "AlbertForMaskedLM"])
def test_tensors_of_an_encoder_that_nothing_reads_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: str | None
) -> None:
    make_tiny_encoder(tmp_path, "albert")
    weights, file = tmp_path / "model.safetensors", tmp_path / "config.json"
    more = {name: torch.ones(4) for name in ("predictions.bias", "pooler.weight")}
    save_file({**load_file(weights), **more}, weights, {"format": "pt"})
    if head is not None:
        file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [head]}))
    load_by_transformers(tmp_path)
    told = [line for line in caplog.messages if "tensors that nothing reads" in line]
    # A head for masked tokens is known not to be read.
    assert [line.partition("reads: ")[2] for line in told] == ["predictions.bias"] * (head is None)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("inkling_text", "its attention takes position_bias"),
        ("deepseek_v32", "it computes with masks itself"),
        ("lfm2", "layers of the kind conv keep a state"),
    ],
)
def test_an_architecture_is_refused_with_its_reason(
    tmp_path: Path, architecture: str, reason: str
) -> None:
    make_tiny(tmp_path, architecture)
    with pytest.raises(ModelLoadError, match=reason):
        load_by_transformers(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("gemma4_text", {"global_head_dim": 512}, "heads of 512 elements: more than 256"),
        (
            "minimax_m3_vl_text",
            {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
            "its attention takes block_indices",
        ),
    ],
)
def test_published_sizes_of_what_passes_as_a_tiny_model_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    fields: dict[str, Any],
    reason: str,
) -> None:
    own = tiny.EXCEPTIONS.get(architecture, {})
    monkeypatch.setitem(tiny.EXCEPTIONS, architecture, own | fields)
    make_tiny(tmp_path, architecture)
    with pytest.raises(ModelLoadError, match=reason):
        load_by_transformers(tmp_path)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "bert", "bert")
    directory = changed(tmp_path / "bert", tmp_path / "copy", is_decoder=False)
    with pytest.raises(ModelLoadError, match="attend to later ones"):
        load_by_transformers(directory)


def test_pickles_are_refused(phi: Path, tmp_path: Path) -> None:
    directory = changed(phi, tmp_path / "copy")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="only pickle checkpoints"):
        load_by_transformers(directory)


@pytest.mark.parametrize("length", [0, 50, -100])
def test_a_truncated_file_is_refused_as_one(phi: Path, tmp_path: Path, length: int) -> None:
    file = changed(phi, tmp_path / "copy") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelLoadError, match="its weights cannot be read: "):
        load_by_transformers(file.parent)


def test_files_that_a_checkpoint_may_not_bring_are_refused(phi: Path, tmp_path: Path) -> None:
    adapted = changed(phi, tmp_path / "adapted")
    (adapted / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="adapters are not supported"):
        load_by_transformers(adapted)
    sharded = changed(phi, tmp_path / "sharded")
    (sharded / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="is not the name of a file next to the index"):
        load_by_transformers(sharded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", ["more than attention", "positions"])
def test_the_trial_sees_what_structure_does_not_tell(
    phi: Path, monkeypatch: pytest.MonkeyPatch, what: str, dtype: str
) -> None:
    """A layer that looks at its neighbour, and positions that start elsewhere."""

    class Leaky(Body):
        def __init__(self, module: Any, base: nn.Module) -> None:
            super().__init__(module, base)
            if what == "positions":
                self._takes_positions = False
            else:
                base.layers[1].mlp.register_forward_pre_hook(
                    lambda _, given: (
                        given[0] + given[0].roll(1, dims=1) * (given[0].shape[1] > 1),
                    )
                )

    monkeypatch.setattr(trial, "Body", Leaky)
    with pytest.raises(ModelLoadError, match="does not g"):
        load_by_transformers(phi, LoadOptions(dtype=dtype))


@pytest.mark.parametrize("architecture", ["gpt_oss", "roberta"])
def test_rounding_is_no_reason(tmp_path: Path, architecture: str) -> None:
    make_tiny(tmp_path, architecture)
    model = load_by_transformers(tmp_path, LoadOptions(dtype="bfloat16"))
    # Positions behind the padding token's are told from rounding, too.
    assert model.spec.max_positions == 256 - (architecture == "roberta")


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


@pytest.mark.parametrize(
    ("sees", "size", "reach"),
    [
        (causal, None, Reach()),
        (lambda b, h, q, k: (k <= q) & (k > q - 5), 5, Reach(window=5)),
        (lambda b, h, q, k: (k <= q) & (k > q - 1), 1, Reach(window=1)),
        (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), 8, Reach(chunk=8)),
        (lambda b, h, q, k: q >= 0, None, Reach(ahead=ALL_AHEAD)),
        (lambda b, h, q, k: abs(q - k) <= 5, 5, Reach(window=6, ahead=5)),
        (lambda b, h, q, k: abs(q - k) < 5, 5, Reach(window=5, ahead=4)),
        # Of one pair of tokens at a time.
        (lambda b, h, q, k: bool(k <= q) and bool(k > q - 5), 5, Reach(window=5)),
        (lambda b, h, q, k: q.item() - 5 < k.item() <= q.item(), 5, Reach(window=5)),
    ],
)
def test_what_a_mask_lets_through(sees: Callable[..., Any], size: int | None, reach: Reach) -> None:
    assert reach_of(sees, size, CPU) == reach


@pytest.mark.parametrize(
    ("sees", "size"),
    [
        (lambda b, h, q, k: k <= q + 1, None),
        (lambda b, h, q, k: q >= 0, 5),
        (lambda b, h, q, k: abs(q - k) <= 5, None),
        (lambda b, h, q, k: (k <= q + 1) | (k == q + 3), None),
        (lambda b, h, q, k: (abs(q - k) <= 5) & (k != q - 3), 5),
        (lambda b, h, q, k: k < q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 5), None),
        (lambda b, h, q, k: (k <= q) & (k % 2 == 0), 4),
        (lambda b, h, q, k: (k <= q) & (k > q - 6), 5),
        (lambda b, h, q, k: torch.zeros(3)[q] > k, None),
    ],
)
def test_other_masks_are_refused(sees: Callable[..., Any], size: int | None) -> None:
    with pytest.raises(ModelLoadError):
        reach_of(sees, size, CPU)


def test_a_mask_is_asked_about_all_keys_at_once_and_once_for_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        asked.append(key)
        return (key <= query) & (key > query - 4096)

    assert reach_of(sees, 4096, CPU) == Reach(window=4096)
    assert len(asked) < 10
    found: list[Reach] = []

    def noted(*given: Any) -> Reach:
        found.append(reach_of(*given))
        return found[-1]

    monkeypatch.setattr(recording, "reach_of", noted)
    make_tiny(tmp_path, "gpt_oss")
    assert len(load_by_transformers(tmp_path).mixers) == 4
    assert sorted(found, key=str) == [Reach(window=12), Reach()]


def test_rope_that_depends_on_the_longest_of_a_pass_ends_where_it_begins_to() -> None:
    from transformers import LlamaConfig

    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    limits = {
        kind: position_limit(LlamaConfig(**sizes, rope_parameters=rope))[0]
        for kind, rope in {
            "default": {"rope_type": "default", "rope_theta": 10000.0},
            "longrope": longrope,
            "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        }.items()
    }
    assert limits == {"default": 256, "longrope": 64, "dynamic": 256}


def test_sequences_are_no_longer_than_positions(tmp_path: Path) -> None:
    make_tiny(tmp_path, "roberta")
    assert load_by_transformers(tmp_path).spec.max_positions == 255
    with pytest.raises(ModelLoadError, match=r"exceeds .*255"):
        load_by_transformers(tmp_path, LoadOptions(max_model_len=256))


def test_chunks_that_the_trial_crosses_are_attended_to(tmp_path: Path) -> None:
    make_tiny(tmp_path / "whole", "llama4_text")
    path = changed(tmp_path / "whole", tmp_path / "cut", attention_chunk_size=6)
    windows = {layer.window for layer in load_by_transformers(path).kv_cache_spec()}
    assert windows == {None, Chunk(6)}


def test_positions_of_a_decoder_beside_an_encoder_are_a_bound(tmp_path: Path) -> None:
    make_tiny(tmp_path, "whisper")
    assert load_by_transformers(tmp_path).spec.max_positions == 448
    with pytest.raises(ModelLoadError, match="exceeds max_target_positions: 448 tokens"):
        load_by_transformers(tmp_path, LoadOptions(max_model_len=449))


def test_a_native_family_goes_first(phi: Path, tmp_path: Path) -> None:
    assert choose_implementation(phi, "auto").name == "transformers"
    assert choose_implementation(phi, "native").name == "native"
    llama = changed(phi, tmp_path / "copy", architectures=["LlamaForCausalLM"])
    assert choose_implementation(llama, "auto").name == "native"
    unnamed = changed(phi, tmp_path / "unnamed", architectures=None, model_type="llama")
    assert choose_implementation(unnamed, "auto").name == "native"
    strange = changed(phi, tmp_path / "strange", architectures=[[]], model_type="llama")
    assert choose_implementation(strange, "auto").name == "transformers"
    assert choose_implementation(llama, "transformers").name == "transformers"
