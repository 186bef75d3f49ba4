"""Vocabularies of GGUF files that ask for hours and gigabytes, and wrong lists of kinds."""

from __future__ import annotations

import logging
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import ModelLoadError
from src.core.gguf_tokens import CONTROL, NORMAL, PREFIX, UNKNOWN, GGUFTokens
from src.models.gguf.configuration import read_configuration
from src.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.slowness import slowness
from tests.text.test_gguf_tokenizer import write_sentencepiece

Change = Callable[[dict[str, Any]], None]


def more(tokens: list[str], kind: int = 1) -> Change:
    """Adds tokens of a kind to a file."""

    def change(own: dict[str, Any]) -> None:
        own["tokens"] += tokens
        own["kinds"] += [kind] * len(tokens)
        own["scores"] += [-1.0] * len(tokens)

    return change


BOMBS: dict[str, tuple[list[str], int, str]] = {
    "a token that is a whole file": (["a" * 4_000_000], 1, "at most 4096 characters, got one of"),
    "a control token as long": (["b" * 4_000_000], 3, "at most 4096 characters, got one of"),
    "a long piece": (["a" * 257], 1, "at most 256 characters, .*has 257"),
    "pieces of one letter": (
        [letter * i for letter in "abcdefghijklmnopqrstuvwxyz" * 2 for i in range(2, 257)],
        1,
        "texts that 1048576 merges make of one another",
    ),
    "as many characters": ([f"{i:0256}" for i in range(40_000)], 1, "and 8388608 in all"),
    "very many tags": ([f"<{i}>" for i in range(70_000)], 4, "at most 65536 tokens"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_little_time_and_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, kind, message = BOMBS[name]
    if "merges" in message:
        # As many letters as a file of 10 MB has take seconds.
        monkeypatch.setattr("src.text.gguf_tokenizer._MOST_MERGES", 100_000)
        message = message.replace("1048576", "100000")
    if "in all" in message:
        monkeypatch.setattr("src.text.gguf_tokenizer._MOST_CUTS", 1_000_000)
        message = message.replace("8388608", "1000000")
    path = write_sentencepiece(tmp_path / "m.gguf", change=more(tokens, kind))
    begun = time.thread_time()
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.ggml\.(tokens|token_type).*{message}"):
        Tokenizer.from_directory(path)
    assert time.thread_time() - begun < 5 * slowness()


def test_merges_of_long_tokens_are_bounded_by_their_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.text.gguf_tokenizer._MOST_MERGED_CHARACTERS", 100_000)
    path = write_sentencepiece(tmp_path / "m.gguf", change=more(["a" * i for i in range(2, 257)]))
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.tokens must be texts that"):
            Tokenizer.from_directory(path)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<EOT>", "[EOS]", "<turn|>")


@pytest.mark.parametrize("tag", TURN_ENDS)
@pytest.mark.parametrize("kind", [1, 4])
def test_a_known_end_of_a_turn_is_a_control_token_whatever_the_list_says(
    tag: str, kind: int, tmp_path: Path
) -> None:
    path = write_sentencepiece(tmp_path / "m.gguf", change=more([tag], kind))
    tokenizer = Tokenizer.from_directory(path)
    index = tokenizer.token_to_id(tag)
    assert index is not None
    assert index in tokenizer.special_ids
    # A prompt has it as one token, and no text shows it.
    assert list(tokenizer.encode(f"the{tag}the")).count(index) == 1
    assert tokenizer.decode([index]) == ""


def with_key(key: str, index: int) -> Any:
    return lambda writer: writer.add_uint32(f"tokenizer.ggml.{key}_token_id", index)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("of"), "llama", tokenizer=True, num_hidden_layers=1
    )


@pytest.mark.parametrize("key", ["eot", "eom"])
def test_what_the_metadata_names_as_an_end_is_a_control_token(
    key: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Even a word."""
    word = Tokenizer.from_directory(checkpoint).encode("engine")[0]
    plain = Tokenizer.from_directory(write_gguf(tmp_path / "n.gguf", checkpoint, "llama"))
    assert word not in plain.special_ids
    path = write_gguf(tmp_path / "m.gguf", checkpoint, "llama", also=with_key(key, word))
    assert word in Tokenizer.from_directory(path).special_ids
    assert word in read_configuration(path)["eos_token_id"]


def test_padding_with_the_unknown_token_leaves_it_that() -> None:
    """Files of Llama 2 do, and some do not name the unknown token besides."""
    metadata = {
        f"{PREFIX}tokens": ("<unk>", "<s>", "</s>", "<pad>"),
        f"{PREFIX}token_type": (UNKNOWN, CONTROL, CONTROL, NORMAL),
    }
    kinds = GGUFTokens(metadata | {f"{PREFIX}padding_token_id": 0}, "file").kinds
    assert kinds == [UNKNOWN, CONTROL, CONTROL, NORMAL]
    kinds = GGUFTokens(metadata | {f"{PREFIX}padding_token_id": 3}, "file").kinds
    assert kinds == [UNKNOWN, CONTROL, CONTROL, CONTROL]


@pytest.mark.parametrize(
    ("token", "is_special"), [("<pad>", True), ("[PAD]", True), ("the", False)]
)
def test_padding_is_a_control_token_unless_it_is_text(
    token: str, is_special: bool, tmp_path: Path
) -> None:
    """Some files pad with a sign, which must stay one in prompts and answers."""

    def change(own: dict[str, Any]) -> None:
        more([token])(own)
        own["bos"] = len(own["tokens"]) - 1

    tokenizer = Tokenizer.from_directory(write_sentencepiece(tmp_path / "m.gguf", change=change))
    index = tokenizer.token_to_id(token)
    assert index is not None
    assert (index in tokenizer.special_ids) == is_special
    assert (tokenizer.decode([index]) == "") == is_special


def test_a_tag_of_html_ends_no_turn(tmp_path: Path) -> None:
    def change(own: dict[str, Any]) -> None:
        own["kinds"][own["tokens"].index("</s>")] = 4
        own["eos"] = own["tokens"].index("<s>")

    path = write_sentencepiece(tmp_path / "m.gguf", change=change)
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.token_to_id("</s>") not in tokenizer.special_ids


PHI = {
    # Architecture, name -> whether white space behind tags belongs to them.
    "by the architecture": ("phi3", None, True),
    "by the name": ("llama", "Phi-3 Mini 4k", True),
    "neither": ("llama", "Tiny", False),
}


@pytest.mark.parametrize("name", PHI)
def test_tags_of_phi_3_take_the_white_space_behind_them(name: str, tmp_path: Path) -> None:
    """As in the model's own tokenizer.json: not behind <s>, <unk> and <|endoftext|>."""
    architecture, model, strips = PHI[name]

    def change(own: dict[str, Any]) -> None:
        more(["<|user|>", "<|end|>", "<|endoftext|>"], 3)(own)
        own["name"] = model

    tokenizer = Tokenizer.from_directory(
        write_sentencepiece(tmp_path / "m.gguf", architecture, change)
    )

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    for tag in ("<|user|>", "<|end|>", "</s>"):
        assert (ids(f"{tag}\n the") == ids(f"{tag}the")) == strips, tag
    for tag in ("<|endoftext|>", "<s>"):
        assert ids(f"{tag}\n the") != ids(f"{tag}the"), tag


def test_a_file_that_does_not_say_how_text_is_split_warns(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_directory(write_gguf(tmp_path / "m.gguf", checkpoint, "llama"))
    assert not caplog.records
    monkeypatch.setattr("gguf.GGUFWriter.add_tokenizer_pre", lambda writer, pre: None)
    path = write_gguf(tmp_path / "n.gguf", checkpoint, "llama")
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_directory(path)
    (record,) = caplog.records
    assert "has no tokenizer.ggml.pre" in record.getMessage()
