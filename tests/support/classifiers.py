"""Small random classifiers in Hugging Face layout, and what transformers says by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.support.checkpoints import make_checkpoint, save_tokenizer
from tests.support.encoders import ENCODER_CLASSES, make_encoder, save_encoder_tokenizer

SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"

# Family -> what transformers' names of its classes begin with.
DECODER_STEMS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3Text",
}
FAMILIES = (*ENCODER_CLASSES, *DECODER_STEMS)


def make_classifier(
    directory: Path, name: str, ending: str = SEQUENCE, *, labels: int = 3, **overrides: Any
) -> Path:
    """Save a random classifier of a family, with a tokenizer; returns `directory`."""
    named = {number: f"kind {number}" for number in range(labels)}
    fields = {"id2label": named, "label2id": {text: n for n, text in named.items()}}
    if name in ENCODER_CLASSES:
        make_encoder(directory, name, class_ending=ending, **fields, **overrides)
        save_encoder_tokenizer(directory)
        return directory
    kind = f"{DECODER_STEMS[name]}{ending}"
    return make_checkpoint(directory, name, class_name=kind, tokenizer=True, **fields, **overrides)


def with_words(directory: Path) -> Path:
    """A tokenizer with the tokens "yes" and "no" beside the checkpoint."""
    save_tokenizer(directory, 300)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def load_classifier_reference(directory: Path, ending: str = SEQUENCE) -> Any:
    """The checkpoint in transformers: eager attention, evaluation mode."""
    import transformers

    kind = f"AutoModel{ending}"
    model = getattr(transformers, kind).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def reference_logits(reference: Any, tokens: list[int], types: list[int] | None = None) -> Any:
    """The head's numbers, float64 [labels] or [tokens, labels]."""
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    return reference(torch.tensor([tokens]), **given).logits[0].double()
