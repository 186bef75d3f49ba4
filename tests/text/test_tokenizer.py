from __future__ import annotations

import functools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from src.core.errors import InvalidRequestError, ModelLoadError
from src.text.tokenizer import Tokenizer
from tests.support.tokenizers import BUILDERS, CORPUS, byte_level, save, word_level


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ours and transformers' tokenizer of the same directory."""
    from transformers import PreTrainedTokenizerFast

    @functools.cache
    def load_both(kind: str, clean_up: bool = False) -> tuple[Tokenizer, Any]:
        config = {"clean_up_tokenization_spaces": clean_up}
        directory = save(BUILDERS[kind](), tmp_path_factory.mktemp(kind), config)
        ours = Tokenizer.from_directory(directory)
        return ours, PreTrainedTokenizerFast.from_pretrained(directory)

    return load_both


@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("kind", BUILDERS)
@given(data=st.data())
def test_encode_and_decode_equal_transformers(
    kind: str, clean_up: bool, load: Any, data: st.DataObject
) -> None:
    ours, theirs = load(kind, clean_up)
    special = data.draw(st.booleans())
    words = st.sampled_from([*CORPUS, "<s>", "<|end|>", "<tool call>", " 's", " , x", "."])
    text = "".join(data.draw(st.lists(words | st.text(max_size=5), max_size=5)))
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    ids += data.draw(st.lists(st.integers(0, ours.vocab_size + 2), max_size=5))
    assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
        ids, skip_special_tokens=special
    )


@pytest.mark.parametrize("kind", BUILDERS)
def test_vocabulary_equals_transformers(kind: str, load: Any) -> None:
    ours, theirs = load(kind)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_tokens == theirs.special_tokens_map
    assert set(theirs.all_special_ids) <= ours.special_ids
    for token, token_id in theirs.get_vocab().items():
        assert ours.token_to_id(token) == token_id
        assert ours.id_to_token(token_id) == token
    assert ours.id_to_token(ours.vocab_size + 7) is None
    assert ours.token_bytes(ours.vocab_size + 7) == b""


DECLARED = {
    "eos_token": {"__type": "AddedToken", "content": "<|eot|>", "lstrip": False, "special": True},
    "pad_token": "Ġthe",  # ordinary vocabulary becomes special by being named
    "image_token": "<|image|>",
    "additional_special_tokens": ["<|extra|>"],
}


@pytest.mark.parametrize("with_decoder", [False, True])
def test_special_tokens_that_only_the_configuration_names(
    tmp_path: Path, with_decoder: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    plain = byte_level()
    config: dict[str, Any] = dict(DECLARED)
    if with_decoder:
        size = plain.get_vocab_size()
        flags = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
        config["added_tokens_decoder"] = {
            str(size + 1): {"content": "<plain>", "special": False, **flags},
            str(size): {"content": "<marked>", "special": True, **flags},
        }
    directory = save(plain, tmp_path, config)
    ours = Tokenizer.from_directory(directory)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    assert ours.vocab_size == len(theirs)
    their_added = theirs.added_tokens_decoder
    assert ours.added_tokens == {i: token.content for i, token in their_added.items()}
    assert ours.special_ids == {i for i, token in their_added.items() if token.special}
    assert ours.eos_token_id == theirs.eos_token_id
    text = "a <|eot|> the <|image|> <|extra|>b <marked> c <plain>  d"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(
        theirs.encode(text), skip_special_tokens=True
    )


def test_special_tokens_map_counts_where_the_configuration_declares_no_tokens(
    tmp_path: Path,
) -> None:
    from transformers import PreTrainedTokenizerFast

    directory = save(byte_level(), tmp_path)
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    ours = Tokenizer.from_directory(directory)
    assert ours.eos_token_id == ours.token_to_id("<|end|>")
    assert ours.eos_token_id == PreTrainedTokenizerFast.from_pretrained(directory).eos_token_id


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_token_bytes_join_to_the_text(kind: str) -> None:
    tokenizer = Tokenizer(BUILDERS[kind]())
    for text in CORPUS:
        if tokenizer.token_to_id("<unk>") in tokenizer.encode(text):
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode()
        assert joined.removeprefix(" ") == tokenizer.decode(ids)


def test_token_bytes_and_text_of_each_kind() -> None:
    level, fallback = Tokenizer(BUILDERS["byte_level"]()), Tokenizer(BUILDERS["byte_fallback"]())
    half = level.token_to_id("ð")
    assert half is not None
    assert level.token_bytes(half) == b"\xf0"
    assert level.token_text(half) == "\ufffd"
    byte = fallback.token_to_id("<0x0A>")
    assert byte is not None
    assert (fallback.token_bytes(byte), fallback.token_text(byte)) == (b"\n", "\n")
    word = fallback.token_to_id("▁a")
    assert word is not None
    assert (fallback.token_bytes(word), fallback.token_text(word)) == (b" a", " a")
    special = level.token_to_id("<｜deep｜>")
    assert special is not None
    assert level.token_text(special) == "<｜deep｜>"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_no_strip"])
@given(text=st.text() | st.text("a <|end>\u0301", min_size=30))
def test_no_token_stands_for_more_characters_than_the_bound(kind: str, text: str) -> None:
    tokenizer = Tokenizer(BUILDERS[kind]())
    assert tokenizer.max_token_chars < 40
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert len(text) <= num_tokens * tokenizer.max_token_chars


def changed(**parts: Any) -> Backend:
    backend = Backend.from_str(byte_level().to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def test_a_tokenizer_that_drops_or_merges_characters_has_no_bound() -> None:
    swallowing = changed()
    swallowing.add_special_tokens([AddedToken("<|wide|>", rstrip=True)])
    level = pre_tokenizers.ByteLevel()
    whitespace = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), level])
    removing = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), level])
    unbounded = [
        *(BUILDERS[kind]() for kind in ("unigram", "word_piece", "word_level")),
        *(changed(pre_tokenizer=part) for part in (None, whitespace, removing)),
        *(changed(normalizer=n) for n in (normalizers.Strip(), normalizers.Replace("ab", "c"))),
        swallowing,
    ]
    assert [Tokenizer(backend).max_token_chars for backend in unbounded] == [sys.maxsize] * 9
    plain = Tokenizer(changed()).max_token_chars
    assert Tokenizer(changed(normalizer=normalizers.NFC())).max_token_chars == 4 * plain


