"""Families whose hidden states leave the range of float16, with checkpoints that are float16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from src import LLM, SamplingParams
from src.core.errors import GenerationError
from src.models import load_model
from src.models.loading.loader import outline_model
from src.models.loading.options import LoadOptions
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import small_config
from tests.support.gguf_files import Type, write_gguf

WIDE = ("gemma2", "gemma3", "glm4")
NARROW = ("llama", "qwen2")


def in_float16(folder: Path, family: str) -> Path:
    """A checkpoint in float16 whose hidden states reach a few hundred thousand."""
    checkpoint = make_checkpoint(folder / family, family, tokenizer=True)
    for file in checkpoint.glob("*.safetensors"):
        tensors = {name: each.half() for name, each in load_file(file).items()}
        for name in tensors:
            if "post_feedforward" in name or "post_mlp" in name:
                tensors[name] = torch.full_like(tensors[name], 6e4)
        save_file(tensors, file, {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["dtype"] = "float16"
    (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint


@pytest.mark.parametrize("family", [*WIDE, *NARROW])
def test_a_checkpoint_in_float16_keeps_it_unless_the_family_leaves_its_range(
    family: str, tmp_path: Path
) -> None:
    checkpoint = in_float16(tmp_path, family)
    own = torch.bfloat16 if family in WIDE else torch.float16
    assert load_model(checkpoint).spec.dtype == outline_model(checkpoint).spec.dtype == own
    for name in ("float16", "float32"):
        assert outline_model(checkpoint, LoadOptions(dtype=name)).spec.dtype == getattr(torch, name)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "llama"])
def test_so_does_a_gguf_file(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / family, family, tie_word_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", checkpoint, family, lambda name: Type.F16)
    own = torch.float16 if family == "llama" else torch.bfloat16
    assert load_model(path).spec.dtype == own


@pytest.mark.parametrize("family", ["gemma2", "glm4"])
def test_answers_that_were_none_are_some(family: str, tmp_path: Path) -> None:
    checkpoint = in_float16(tmp_path, family)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(small_config(checkpoint)) as llm:
        assert llm.engine.model_info.dtype == "bfloat16"
        (result,) = llm.generate(["Once upon a time"], params)
        assert len(result.token_ids) == 3
    narrow = small_config(checkpoint, model__dtype="float16")
    with (
        LLM(narrow) as llm,
        pytest.raises(GenerationError, match=r"model\.dtype may be too narrow"),
    ):
        llm.generate(["Once upon a time"], params)
