"""Tokenizers of GGUF files, against transformers on the same file and on the original."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from src.core.errors import ModelLoadError
from src.text.tokenizer import Tokenizer
from tests.support.checkpoints import CHAT_TEMPLATE, make_checkpoint
from tests.support.gguf_files import write_gguf

TEXTS = (
    "Once upon a time there was a small engine.",
    "It's 12345 o'clock, DON'T\n\n\n  wait!  \t42\r\n",
    "Größe, naïveté, 漢字, привет, 🙂.",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x**2  # ok\n",
    "",
)


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
    for text in TEXTS:
        ids = list(own.encode(text))
        assert ids == list(original.encode(text)) == theirs(text)["input_ids"]
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
    for text in ("Hello world", "the end, and on the road 42!", "näïve 漢 🙂", "a  b   c", "the\n"):
        ids = list(own.encode(text))
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [1, *expected]
        assert own.decode(ids[1:]) == text
    assert list(own.encode("a<tool>b</s>"))[2:3] == [3]
    assert own.special_ids == {1, 2}


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
