"""Adapters' directories: what is read, and what is refused by name."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from src.core.errors import ModelLoadError
from src.models import load_model
from src.models.adapters.reader import AdapterWeights, read_adapter
from src.models.adapters.targets import Targets
from src.models.loading.options import LoadOptions
from tests.support.adapters import make_adapter
from tests.support.checkpoints import load_reference, make_checkpoint

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def targets(checkpoint: Path) -> Targets:
    return Targets(load_model(checkpoint, LoadOptions(load_format="dummy")).table)


@pytest.fixture
def adapter(checkpoint: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "it", load_reference(checkpoint), targets=("q_proj",))


def read(adapter: Path, targets: Targets, **options: Any) -> AdapterWeights:
    return read_adapter(adapter, targets, **({"max_rank": 16, "dtype": torch.float32} | options))


def reconfigure(adapter: Path, **fields: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def retensor(adapter: Path, **tensors: torch.Tensor | None) -> None:
    path = adapter / "adapter_model.safetensors"
    every = {**load_file(path), **tensors}
    save_file({name: each for name, each in every.items() if each is not None}, path)


def test_parts_of_a_fused_projection(adapter: Path, targets: Targets) -> None:
    weights = read(adapter, targets)
    (name,) = weights.updates
    assert name == "layers.0.qkv_weight"
    update, stored = weights.updates[name], load_file(adapter / "adapter_model.safetensors")
    assert update.ranks == (4, 0, 0)
    assert torch.equal(update.down[0], stored[f"{Q}.lora_A.weight"])
    # Alpha 8 and rank 4: the scale is 2.
    assert torch.equal(update.up[:, :64], 2 * stored[f"{Q}.lora_B.weight"].T)
    assert not update.up[:, 64:].any()


def test_the_digest_tells_tensors_and_scales_apart(adapter: Path, targets: Targets) -> None:
    digests = [read(adapter, targets).digest]
    assert read(adapter, targets).digest == digests[0]
    reconfigure(adapter, base_model_name_or_path="another", lora_dropout=0.5)
    assert read(adapter, targets).digest == digests[0]
    reconfigure(adapter, lora_alpha=9)
    digests.append(read(adapter, targets).digest)
    reconfigure(adapter, use_rslora=True)
    digests.append(read(adapter, targets).digest)
    retensor(adapter, **{f"{Q}.lora_A.weight": torch.ones(4, 64)})
    digests.append(read(adapter, targets).digest)
    assert len(set(digests)) == 4


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("patterns", [(), ("rank",), ("alpha",), ("rank", "alpha")])
def test_a_scale_is_of_the_rank_that_the_module_has(
    checkpoint: Path, targets: Targets, tmp_path: Path, patterns: tuple[str, ...], use_rslora: bool
) -> None:
    """As in PEFT: alpha / rank, or alpha / sqrt(rank), both perhaps the module's own."""
    own = {"rank": 9, "alpha": 3}
    fields = {f"{name}_pattern": {"q_proj": own[name]} for name in patterns}
    rank, alpha = (own[name] if name in patterns else 4 for name in ("rank", "alpha"))
    adapter = make_adapter(
        tmp_path / "it",
        load_reference(checkpoint),
        targets=("q_proj",),
        rank=4,
        alpha=4,
        use_rslora=use_rslora,
        **fields,
    )
    up = load_file(adapter / "adapter_model.safetensors")[f"{Q}.lora_B.weight"]
    assert up.shape[1] == rank
    update = read(adapter, targets).updates["layers.0.qkv_weight"]
    scale = alpha / (math.sqrt(rank) if use_rslora else rank)
    torch.testing.assert_close(update.up[:, :64], scale * up.T)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, r"use_dora \(DoRA\) is not supported"),
        ({"lora_bias": True}, r"lora_bias \(a bias of its own\)"),
        ({"bias": "all"}, "bias must be none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"something_new": 1}, r"something_new \(a field that is not known here\)"),
        *(({"init_lora_weights": name}, f"init_lora_weights must be .* got '{name}'")
          for name in ("pissa", "pissa_niter_16", "olora", "eva", "loftq", "corda")),
        ({"init_lora_weights": ["pissa"]}, "init_lora_weights must be"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type must be one of CAUSAL_LM, FEATURE_EXTRACTION"),
        ({"r": 17}, "r must be an integer from 1 to lora.max_rank = 16, got 17"),
        ({"r": 0}, "r must be an integer"),
        ({"r": True}, "r must be an integer"),
        ({"r": 10**400}, "r must be an integer"),
        ({"r": "8"}, "r must be an integer"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
        ({"rank_pattern": {"q_proj": 99}}, "rank_pattern must be ranks"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"(.*)*x": 1}}, "alpha_pattern must give numbers for names of modules"),
        ({"rank_pattern": {"q_proj": 2}}, r"lora_A of .* must be \[2, 64\], since the rank is 2"),
    ],
)  # fmt: skip
def test_what_a_configuration_asks_for_is_refused_by_name(
    adapter: Path, targets: Targets, fields: dict[str, Any], message: str
) -> None:
    reconfigure(adapter, **fields)
    with pytest.raises(ModelLoadError, match=message):
        read(adapter, targets)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", "lm_head is the head"),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", "is no module of this"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "of the embedding"),
        (f"{Q}.lora_magnitude_vector", "of DoRA"),
        (f"{Q}.lora_B.bias", "a bias of an adapter"),
        ("base_model.model.lm_head.weight", "modules_to_save"),
        ("x" * 5000, "no update"),
    ],
)
def test_what_tensors_ask_for_is_refused_by_name(
    adapter: Path, targets: Targets, name: str, message: str
) -> None:
    tensors = {name: torch.zeros(4, 64)}
    if name.endswith("lora_A.weight"):
        tensors[name.replace("lora_A", "lora_B")] = torch.zeros(64, 4)
    retensor(adapter, **tensors)
    with pytest.raises(ModelLoadError, match=message) as refusal:
        read(adapter, targets)
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_tensors_that_do_not_fit(adapter: Path, targets: Targets, part: str) -> None:
    name = f"{Q}.{part}.weight"
    for wrong in (torch.zeros(4, 63), torch.zeros(5, 64), torch.zeros(4), torch.zeros(64, 64, 4)):
        retensor(adapter, **{name: wrong})
        with pytest.raises(ModelLoadError, match=rf"{part} of .*q_proj must be"):
            read(adapter, targets)
    for wrong in (torch.nan, torch.inf):
        shape = (4, 64) if part == "lora_A" else (64, 4)
        retensor(adapter, **{name: torch.full(shape, wrong)})
        with pytest.raises(ModelLoadError, match=rf"{part} of .*q_proj has values that"):
            read(adapter, targets)
    retensor(adapter, **{name: torch.zeros((4, 64), dtype=torch.uint8)})
    with pytest.raises(ModelLoadError, match="has dtype"):
        read(adapter, targets)
    retensor(adapter, **{name: None})
    with pytest.raises(ModelLoadError, match=rf"q_proj has no {part}"):
        read(adapter, targets)


