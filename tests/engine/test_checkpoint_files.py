"""A directory with the files of older tools serves what transformers makes of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from src import LLM, SamplingParams
from src.core.errors import ModelLoadError
from src.models.checkpoint import TensorReader
from tests.support.checkpoints import load_reference, make_checkpoint, save_tokenizer
from tests.support.engines import greedy, small_config

CHAT = [{"role": "user", "content": "Say <|x|> it's 42."}]


def old_files(directory: Path) -> None:
    """Rewrite the files of a checkpoint as older tools, trainers and converters leave them."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").unlink()
    merges = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (directory / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    change(
        directory / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", unk_token="<|pad|>"
    )
    size = len(tokenizer["model"]["vocab"])
    (directory / "added_tokens.json").write_text(json.dumps({"<|x|>": size}))
    extra = {"additional_special_tokens": ["<|x|>"]}
    (directory / "special_tokens_map.json").write_text(json.dumps(extra))
    change(directory / "config.json", architectures=None)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00009.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_old_files_serve_what_transformers_makes_of_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    # Wide enough for the token that is added.
    make_checkpoint(tmp_path, num_hidden_layers=1, vocab_size=330)
    save_tokenizer(tmp_path, 320)
    old_files(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    prompt = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert theirs.convert_tokens_to_ids("<|x|>") in prompt
    with LLM(small_config(tmp_path)) as llm:
        (result,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=8))
    assert result.prompt_token_ids == prompt
    assert result.token_ids == greedy(load_reference(tmp_path), prompt, 8)
    assert result.text == theirs.decode(result.token_ids, skip_special_tokens=True)


def test_without_a_tokenizer_not_all_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read beside them, so they may have begun; they take minutes where it takes one look."""
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    (tmp_path / "tokenizer.json").write_text("{")
    pieces = 0
    read = TensorReader.read

    def slowly(self: TensorReader, *args: Any) -> None:
        nonlocal pieces
        pieces += 1
        time.sleep(0.5)
        read(self, *args)

    monkeypatch.setattr(TensorReader, "read", slowly)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        LLM(small_config(tmp_path))
    assert pieces <= 4
