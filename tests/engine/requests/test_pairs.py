"""What a cut of a document leaves of it."""

from __future__ import annotations

from typing import Any

import pytest

from src.engine.requests.pairs import PairBuilder
from src.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_fallback, byte_level


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("document", ["fox \ufffd\ufffd", "\ufffd世界\ufffd", "世\ufffd", "fox 世"])
def test_a_cut_takes_no_replacement_character_of_the_document(make: Any, document: str) -> None:
    """Only what stands for a character of which the cut left a part."""
    tokenizer = Tokenizer(make())
    unused: Any = None
    builder = PairBuilder(unused, tokenizer, unused)
    ids = tokenizer.encode(document, add_special_tokens=False)
    assert builder._spelled(ids) == tokenizer.decode(ids)
    before = ""
    for count in range(len(ids)):
        begin = builder._spelled(ids[:count])
        assert document.startswith(begin)
        assert begin.startswith(before)
        before = begin
