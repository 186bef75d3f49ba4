"""Made-up workloads and those from files: lengths, shared prefixes, timestamps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.bench.codecs import TokenizerCodec, WordCodec
from src.bench.dataset_files import read_trace, sharegpt_samples, trace_samples
from src.bench.samples import Sample, in_text, prefix_repetition_samples, random_samples
from src.core.errors import ConfigError
from src.core.settings import CHECKOUT
from src.text.tokenizer import Tokenizer

IDS = range(3, 1000)


@pytest.fixture(scope="module")
def codec() -> TokenizerCodec:
    return TokenizerCodec(Tokenizer.from_directory(CHECKOUT / "configs" / "demo"), "demo")


def shared(first: Sample, second: Sample) -> int:
    """How many tokens two prompts begin with together."""
    pairs = zip(first.prompt, second.prompt, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(first.prompt))


@given(
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(1, 99),
    st.floats(0, 0.99),
    st.integers(0, 9),
)
def test_random_lengths_are_within_their_range(
    count: int, input_len: int, output_len: int, ratio: float, seed: int
) -> None:
    samples = random_samples(
        IDS,
        count,
        input_len=input_len,
        output_len=output_len,
        range_ratio=ratio,
        prefix_len=5,
        seed=seed,
    )
    assert len(samples) == count
    for sample in samples:
        assert len(sample.prompt) == sample.prompt_len
        assert abs(sample.prompt_len - 5 - input_len) <= ratio * input_len + 1
        assert abs(sample.output_len - output_len) <= ratio * output_len + 1
        assert sample.output_len >= 1
        assert sample.prompt[:5] == samples[0].prompt[:5]
        assert set(sample.prompt) <= set(IDS)


def test_random_prompts_share_their_prefix_and_no_more() -> None:
    first, second = random_samples(IDS, 2, input_len=50, output_len=1, prefix_len=20)
    assert shared(first, second) == 20
    other = random_samples(IDS, 1, input_len=50, output_len=1, prefix_len=20, seed=1)[0]
    assert shared(first, other) == 0


def test_lengths_may_be_given_as_a_range() -> None:
    samples = random_samples(IDS, 300, input_len=(10, 13), output_len=1)
    assert {sample.prompt_len for sample in samples} == {10, 11, 12, 13}


def test_prefixes_are_repeated_in_equal_parts() -> None:
    samples = prefix_repetition_samples(
        IDS, 12, prefix_len=30, suffix_len=8, num_prefixes=3, output_len=4
    )
    groups: dict[tuple[int, ...], int] = {}
    for sample in samples:
        assert (sample.prompt_len, len(sample.prompt), sample.output_len) == (38, 38, 4)
        prefix = tuple(sample.prompt[:30])
        groups[prefix] = groups.get(prefix, 0) + 1  # type: ignore[index]
    assert sorted(groups.values()) == [4, 4, 4]
    assert len({tuple(sample.prompt) for sample in samples}) == 12


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"range_ratio": 1.0}, "--random-range-ratio"),
        ({"input_len": 0}, "leave a prompt empty"),
        ({"output_len": 0}, "at least 1"),
        ({"input_len": -1, "prefix_len": 4}, "at least 0"),
    ],
)
def test_lengths_that_cannot_be_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        random_samples(IDS, 1, **({"input_len": 4, "output_len": 4} | values))  # type: ignore[arg-type]


def test_more_prefixes_than_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="num-prefixes must be from 1 to"):
        prefix_repetition_samples(IDS, 2, prefix_len=1, suffix_len=1, num_prefixes=3, output_len=1)


def test_texts_have_the_length_of_their_tokens(codec: TokenizerCodec) -> None:
    samples = random_samples(codec.ids, 30, input_len=40, output_len=1, prefix_len=24, seed=2)
    texts = in_text(samples, codec)
    lengths = [
        len(codec.encode(sample.prompt)) for sample in texts if isinstance(sample.prompt, str)
    ]
    assert [sample.prompt_len for sample in texts] == lengths
    # A tokenizer may refuse a length, but rarely does.
    assert sum(length == 64 for length in lengths) >= 25
    assert len({str(sample.prompt)[:20] for sample in texts}) == 1


def test_words_stand_for_tokens_where_nothing_is_known() -> None:
    codec = WordCodec()
    samples = in_text(random_samples(codec.ids, 3, input_len=9, output_len=1), codec)
    assert [len(str(sample.prompt).split()) for sample in samples] == [9, 9, 9]
    assert not codec.exact


def conversation(words: int, answer_words: int) -> dict[str, list[dict[str, str]]]:
    turns = [("human", "once " * words), ("gpt", "upon " * answer_words)]
    return {"conversations": [{"from": who, "value": text.strip()} for who, text in turns]}


def test_conversations_of_a_fitting_length_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    entries = [
        conversation(10, 6),
        conversation(3, 50),
        conversation(50, 3),
        conversation(1025, 4),
        {"conversations": [{"from": "human", "value": "alone " * 9}]},
        conversation(900, 1200),
        conversation(20, 8),
    ]
    file.write_text(json.dumps(entries))
    codec = WordCodec()
    samples = sharegpt_samples(file, codec, 9, oversample=False, shuffle=False)
    assert [(s.prompt_len, s.output_len) for s in samples] == [(10, 6), (20, 8)]
    more = sharegpt_samples(file, codec, 9)
    assert len(more) == 9
    assert {s.prompt_len for s in more} == {10, 20}
    fixed = sharegpt_samples(file, codec, 9, output_len=2, oversample=False, shuffle=False)
    assert [(s.prompt_len, s.output_len) for s in fixed] == [(10, 2), (50, 2), (900, 2), (20, 2)]
    shorter = sharegpt_samples(file, codec, 9, lengths=(15, 30), oversample=False)
    assert [s.prompt_len for s in shorter] == [20]


@pytest.mark.parametrize("content", ["{", "[]", '[{"conversations": [{"value": 3}]}]'])
def test_a_file_without_conversations_is_one_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"wrong\.json: "):
        sharegpt_samples(file, WordCodec(), 3)
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        sharegpt_samples(tmp_path / "none.json", WordCodec(), 3)


def trace(tmp_path: Path, *lines: dict[str, object]) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return file


def test_a_trace_shares_prefixes_where_its_hashes_do(tmp_path: Path) -> None:
    file = trace(
        tmp_path,
        {"timestamp": 3000, "input_length": 20, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 24, "output_length": 5, "hash_ids": [1, 2, 9]},
        {"timestamp": 1500, "input_length": 7, "output_length": 6},
    )
    samples = trace_samples(read_trace(file), IDS, chunk_len=8, seconds=0.001)
    assert [sample.timestamp for sample in samples] == [0.0, 0.5, 2.0]
    assert [sample.prompt_len for sample in samples] == [24, 7, 20]
    assert [len(sample.prompt) for sample in samples] == [24, 7, 20]
    assert [sample.output_len for sample in samples] == [5, 6, 4]
    assert shared(samples[0], samples[2]) == 16
    assert shared(samples[0], samples[1]) == 0
    assert len(read_trace(file, 2)) == 2
    fixed = trace_samples(read_trace(file), IDS, chunk_len=8, output_len=1)
    assert {sample.output_len for sample in fixed} == {1}


def test_a_trace_whose_hashes_are_too_few_is_refused(tmp_path: Path) -> None:
    file = trace(
        tmp_path, {"timestamp": 0, "input_length": 20, "output_length": 4, "hash_ids": [1]}
    )
    with pytest.raises(ConfigError, match="--timed-trace-chunk-hash-size 16"):
        trace_samples(read_trace(file), IDS, chunk_len=16)


@pytest.mark.parametrize(
    "line",
    [{"timestamp": 0}, {"timestamp": 0, "input_length": 0, "output_length": 1}, {"timestamp": "x"}],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: dict[str, object]) -> None:
    good = {"timestamp": 0, "input_length": 2, "output_length": 1}
    with pytest.raises(ConfigError, match="line 2: "):
        read_trace(trace(tmp_path, good, line))
    with pytest.raises(ConfigError, match="no request"):
        read_trace(trace(tmp_path))
