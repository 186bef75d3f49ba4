from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, overload

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from src.text.detokenizer import (
    AfterPrompt,
    IncrementalDetokenizer,
    StreamingReplace,
    detokenize,
)
from src.text.tokenizer import Tokenizer
from tests.support.tokenizers import BUILDERS, CORPUS

FALLBACK = ["byte_fallback", "byte_fallback_no_strip"]
EXACT = [kind for kind in BUILDERS if kind not in FALLBACK]
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(BUILDERS[kind]())


def ids_of(kind: str, max_size: int = 16) -> st.SearchStrategy[list[int]]:
    """Random ids: all of the vocabulary, special and added tokens often, unknown ids sometimes."""
    tokenizer = tokenizer_of(kind)
    some_id = st.integers(0, tokenizer.vocab_size + 2)
    return st.lists(some_id | st.sampled_from(sorted(tokenizer.added_tokens)), max_size=max_size)


def stream(
    tokenizer: Tokenizer,
    output: Sequence[int],
    prompt: Sequence[int] | AfterPrompt,
    cuts: list[int],
    **how: Any,
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **how)
    edges = [0, *sorted(min(cut, len(output)) for cut in cuts), len(output)]
    pieces = [detokenizer.push(output[a:b]) for a, b in itertools.pairwise(edges)]
    return [*pieces, detokenizer.flush()]


HOW = ("skip_special_tokens", "spaces_between_special_tokens")
cut_places = st.lists(st.integers(0, 16), max_size=16)


