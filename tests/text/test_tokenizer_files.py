"""What the files of a tokenizer mean, by transformers' own reading of the same directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from src.core.errors import ModelLoadError
from src.text.tokenizer import Tokenizer
from tests.support.tokenizers import CORPUS, byte_fallback, byte_level, save

TEXT = (
    "a <s>  the <|end|> b<tool call> c  <｜deep｜> d <|extra|> e <|more|>f <plain>  g <marked> "
    "<|image|> h <|eot|> the theThe <|old|>  <|older|>i</s>"
)
SIZE = byte_level().get_vocab_size()


def flags(content: str, **given: bool) -> dict[str, Any]:
    return {
        "content": content,
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False),
        **given,
    }


def index(token: str) -> str:
    return str(byte_level().token_to_id(token))


# What stands beside `tokenizer.json`: fields of tokenizer_config.json, and other files.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flags of tokens that are there": (
        {
            "added_tokens_decoder": {
                index("<|end|>"): flags("<|end|>", special=True, lstrip=True, rstrip=True),
                index("<tool call>"): flags("<tool call>", special=True),
                index("<｜deep｜>"): flags("<｜deep｜>", rstrip=True, normalized=True),
            }
        },
        {},
    ),
    "ordinary vocabulary that is declared": (
        {"added_tokens_decoder": {index("Ġthe"): flags("Ġthe"), index("he"): flags("he")}},
        {},
    ),
    "tokens that only the declaration has": (
        {
            "added_tokens_decoder": {
                str(SIZE + 1): flags("<plain>", rstrip=True),
                str(SIZE): flags("<marked>", special=True, single_word=True),
            },
            "eos_token": "<plain>",
        },
        {},
    ),
    "a declaration without some flags": (
        {"added_tokens_decoder": {str(SIZE): {"content": "<plain>"}}},
        {},
    ),
    "an empty declaration": (
        {"added_tokens_decoder": {}, "additional_special_tokens": ["<|end|>", "<|extra|>"]},
        {"added_tokens.json": {"<|old|>": SIZE}, "special_tokens_map.json": {"eos_token": "<s>"}},
    ),
    "added_tokens.json": ({}, {"added_tokens.json": {"<|old|>": SIZE, "<|older|>": SIZE + 1}}),
    "added_tokens.json of ordinary and named tokens": (
        {"eos_token": "<|older|>"},
        {"added_tokens.json": {"<|older|>": SIZE + 1, "Ġthe": 5, "<|old|>": SIZE, "<s>": 0}},
    ),
    "added_tokens.json and a list": (
        {"extra_special_tokens": ["<|old|>"]},
        {"added_tokens.json": {"<|older|>": SIZE + 1, "<|old|>": SIZE}},
    ),
    "special_tokens_map.json": (
        {"additional_special_tokens": ["<|extra|>"]},
        {
            "special_tokens_map.json": {
                "eos_token": flags("<|eot|>", lstrip=True),
                "pad_token": "<|end|>",
                "additional_special_tokens": ["<|more|>"],
            }
        },
    ),
    "special_tokens_map.json with a list of its own": (
        {"extra_special_tokens": ["<|extra|>"]},
        {"special_tokens_map.json": {"extra_special_tokens": ["<|more|>", "<|extra|>"]}},
    ),
    "special_tokens_map.json with names": (
        {"extra_special_tokens": {"image_token": "<|image|>"}},
        {
            "special_tokens_map.json": {
                "extra_special_tokens": {"more_token": "<|more|>"},
                "additional_special_tokens": ["<|extra|>"],
            }
        },
    ),
    "names beside a list": (
        {
            "extra_special_tokens": {"image_token": "<|image|>", "more_token": "<|more|>"},
            "additional_special_tokens": ["<|extra|>", "<tool call>"],
        },
        {},
    ),
    "names beside a list and a declaration": (
        {
            "extra_special_tokens": {"image_token": "<|image|>"},
            "additional_special_tokens": ["<|extra|>"],
            "added_tokens_decoder": {str(SIZE): flags("<|image|>", special=True, lstrip=True)},
        },
        {},
    ),
    "two lists": (
        {"extra_special_tokens": ["<|more|>"], "additional_special_tokens": ["<|extra|>"]},
        {},
    ),
    "no names beside a list": (
        {"extra_special_tokens": {}, "additional_special_tokens": ["<|extra|>"]},
        {},
    ),
    "a named token that is not special": (
        {"eos_token": "<tool call>", "added_tokens_decoder": {}},
        {},
    ),
    "special tokens that are split": ({"split_special_tokens": True}, {}),
    "names that are null": ({"bos_token": None, "unk_token": None, "image_token": None}, {}),
}


@pytest.mark.parametrize("case", BESIDE)
def test_files_beside_a_tokenizer_mean_what_transformers_reads(tmp_path: Path, case: str) -> None:
    config, files = BESIDE[case]
    # A copy: what others share is not changed.
    directory = save(Backend.from_str(byte_level().to_str()), tmp_path, config)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    check(directory)


def check(directory: Path, *texts: str) -> Any:
    """Ours is transformers' tokenizer of the same directory, in all that can be seen."""
    from transformers import AutoTokenizer

    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours = Tokenizer.from_directory(directory)
    theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    added = theirs.added_tokens_decoder
    assert ours.added_tokens == {i: token.content for i, token in added.items()}
    own = ours._backend.get_added_tokens_decoder()
    assert {i: t.__getstate__() for i, t in own.items()} == {
        i: t.__getstate__() for i, t in added.items()
    }
    left_out = {i for i in added if theirs.decode([i], skip_special_tokens=True) == ""}
    assert ours.special_ids == left_out
    for text in (TEXT, *CORPUS, *texts):
        for adds in (True, False):
            ids = ours.encode(text, add_special_tokens=adds)
            assert ids == theirs.encode(text, add_special_tokens=adds)
        for skips in (True, False):
            assert ours.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips)
    return theirs