def test_truncation_and_padding_in_the_file_have_no_effect(tmp_path: Path) -> None:
    backend = Backend.from_str(byte_level().to_str())
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=32)
    tokenizer = Tokenizer.from_directory(save(backend, tmp_path))
    ids = tokenizer.encode(CORPUS[0])
    assert len(ids) > 10
    assert tokenizer.decode(ids) == CORPUS[0]


def test_threads_get_the_same_ids_as_one_thread() -> None:
    tokenizer = Tokenizer(byte_level())
    texts = [corpus * n for corpus in CORPUS for n in (1, 50)] * 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(t) for t in texts]


def test_a_lone_surrogate_is_refused_by_its_place() -> None:
    tokenizer = Tokenizer(byte_level())
    with pytest.raises(InvalidRequestError, match=r"U\+D83D at character 3"):
        tokenizer.encode("ok \ud83d")


def test_a_tokenizer_without_chat_template_says_so() -> None:
    tokenizer = Tokenizer(byte_level())
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        _ = tokenizer.chat_template


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "expected tokenizer.json, tokenizer.model, or vocab.json and merges.txt"),
        ({"tokenizer.json": "{}"}, "cannot be read by tokenizers"),
        ({"tokenizer_config.json": "{"}, "not valid JSON"),
        ({"tokenizer_config.json": "[]"}, "expected a JSON object"),
        ({"tokenizer.model": "no protobuf"}, "tokenizer.model cannot be converted"),
    ],
)
def test_a_damaged_directory_is_a_load_error(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_a_missing_directory_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="expected a directory"):
        Tokenizer.from_directory(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: Any) -> None:
    backend = Backend.from_str(word_level().to_str())
    backend.decoder = decoder
    with pytest.raises(ModelLoadError, match="cannot be streamed"):
        Tokenizer(backend)


def test_a_sentencepiece_model_alone_is_converted(tmp_path: Path) -> None:
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(CORPUS[:3] * 20), encoding="utf-8")
    directory = tmp_path / "model"
    directory.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer"})
    )
    tokenizer = Tokenizer.from_directory(directory)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    for text in CORPUS[:2]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_import_is_light() -> None:
    heavy = ("torch", "transformers", "numpy", "sentencepiece")
    imports = "import sys, src.text.tokenizer, src.text.output"
    code = f"{imports}; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_demo_tokenizer(load: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    from src.text.detokenizer import detokenize

    directory = Path(__file__).parents[2] / "configs" / "demo"
    ours, theirs = (
        Tokenizer.from_directory(directory),
        PreTrainedTokenizerFast.from_pretrained(directory),
    )
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    prompt = ours.chat_template.render(messages)
    assert prompt == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    prompt_ids = ours.encode(prompt, add_special_tokens=False)
    assert prompt_ids == theirs.encode(prompt, add_special_tokens=False)
    assert ours.eos_token_id == theirs.eos_token_id
    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text
        assert detokenize(ours, ids, prompt_ids) == text
