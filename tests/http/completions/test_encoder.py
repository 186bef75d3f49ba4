"""A piece of a completion that has text only is spelt from a template, the same as any other."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from src.http.completions.encoder import plain_piece
from src.http.protocol.completions import CompletionChoice


@given(index=st.integers(0, 1000), text=st.text())
def test_the_template_says_what_the_struct_says(index: int, text: str) -> None:
    assert plain_piece(index, text) == msgspec.json.encode(CompletionChoice(index, text))