def test_values_that_the_models_dtype_does_not_hold(adapter: Path, targets: Targets) -> None:
    retensor(adapter, **{f"{Q}.lora_B.weight": torch.full((64, 4), 6e4)})
    assert read(adapter, targets).nbytes
    with pytest.raises(ModelLoadError, match="values that float16 does not hold"):
        read(adapter, targets, dtype=torch.float16)


def test_files_that_are_none(adapter: Path, targets: Targets) -> None:
    tensors, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    with pytest.raises(ModelLoadError, match="truncated"):
        read(adapter, targets)
    tensors.write_bytes(struct.pack("<Q", 2**60) + whole)
    with pytest.raises(ModelLoadError, match="truncated"):
        read(adapter, targets)
    # Parsing a header keeps all other threads waiting.
    tensors.write_bytes(struct.pack("<Q", 90_000) + b"{}".ljust(90_000) + whole)
    with pytest.raises(ModelLoadError, match=r"its header has 90000 bytes, at most \d+"):
        read(adapter, targets)
    with tensors.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelLoadError, match=r"has 1099511627776 bytes, at most \d+ are read"):
        read(adapter, targets)
    tensors.unlink()
    (adapter / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match="a pickled adapter, which can run code"):
        read(adapter, targets)
    # Reading from a pipe would wait forever.
    os.mkfifo(tensors)
    with pytest.raises(ModelLoadError, match=r"has no file adapter_model\.safetensors"):
        read(adapter, targets)
    for text, message in (("[" * 100_000, "too deeply"), ("{", "cannot be read"), ("[]", "object")):
        config.write_text(text)
        with pytest.raises(ModelLoadError, match=message):
            read(adapter, targets)
    config.write_text("{" + " " * 2**20 + "}")
    with pytest.raises(ModelLoadError, match="at most 1048576 are read"):
        read(adapter, targets)


def test_experts_and_routers_are_refused_by_name(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "mixtral", num_hidden_layers=1)
    targets = Targets(load_model(directory, LoadOptions(load_format="dummy")).table)
    with pytest.raises(ModelLoadError, match="is an expert"):
        targets.find("model.layers.0.block_sparse_moe.experts.0.w1")
    with pytest.raises(ModelLoadError, match="is a router"):
        targets.find("model.layers.0.block_sparse_moe.gate")
    assert targets.find("model.layers.0.self_attn.o_proj").parameter == "layers.0.output_weight"
