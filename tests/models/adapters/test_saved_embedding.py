"""Adapters that PEFT has saved with the embedding and the head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from src import LLM, SamplingParams
from src.core.errors import ModelLoadError
from src.models import load_model
from src.models.adapters import reader
from src.models.adapters.memory import AdapterRoom
from src.models.adapters.reader import AdapterWeights, read_adapter
from src.models.loading.options import LoadOptions
from src.models.model import Model
from tests.support.adapters import make_adapter
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import small_config
from tests.support.gguf_files import Type, write_gguf

PREFIX = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), num_hidden_layers=1, tokenizer=True,
        tie_word_embeddings=request.param,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return load_model(checkpoint, LoadOptions(adapters=AdapterRoom(1, 8)))


@pytest.fixture
def adapter(checkpoint: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "it", load_reference(checkpoint), targets=("q_proj",))


def base_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(checkpoint / "model.safetensors")
    return {EMBEDDING: tensors[EMBEDDING], HEAD: tensors.get(HEAD, tensors[EMBEDDING])}


def save_with(adapter: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path = adapter / "adapter_model.safetensors"
    more = {f"{PREFIX}{name}": each.clone().contiguous() for name, each in tensors.items()}
    save_file(load_file(path) | more, path)


def read(adapter: Path, model: Model) -> AdapterWeights:
    assert model.adapters is not None
    return read_adapter(
        adapter, model.adapters.targets, max_rank=8, dtype=torch.float32, base=model.adapters.base
    )


def test_the_models_own_are_passed_over(checkpoint: Path, adapter: Path, model: Model) -> None:
    alone = read(adapter, model)
    save_with(adapter, base_of(checkpoint))
    both = read(adapter, model)
    assert both.digest == alone.digest
    assert both.updates.keys() == alone.updates.keys()
    save_with(adapter, {name: each.double() for name, each in base_of(checkpoint).items()})
    assert read(adapter, model).digest == alone.digest


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
@pytest.mark.parametrize("change", ["first", "last", "rounded", "rows", "integers"])
def test_others_are_refused_by_the_tensors_name(
    name: str, change: str, checkpoint: Path, adapter: Path, model: Model
) -> None:
    own = base_of(checkpoint)[name]
    changed = own.clone()
    changed[0 if change == "first" else -1, 0] += 1e-3
    others: dict[str, Any] = {
        "rounded": own.half(), "rows": torch.cat((own, own[:1])), "integers": own.to(torch.int32),
    }  # fmt: skip
    save_with(adapter, {name: others.get(change, changed)})
    message = "adapters that change the"
    with pytest.raises(ModelLoadError, match=rf"{PREFIX}{name} .*{message}"):
        read(adapter, model)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_those_of_a_quantized_base_cannot_be_compared(
    name: str, kind: Type, checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    """A converter wrote blocks of the numbers: what was saved is neither those nor others."""
    file = write_gguf(tmp_path / "base.gguf", checkpoint, "llama", lambda _: kind)
    model = load_model(file, LoadOptions(adapters=AdapterRoom(1, 8)))
    alone = read(adapter, model)
    own = base_of(checkpoint)[name]
    save_with(adapter, {name: own})
    with pytest.raises(ModelLoadError, match=rf"{PREFIX}{name}: .* quantized, .*save_embedding"):
        read(adapter, model)
    save_with(adapter, {name: torch.cat((own, own[:1]))})
    with pytest.raises(ModelLoadError, match=rf"{PREFIX}{name} .*change the vocabulary"):
        read(adapter, model)
    assert alone.updates


def test_an_embedding_may_be_wider_than_the_quantized_one(
    checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How large a file may be is no reason for another refusal."""
    file = write_gguf(tmp_path / "base.gguf", checkpoint, "llama", lambda _: Type.Q4_0)
    model = load_model(file, LoadOptions(adapters=AdapterRoom(1, 8)))
    monkeypatch.setattr(reader, "_MOST_OTHER_BYTES", 4096)
    save_with(adapter, {name: each.double() for name, each in base_of(checkpoint).items()})
    with pytest.raises(ModelLoadError, match="the model's own is quantized"):
        read(adapter, model)


def test_whoever_does_not_know_the_base_refuses_them(
    checkpoint: Path, adapter: Path, model: Model
) -> None:
    save_with(adapter, {EMBEDDING: base_of(checkpoint)[EMBEDDING][:4]})
    assert model.adapters is not None
    with pytest.raises(ModelLoadError, match=r"embed_tokens\.weight' is no update"):
        read_adapter(adapter, model.adapters.targets, max_rank=8, dtype=torch.float32)


def test_an_engine_serves_it(checkpoint: Path, adapter: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = []
    for saved in ({}, base_of(checkpoint)):
        save_with(adapter, saved)
        config = small_config(checkpoint, lora__adapters={"it": str(adapter)}, lora__max_rank=8)
        with LLM(config) as llm:
            texts.append(llm.generate(["Once upon"], params, lora="it")[0].token_ids)
    assert texts[0] == texts[1]