@pytest.mark.parametrize("kind", EXACT)
@given(st.data())
def test_pieces_join_to_what_hugging_face_decodes_after_the_prompt(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, output = data.draw(ids_of(kind, 6)), data.draw(ids_of(kind))
    skip = data.draw(st.booleans())
    before = tokenizer.decode(prompt, skip)
    assume(not before.endswith("\ufffd"))  # the prompt does not end within a character
    expected = tokenizer.decode([*prompt, *output], skip)[len(before) :]
    pieces = stream(tokenizer, output, prompt, data.draw(cut_places), skip_special_tokens=skip)
    assert "".join(pieces) == expected
    assert detokenize(tokenizer, output, prompt, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_beginning_of_a_text_is_what_hugging_face_decodes(kind: str) -> None:
    """Spaces, and ids without a token, before what is the first of the text."""
    tokenizer = tokenizer_of(kind)
    nothing = tokenizer.vocab_size + 1
    space = tokenizer.token_to_id("\u2581")
    words = tokenizer.encode("fox and fox", add_special_tokens=False)
    starts = [[nothing], [nothing, nothing], [nothing, words[0], nothing]]
    if space is not None:
        starts += [[space], [space, space], [space, nothing, space, space]]
    for start in starts:
        ids = [*start, *words]
        assert "".join(stream(tokenizer, ids, (), list(range(9)))) == tokenizer.decode(ids)
        # With a prompt before it, it is no beginning.
        after = "".join(stream(tokenizer, ids, words, list(range(9))))
        assert tokenizer.decode(words) + after == tokenizer.decode([*words, *ids])


SNOWMAN = "\u2603"


def test_a_prompt_that_is_the_beginning_of_a_character_is_read_once() -> None:
    """It is the beginning of the text as well as its end."""
    tokenizer = tokenizer_of("byte_fallback")
    first, *rest = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in SNOWMAN.encode())
    assert first is not None
    for cut in range(3):
        assert "".join(stream(tokenizer, rest, [first], [cut])) == SNOWMAN
        # A text of its own has nothing of it.
        alone = stream(tokenizer, rest, [first], [cut], stands_alone=True)
        assert "".join(alone) == "\ufffd\ufffd"


@pytest.mark.parametrize("skips", [True, False])
def test_a_character_goes_on_behind_a_special_token_that_is_no_text(skips: bool) -> None:
    tokenizer = tokenizer_of("byte_level")
    *first, last = tokenizer.encode("fox " + SNOWMAN, add_special_tokens=False)
    assert tokenizer.decode([last]) == "\ufffd"
    special = min(tokenizer.special_ids)
    pieces = stream(tokenizer, [last], [*first, special], [], skip_special_tokens=skips)
    assert "".join(pieces) == (SNOWMAN if skips else "\ufffd")


@pytest.mark.parametrize("kind", BUILDERS)
@given(st.data())
def test_what_one_has_read_of_a_prompt_serves_others(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, output, other = (data.draw(ids_of(kind, 6)) for _ in range(3))
    how = {name: data.draw(st.booleans()) for name in HOW}
    first = IncrementalDetokenizer(tokenizer, prompt, **how)
    first.push(other)
    assert stream(tokenizer, output, first.after_prompt, [], **how) == stream(
        tokenizer, output, prompt, [], **how
    )


def characters_of_run(run: bytes) -> tuple[str, bool]:
    """A byte run's text, and whether characters and stray bytes are mixed in it."""
    text, position, kinds = "", 0, set()
    while position < len(run):
        for size in (1, 2, 3, 4):
            try:
                text += run[position : position + size].decode()
            except UnicodeDecodeError:
                continue
            kinds.add("character")
            break
        else:
            size = 1
            text += "\ufffd"
            kinds.add("stray")
        position += size
    return text, len(kinds) > 1


def byte_fallback_oracle(tokenizer: Tokenizer, ids: list[int], skip: bool) -> tuple[str, bool]:
    tokens = [
        token
        for i in ids
        if not (skip and i in tokenizer.special_ids) and (token := tokenizer.id_to_token(i))
    ]
    text, run, mixed = "", b"", False
    for token in [*tokens, ""]:
        if BYTE_TOKEN.fullmatch(token):
            run += bytes.fromhex(token[3:5])
            continue
        run_text, run_mixed = characters_of_run(run)
        text, run, mixed = text + run_text + token.replace("▁", " "), b"", mixed or run_mixed
    return text, mixed


@pytest.mark.parametrize("kind", FALLBACK)
@given(st.data())
def test_byte_fallback_keeps_whole_characters_and_replaces_each_stray_byte(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    byte_ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    emoji = [byte_ids[byte] for byte in "🙂".encode()]
    blocks = ids_of(kind, 3) | st.lists(st.sampled_from(byte_ids), max_size=3) | st.just(emoji)
    output = [i for block in data.draw(st.lists(blocks, max_size=6)) for i in block]
    skip = data.draw(st.booleans())
    expected, mixed = byte_fallback_oracle(tokenizer, output, skip)
    if kind == "byte_fallback":
        expected = expected.removeprefix(" ")
    pieces = stream(tokenizer, output, [], data.draw(cut_places), skip_special_tokens=skip)
    assert "".join(pieces) == expected
    if not mixed:
        assert expected == tokenizer.decode(output, skip)


@pytest.mark.parametrize("kind", FALLBACK)
@given(st.data())
def test_byte_fallback_after_a_prompt_continues_its_text(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, output = data.draw(ids_of(kind, 6)), data.draw(ids_of(kind))
    whole = detokenize(tokenizer, [*prompt, *output])
    before = detokenize(tokenizer, prompt)
    assume(not before.endswith("\ufffd"))
    pieces = stream(tokenizer, output, prompt, data.draw(cut_places))
    assert "".join(pieces) == whole[len(before) :]


@pytest.mark.parametrize("kind", ["byte_level", *FALLBACK])
@given(text=st.text(max_size=40), after_prompt=st.booleans())
def test_encoded_text_streams_back_with_at_most_one_character_pending(
    kind: str, text: str, after_prompt: bool
) -> None:
    tokenizer = tokenizer_of(kind)
    assume("▁" not in text)
    assume(not any(added in text for added in tokenizer.added_tokens.values()))
    prompt = tokenizer.encode("Hello: ", add_special_tokens=False) if after_prompt else []
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = " " + text if kind == "byte_fallback" and after_prompt and text else text
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    shown, arrived = "", 0
    for token_id in ids:
        shown += detokenizer.push([token_id])
        arrived += len(tokenizer.token_bytes(token_id))
        assert expected.startswith(shown)
        assert arrived - len(shown.encode()) <= 4  # 3 bytes of a character, 1 stripped space
    assert shown + detokenizer.flush() == expected


@pytest.mark.parametrize("kind", ["byte_level", *FALLBACK])
def test_a_character_that_begins_in_the_prompt_belongs_to_the_output(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_of = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    emoji = [token_of[bytes([byte])] for byte in "🦊".encode()]
    prompt = [*tokenizer.encode("fox: "), *emoji[:2]]
    assert stream(tokenizer, emoji[2:], prompt, [1]) == ["", "🦊", ""]
    assert detokenize(tokenizer, [], prompt) == ""


def test_an_incomplete_character_at_the_end_is_one_replacement_character() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("𒀀", add_special_tokens=False)[:-1]
    assert stream(tokenizer, ids, [], [1]) == ["", "", "\ufffd"]
    assert tokenizer.decode(ids) == "\ufffd"


def test_the_first_word_keeps_its_space_only_after_visible_text() -> None:
    tokenizer = tokenizer_of("unigram")
    bos, word = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("▁piece")
    assert bos is not None
    assert word is not None
    assert detokenize(tokenizer, [word], [word]) == " piece"
    assert detokenize(tokenizer, [word], [bos]) == "piece"
    assert detokenize(tokenizer, [word], [bos], skip_special_tokens=False) == " piece"


def test_adjacent_added_tokens_without_spaces_between() -> None:
    tokenizer = tokenizer_of("word_level")
    ids = [tokenizer.token_to_id(token) for token in ["fox", "<|user|>", "<|end|>", "dog"]]
    how = {"skip_special_tokens": False}
    assert detokenize(tokenizer, ids, **how) == "fox <|user|> <|end|> dog"
    packed = detokenize(tokenizer, ids, **how, spaces_between_special_tokens=False)
    assert packed == "fox <|user|><|end|> dog"
    after = detokenize(tokenizer, ids[2:], ids[:2], **how, spaces_between_special_tokens=False)
    assert after == "<|end|> dog"


@given(st.data())
def test_clean_up_streams_to_what_decode_cleans(data: st.DataObject) -> None:
    tokenizer = Tokenizer(BUILDERS["unigram"](), clean_up_tokenization_spaces=True)
    words = ["▁", "'", "▁'", ".", ",", "s", "▁s", "n", "t", "▁they", "!", "re", "m", "ve", "▁n"]
    known = [i for word in words if (i := tokenizer.token_to_id(word)) is not None]
    assert len(known) > 8
    output = data.draw(st.lists(st.sampled_from(known), max_size=20))
    pieces = stream(tokenizer, output, [], data.draw(cut_places))
    assert "".join(pieces) == tokenizer.decode(output)


@given(
    st.text("ab ", max_size=30),
    st.sampled_from(["a", " a", "aba", "aa", " ' "]),
    st.lists(st.integers(0, 30)),
)
def test_streaming_replace_is_replace(text: str, old: str, cuts: list[int]) -> None:
    replacer = StreamingReplace(old, "-")
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [replacer.feed(text[a:b]) for a, b in itertools.pairwise(edges)]
    assert "".join(pieces) + replacer.finish() == text.replace(old, "-")


class CountedPrompt(Sequence[int]):
    """A long prompt that counts how many of its ids are read."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self.reads = 0

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        assert isinstance(index, int)
        self.reads += 1
        return self._ids[index]


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_long_prompt_is_not_read_through(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = CountedPrompt(tokenizer.encode(" ".join(CORPUS[:3]), add_special_tokens=False) * 500)
    IncrementalDetokenizer(tokenizer, prompt, spaces_between_special_tokens=False)
    assert prompt.reads < 16


def test_a_special_token_that_is_kept_is_text_in_the_output_and_others_are_not() -> None:
    tokenizer = Tokenizer(BUILDERS["byte_level"]())
    kept, other = sorted(tokenizer.special_ids)[:2]
    word = tokenizer.encode("word", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, [kept, other], kept_special_ids=[kept])
    text = detokenizer.push([kept, *word, other]) + detokenizer.flush()
    assert text == tokenizer.added_tokens[kept] + "word"
