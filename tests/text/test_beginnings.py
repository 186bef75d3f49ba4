"""The first tokens of a long text are found without tokenizing all of it."""

from __future__ import annotations

import random
import string

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from src.text.beginnings import begins, encode_beginning
from src.text.token_length import UNBOUNDED
from src.text.tokenizer import Tokenizer

MOST = 40
LETTERS = string.ascii_lowercase


class _Counting(Tokenizer):
    chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.chars += len(text)
        return super().encode(text, add_special_tokens)


@pytest.fixture
def word_pieces() -> _Counting:
    """As BERT has it: an unknown word of over 100 letters is one token, and a space is none."""
    names = ["[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "."]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = _Counting(backend)
    assert tokenizer.max_token_chars == UNBOUNDED
    return tokenizer


def words(count: int) -> list[str]:
    rng = random.Random(count)
    return ["".join(rng.choices(LETTERS, k=rng.randint(1, 9))) for _ in range(count)]


@pytest.mark.parametrize("between", [" ", ".", "\n", "   "])
def test_of_a_long_text_the_beginning_is_tokenized(word_pieces: _Counting, between: str) -> None:
    text = between.join(words(50_000))
    whole = word_pieces.encode(text)
    word_pieces.chars = 0
    found = encode_beginning(word_pieces, text, MOST)
    assert word_pieces.chars < 5000
    assert not found.is_whole
    assert len(found.ids) > MOST
    assert found.ids[:MOST] == whole[:MOST]
    assert found.ids[-1] == 2


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (" " * 100_000, 0),
        ("x" * 100_000, 1),
        ((("x" * 101) + " " * 5000) * MOST, MOST),
        (" " * 50_000 + " ".join(LETTERS), len(LETTERS)),
        ("a" + " " * 9000 + "b", 2),
        (" ".join(LETTERS * 20), len(LETTERS) * 20),
    ],
)
def test_a_text_of_few_tokens_is_tokenized_whole_however_long(
    word_pieces: _Counting, text: str, count: int
) -> None:
    found = encode_beginning(word_pieces, text, MOST, False)
    assert (len(found.ids), found.is_whole) == (count, True)
    assert found.ids == word_pieces.encode(text, False)


def test_a_beginning_that_says_too_little_grows(word_pieces: _Counting) -> None:
    text = " " * 60_000 + " ".join(words(50_000))
    whole = word_pieces.encode(text)
    word_pieces.chars = 0
    found = encode_beginning(word_pieces, text, MOST)
    assert found.ids[:MOST] == whole[:MOST]
    assert not found.is_whole
    assert 60_000 < word_pieces.chars < len(text)


def test_a_word_that_is_cut_apart_does_not_count(word_pieces: _Counting) -> None:
    # The whole of a word is one token, and the part of it in the first beginning is sixty.
    first = 8 * (MOST + 256)
    text = "a\n" * 30 + "\n" * (first - 2 * 30 - 60) + "x" * 150 + "\nb" * 9000
    found = encode_beginning(word_pieces, text, MOST)
    assert found.ids[:MOST] == word_pieces.encode(text)[:MOST]
    assert not found.is_whole


def test_a_far_longer_text_is_cut_to_a_beginning_with_enough_tokens(
    word_pieces: _Counting,
) -> None:
    text = " ".join(words(50_000))
    whole = word_pieces.encode(text, False)
    word_pieces.chars = 0
    found = begins(lambda given: word_pieces.encode(given, False), text, MOST)
    assert word_pieces.chars < 5000
    assert text.startswith(found)
    ids = word_pieces.encode(found, False)
    assert len(ids) > MOST
    assert ids[:MOST] == whole[:MOST]
    assert begins(lambda _: pytest.fail("it is short"), text[:100], MOST) == text[:100]
