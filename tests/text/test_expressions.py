"""Tokenizers whose own expressions backtrack: refused at a start, or a clear error of a request."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from src import LLM, SamplingParams
from src.core.errors import InvalidRequestError, ModelLoadError
from src.text import expressions, gguf_tokenizer
from src.text.expressions import require_short_matches
from src.text.tokenizer import Tokenizer as Own
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import small_config

HOSTILE = (
    r"(a+)+$",
    r"(?:\p{L}+\p{N}*)+!",
    r"(\w|\w\w)+\n",
    r"(?:a|a)*$",
    r"(\s*)*x",
    r"(.*)*\d",
)
POLYNOMIAL = r"a*a*a*!\Z"  # cubic
# As the checkpoints' own files have them.
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"
GOOD = (DEEPSEEK_V3, GPT_2, DIGITS, *filter(None, set(gguf_tokenizer._PATTERNS.values())))


def splitting(pattern: str) -> Tokenizer:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    )
    return backend


@pytest.mark.parametrize(
    ("pattern", "way"),
    [*itertools.product(HOSTILE, ["split", "replace"]), (POLYNOMIAL, "split")],
)
def test_an_expression_that_backtracks_is_refused(pattern: str, way: str) -> None:
    backend = splitting(pattern)
    if way == "replace":
        backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
        backend.normalizer = normalizers.Replace(Regex(pattern), "x")
    begun = time.thread_time()
    with pytest.raises(ModelLoadError, match=r"here: an expression .* backtracks without end"):
        require_short_matches(backend, "here")
    assert time.thread_time() - begun < 20


@pytest.mark.parametrize("pattern", GOOD)
def test_usual_expressions_pass_in_little_time(pattern: str) -> None:
    begun = time.thread_time()
    require_short_matches(splitting(pattern), "here")
    assert time.thread_time() - begun < expressions._SECONDS / 2


def test_a_tokenizer_without_expressions_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "_texts", lambda: pytest.fail("tried"))
    backend = Tokenizer(models.BPE({"a": 0}, []))
    require_short_matches(backend, "here")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    require_short_matches(backend, "here")


# Passes the trial: nothing there begins so.
RARE = r"(?:qz)(q+)+$|[\s\S]"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = make_checkpoint(tmp_path / "model", num_hidden_layers=1, tokenizer=True)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(RARE), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.save(str(directory / "tokenizer.json"))
    return directory


def test_a_text_on_which_one_backtracks_is_the_requests_error(checkpoint: Path) -> None:
    tokenizer = Own.from_directory(checkpoint)
    with pytest.raises(InvalidRequestError, match="backtracks without end in this text"):
        tokenizer.encode("qz" + "q" * 60 + "!")
    assert tokenizer.encode("Once upon a time")


def test_an_engine_goes_on_after_it(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(small_config(checkpoint)) as llm:
        with pytest.raises(InvalidRequestError, match="backtracks without end"):
            llm.generate(["qz" + "q" * 60 + "!"], params)
        assert len(llm.generate(["Once upon"], params)[0].token_ids) == 2


def test_a_start_with_a_hostile_one_ends_by_name(checkpoint: Path) -> None:
    backend = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), behavior="isolated")
    backend.save(str(checkpoint / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match=f"{checkpoint.name}: an expression"):
        LLM(small_config(checkpoint)).close()
