"""Tokenizers of GGUF files, against transformers on the same file and on the original."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from src.core.errors import ModelLoadError
from src.text.tokenizer import Tokenizer
from tests.support.checkpoints import CHAT_TEMPLATE, make_checkpoint
from tests.support.gguf_files import gguf, write_gguf

TEXTS = (
    "Once upon a time there was a small engine.",
    "It's 12345 o'clock, DON'T\n\n\n  wait!  \t42\r\n",
    "Größe, naïveté, 漢字, привет, 🙂.",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x**2  # ok\n",
    "",
)

# Where tokenizers are known to differ: emoji with joiners and colours, flags, runs of all kinds of
# white space, marks on letters before and after composition, NUL and other controls, scripts
# without spaces or from right to left, signs that are no text, and special tokens within a text.
HARD = (
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd",
    "\U0001f1e9\U0001f1ea\U0001f1eb",
    "  two   three" + " " * 40 + "forty\t\t\ttabs \t mixed\n\n \n  \r\n\r end  ",
    "\u00a0no\u00a0break\u3000wide\u2003em\u200bzero\u2028line\u2029paragraph\x85next\ufeffmark",
    "e\u0301 \u00e9 A\u030a \u00c5 \u1e9b\u0323 a\u0301\u0302\u0303\u0304 \u0344 \uac00",
    "\u1100\u1161 \ufb01",
    "nul\0within\0\0 bell\x07 escape\x1b[0m delete\x7f high\x9c",
    "\u4e2d\u6587\u6ca1\u6709\u7a7a\u683c\u3002"
    "\u0e44\u0e17\u0e22\u0e44\u0e21\u0e48\u0e40\u0e27\u0e49\u0e19",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0661\u0662\u0663 \u0967\u0968",
    "\ud7ff\ue000\ufffd\ufffe\uffff\U00010000\U0010ffff\U000e0041",
    "a<|im_start|>b<|im_end|>c <|im_end|> \n<|im_end|>\n<|im_start|><|im_start|>",
    "<|im_end <|im_end |> |im_end|> <|im_\u200bend|> <|IM_END|>",
    "I'LL we'd 'twas don\u2019t CamelCase snake_case x86-64 1234567.89e-10",
    "\u00bd\u00b2\u2167 \u0130\u0131\u017f",
    " ", "\n", "\0", "\u0301", "\u200d", "   \n   ",
)  # fmt: skip


def reference(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("of"), "llama", tokenizer=True, num_hidden_layers=1
    )


def test_byte_level_ids_are_those_of_the_original_and_of_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", checkpoint, "llama")
    own, original, theirs = (
        Tokenizer.from_directory(path),
        Tokenizer.from_directory(checkpoint),
        reference(path),
    )
    for text in (*TEXTS, *HARD):
        ids = list(own.encode(text))
        assert ids == list(original.encode(text)) == theirs(text)["input_ids"], text
        assert own.decode(ids) == original.decode(ids)
    assert own.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
    }
    assert own.special_ids == original.special_ids
    assert own.eos_token_id == 2
    messages = [{"role": "user", "content": "hi"}]
    assert own.chat_template.sources == {"default": CHAT_TEMPLATE}
    assert own.chat_template.render(messages) == original.chat_template.render(messages)


# A vocabulary of SentencePiece: specials, bytes, then pieces, the best first.
_PIECES = (
    *("\u2581t", "he", "\u2581a", "in", "\u2581the", "er", "on", "\u2581in", "nd", "\u2581and"),
    *("at", "re", "\u2581th", "\u2581on", "or", "\u2581H", "ell", "\u2581Hell", "\u2581Hello"),
    *("ll", "lo", "\u2581w", "\u2581wor", "ld", "\u2581world"),
)
_LETTERS = "\u2581 abcdefghijklmnopqrstuvwxyzHDT.,!'0123456789".replace(" ", "")


def write_sentencepiece(
    path: Path, architecture: str = "llama", change: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    """A file with nothing but a tokenizer of SentencePiece."""
    own = {"<unk>": 2, "<s>": 3, "</s>": 3, "<tool>": 4}
    tokens = [*own, *(f"<0x{i:02X}>" for i in range(256)), *_PIECES, *_LETTERS]
    kinds = [*own.values(), *[6] * 256, *[1] * (len(_PIECES) + len(_LETTERS))]
    scores = [*[0.0] * 260, *(-float(i) for i in range(len(_PIECES) + len(_LETTERS)))]
    settings: dict[str, Any] = {"tokens": tokens, "kinds": kinds, "scores": scores}
    settings |= {"model": "llama", "bos": 1, "eos": 2, "unk": 0}
    if change is not None:
        change(settings)
    writer = gguf.GGUFWriter(path, architecture)
    if settings.get("name"):
        writer.add_name(settings["name"])
    writer.add_tokenizer_model(settings["model"])
    writer.add_token_list(settings["tokens"])
    writer.add_token_types(settings["kinds"])
    writer.add_token_scores(settings["scores"])
    writer.add_bos_token_id(settings["bos"])
    writer.add_eos_token_id(settings["eos"])
    writer.add_unk_token_id(settings["unk"])
    if "prefix" in settings:
        writer.add_add_space_prefix(settings["prefix"])
    if "add_bos" in settings:
        writer.add_add_bos_token(settings["add_bos"])
    if "pre" in settings:
        writer.add_tokenizer_pre(settings["pre"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    def change(settings: dict[str, Any]) -> None:
        if architecture == "gemma2":
            settings["prefix"] = False

    path = write_sentencepiece(tmp_path / "m.gguf", architecture, change)
    own, theirs = Tokenizer.from_directory(path), reference(path)
    texts = (
        "Hello world",
        "the end, and on the road 42!",
        "näïve 漢 🙂",
        "a  b   c",
        "the\n",
        *HARD,
    )
    for text in texts:
        if text in HARD and architecture == "llama":
            # A text that begins with a space gets another one before it, as in SentencePiece, in
            # llama.cpp and in Llama 2's tokenizer.json. transformers leaves it out for Llama alone.
            spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            theirs.backend_tokenizer.normalizer = normalizers.Sequence(spaces)
            theirs.backend_tokenizer.pre_tokenizer = None
        ids = list(own.encode(text))
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [1, *expected], text
        assert own.decode(ids[1:]) == text
    for text in ("a</s>b <s> c", "<tool></s>", " <tool> x"):
        if architecture == "phi3":
            # Its own tokenizer.json gives tags the white space behind them, this converter none.
            text = text.replace("<tool> ", "<tool>")
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert list(own.encode(text)) == [1, *expected], text
    assert list(own.encode("a<tool>b</s>"))[2:3] == [3]
    assert own.special_ids == {1, 2}


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-4o", "tekken", "smollm", "default"])
def test_every_pattern_splits_as_that_of_transformers(
    checkpoint: Path, tmp_path: Path, pre: str
) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(
        gguf.GGUFWriter,
        "add_tokenizer_pre",
        lambda writer, _: writer.add_string("tokenizer.ggml.pre", pre),
    )
    path = write_gguf(tmp_path / "m.gguf", checkpoint, "llama")
    patch.undo()
    own, theirs = Tokenizer.from_directory(path), reference(path).backend_tokenizer
    if pre == "smollm":
        # transformers has not got it. As the checkpoint's own tokenizer.json has it.
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    for text in (*TEXTS, *HARD):
        text = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        ids = list(own.encode(text))
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert own.decode(ids, skip_special_tokens=False) == text


def test_a_file_says_whether_a_text_begins_with_a_token(tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "m.gguf", change=lambda own: own.update(add_bos=False))
    assert 1 not in Tokenizer.from_directory(path).encode("the")


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another kind": (lambda own: own.update(model="bert"), "'bert' is not read; read are gpt2"),
    "an id behind the end": (lambda own: own.update(bos=10**6), "bos_token_id must be the id of"),
    "kinds that are too few": (lambda own: own["kinds"].pop(), "token_type must have"),
    "scores that are too few": (lambda own: own["scores"].pop(), "scores must have"),
    "another pattern": (
        lambda own: own.update(model="gpt2", pre="strange"),
        "'strange' is not known; known are",
    ),
    "numbers for tokens": (
        lambda own: own.update(tokens=list(range(len(own["tokens"])))),
        "tokens must be a list of str",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = BROKEN[name]

    def with_numbers(writer: gguf.GGUFWriter, values: list[Any]) -> None:
        writer.add_array("tokenizer.ggml.tokens", values)

    patch = pytest.MonkeyPatch()
    patch.setattr(gguf.GGUFWriter, "add_token_list", with_numbers)
    path = write_sentencepiece(tmp_path / "m.gguf", change=change)
    patch.undo()
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_directory(path)


def test_merges_that_are_no_pairs_of_tokens_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for merges, message in ((["ab"], "must be pairs"), (["zzz yyy"], "cannot be built")):
        patch = pytest.MonkeyPatch()
        patch.setattr(
            gguf.GGUFWriter,
            "add_token_merges",
            lambda writer, _, own=merges: writer.add_array("tokenizer.ggml.merges", own),
        )
        path = write_gguf(tmp_path / "m.gguf", checkpoint, "llama")
        patch.undo()
        with pytest.raises(ModelLoadError, match=message):
            Tokenizer.from_directory(path)
