"""The cost of text: tokenizing a prompt, and detokenizing token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from src.core.settings import CHECKOUT
from src.text import OutputText, Tokenizer
from src.text.detokenizer import IncrementalDetokenizer

_TEXT = (
    "Once upon a time there was a small engine that could pull a long train over a high hill. "
    "12 plus 30 makes 42. Größe, naïveté, and a smile 🙂.\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(Path(CHECKOUT, "configs", "demo"))


@pytest.mark.parametrize("repeats", [1, 100])
def test_encode(benchmark: Any, tokenizer: Tokenizer, repeats: int) -> None:
    benchmark.extra_info["characters"] = repeats * len(_TEXT)
    assert len(benchmark(tokenizer.encode, repeats * _TEXT, True)) > 10 * repeats


@pytest.mark.parametrize("stop", [(), ("never", "ever", "\n\n\n")], ids=["plain", "stop strings"])
def test_push_token_by_token(benchmark: Any, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    token_ids = tokenizer.encode(10 * _TEXT, False)
    benchmark.extra_info["tokens"] = len(token_ids)

    def push_all() -> str:
        output = OutputText(tokenizer, (), stop=stop)
        pieces = [output.push((token_id,)).text for token_id in token_ids]
        return "".join(pieces) + output.finish()

    assert benchmark(push_all) == 10 * _TEXT
    benchmark.extra_info["us/token"] = 1e6 * benchmark.stats.stats.median / len(token_ids)


@pytest.mark.parametrize("tokens_at_once", [1, 16])
def test_detokenize(benchmark: Any, tokenizer: Tokenizer, tokens_at_once: int) -> None:
    token_ids = tokenizer.encode(10 * _TEXT, False)
    pieces = [token_ids[i : i + tokens_at_once] for i in range(0, len(token_ids), tokens_at_once)]

    def push_all() -> str:
        detokenizer = IncrementalDetokenizer(tokenizer)
        return "".join([detokenizer.push(piece) for piece in pieces]) + detokenizer.flush()

    assert benchmark(push_all) == 10 * _TEXT
    benchmark.extra_info["us/token"] = 1e6 * benchmark.stats.stats.median / len(token_ids)


def test_render_a_conversation(benchmark: Any, tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": _TEXT}, {"role": "assistant", "content": _TEXT}]
    rendered = benchmark(tokenizer.chat_template.render, 8 * turns)
    assert rendered.count("smile") == 16
