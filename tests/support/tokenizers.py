"""Real but small tokenizers of every common kind, trained on demand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It doesn't stop, they're fast!",
    "Hello world, hello tokens: streaming text piece by piece, token by token.",
    "def main():\n    return {'a': 1, \"b\": [2, 3]}\n\n# a comment\n",
    "北京是中华人民共和国的首都。東京は日本の首都です。서울은 대한민국의 수도이다.",
    "Grüße aus München, à bientôt, señor, Привет мир, שלום עולם, مرحبا",
    "🙂 👩‍👩‍👧‍👦 🇩🇪 e\u0301 ﬁ ① 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🤖🚀",
    "1 2 3 12 123 1234 3.14 1,000,000 <tag> [x] user assistant system",
]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>"]


@functools.cache
def byte_level(vocab_size: int = 480) -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen; also has an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    tokenizer.add_special_tokens(["<｜deep｜>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return tokenizer


@functools.cache
def byte_fallback(strip: bool = True) -> Tokenizer:
    """BPE with byte fallback as in Llama 2 (``strip``) and Gemma (without)."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    latin = [text for text in CORPUS if text.isascii()]
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(
        latin * 4,
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=["<unk>", *SPECIAL, *byte_tokens], show_progress=False
        ),
    )
    learnt = json.loads(learner.to_str())["model"]
    model = models.BPE(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1, right=0)] if strip else steps
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ["<unk>", *SPECIAL]])
    return tokenizer


@functools.cache
def unigram() -> Tokenizer:
    """Unigram with the Metaspace decoder, as in T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


@functools.cache
def word_piece() -> Tokenizer:
    """WordPiece with its decoder's clean-up, as in BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


@functools.cache
def word_level() -> Tokenizer:
    """Whole words without a decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


BUILDERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_no_strip": functools.partial(byte_fallback, strip=False),
    "unigram": unigram,
    "word_piece": word_piece,
    "word_level": word_level,
}
"""Kind -> function that makes it."""


def save(tokenizer: Tokenizer, directory: Path, config: dict[str, Any] | None = None) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` as in a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **(config or {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return directory