def split_up(backend: Backend, directory: Path, config: dict[str, Any]) -> Path:
    """The vocabulary and merges of a BPE tokenizer, each in its file, and no tokenizer.json."""
    model = json.loads(backend.to_str())["model"]
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


END = {"eos_token": "<|end|>", "pad_token": "<|end|>", "unk_token": "<|end|>"}


@pytest.mark.parametrize(
    ("model_type", "named", "read_by"),
    [
        ("qwen2", "Qwen2Tokenizer", "Qwen2Tokenizer"),
        ("qwen3", "Qwen2TokenizerFast", "Qwen2Tokenizer"),
        ("qwen2", None, "Qwen2Tokenizer"),
        ("llama", "GPT2Tokenizer", "GPT2Tokenizer"),
    ],
)
@pytest.mark.parametrize("declares", [False, True])
def test_a_vocabulary_and_merges_are_a_tokenizer(
    tmp_path: Path, model_type: str, named: str | None, read_by: str, declares: bool
) -> None:
    config: dict[str, Any] = END | ({"tokenizer_class": named} if named else {})
    if declares:
        config["added_tokens_decoder"] = {
            index("<|end|>"): flags("<|end|>", special=True),
            str(SIZE): flags("<|image|>", special=True, rstrip=True),
        }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = check(split_up(byte_level(), tmp_path, config), "It's 12345 o'clock")
    assert type(theirs).__name__ == read_by
    assert len(theirs.encode("The quick brown fox")) < 10


@pytest.mark.parametrize(
    ("named", "model_type", "message"),
    [
        ("LlamaTokenizer", "llama", "not what transformers reads for a tokenizer of class 'Llama"),
        (None, "llama", "cannot be converted"),
        (None, None, "cannot be converted"),
    ],
)
def test_a_vocabulary_that_nobody_reads_is_refused(
    tmp_path: Path, named: str | None, model_type: str | None, message: str
) -> None:
    config = END | ({"tokenizer_class": named} if named else {})
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_directory(split_up(byte_level(), tmp_path, config))


def test_a_vocabulary_without_merges_is_refused(tmp_path: Path) -> None:
    split_up(byte_level(), tmp_path, {})
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ModelLoadError, match=r"vocab.json and merges.txt, found none"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": ["<s>"]}, "added_tokens_decoder must be an object"),
        ({"added_tokens_decoder": {"x": {}}}, r"added_tokens_decoder\['x'\] must be an id"),
        ({"added_tokens_decoder": {"5": "<s>"}}, r"added_tokens_decoder\['5'\] must be an id"),
        ({"added_tokens_decoder": {"5": {"id": 1}}}, r"\['5'\] must be a text or an object"),
        (
            {"added_tokens_decoder": {"5": {"content": "x", "lstrip": "yes"}}},
            "lstrip must be true or false, got 'yes'",
        ),
        ({"eos_token": 5}, "eos_token must be a text or an object with content, got 5"),
        ({"eos_token": {}}, "eos_token must be a text or an object"),
        ({"extra_special_tokens": "<x>"}, "extra_special_tokens must be an object or a list"),
        ({"extra_special_tokens": [7]}, "extra_special_tokens must be a text"),
        ({"extra_special_tokens": {"x_token": 7}}, "x_token must be a text"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_directory(save(byte_level(), tmp_path, config))


def test_added_tokens_without_ids_are_refused(tmp_path: Path) -> None:
    directory = save(byte_level(), tmp_path)
    (directory / "added_tokens.json").write_text(json.dumps({"<|old|>": "7"}))
    with pytest.raises(ModelLoadError, match=r"added_tokens.json: '<\|old\|>' must have an id"):
        Tokenizer.from_directory(directory)


def test_padding_names_a_token(tmp_path: Path) -> None:
    backend = Backend.from_str(byte_fallback().to_str())
    backend.enable_padding(pad_token="<unk>", pad_id=0)
    directory = save(backend, tmp_path)
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    assert Tokenizer.from_directory(directory).special_tokens == theirs.special_tokens_map


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_what_transformers_saves_is_read_as_it_reads_it(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "old").mkdir()
    config = {"model_type": model_type}
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    named = {"qwen2": "Qwen2Tokenizer", "llama": "GPT2Tokenizer"}[model_type]
    directory = split_up(byte_level(), tmp_path / "old", END | {"tokenizer_class": named})
    grown = AutoTokenizer.from_pretrained(directory)
    grown.add_tokens(["<plain>", "<|old|>"])
    grown.add_special_tokens({"extra_special_tokens": ["<|extra|>", "<|image|>"]})
    grown.save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "config.json").write_text(json.dumps(config))
    assert (tmp_path / "new" / "tokenizer.json").exists()
    assert type(check(tmp_path / "new", "It's 12345 o'clock")).__name__ == named
