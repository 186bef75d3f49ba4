"""Tries the regular expressions of a tokenizer, which are a checkpoint's own, before it serves.

``tokenizer.json`` may replace and split text by any expression. One that backtracks, such as
``(a+)+$``, takes time without bound, and nothing can stop it: the library that matches them gives
up after ten million steps from one place of the text and panics. So a start tries the expressions
on texts that make usual mistakes show. What passes there and fails later ends a request, see
`src.text.tokenizer`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from src.core.errors import ModelLoadError

# Runs of kinds of characters that expressions repeat, and what may end them.
_RUNS: Final = (
    *("a", "A", "0", " ", "\n", ".", "'", "_", "\u00e9", "\u6f22", "\u0301"),
    *("aA", "a0", "a ", " .", "\r\n", "ab", "'s", "a.", "<|"),
)
# The last one has what expressions often end with, behind a character that few match: a search that
# finds none of these in a text does not begin.
_ENDS: Final = ("", "!", "a", "\n", "\0", "\0!?xz\n 0.,'\"_-)>")
# The first length shows an exponential number of steps, the second one a cubic number.
_LENGTHS: Final = (48, 192)
# Of CPU, for all and for each; usual expressions take a hundredth.
_SECONDS: Final = 2.0
_SECONDS_EACH: Final = 0.1


def require_short_matches(backend: Backend, source: str) -> None:
    """Refuse a tokenizer whose expressions take too long on some texts.

    Raises
    ------
    ModelLoadError
        With a text that shows it.
    """
    if not any(map(_has_expression, (backend.normalizer, backend.pre_tokenizer))):
        return
    begun = time.thread_time()
    for text in _texts():
        began = time.thread_time()
        try:
            if backend.normalizer is not None:
                text = backend.normalizer.normalize_str(text)
            if backend.pre_tokenizer is not None:
                backend.pre_tokenizer.pre_tokenize_str(text)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise _refusal(source, text) from None
        now = time.thread_time()
        if now - begun > _SECONDS or now - began > _SECONDS_EACH:
            raise _refusal(source, text)


def is_panic(error: BaseException) -> bool:
    """Whether the tokenizers library has panicked. Its class has no name that can be imported."""
    return type(error).__name__ == "PanicException"


def _texts() -> Iterator[str]:
    for length, run, end in itertools.product(_LENGTHS, _RUNS, _ENDS):
        yield run * (length // len(run)) + end


def _refusal(source: str, text: str) -> ModelLoadError:
    return ModelLoadError(
        f"{source}: an expression by which its tokenizer replaces or splits text backtracks "
        f"without end, for example in {len(text)} characters {text[:8]!r}...{text[-2:]!r}"
    )


def _has_expression(component: Any) -> bool:
    return component is not None and _names_regex(json.loads(component.__getstate__()))


def _names_regex(state: Any) -> bool:
    if isinstance(state, dict):
        return "Regex" in state or any(map(_names_regex, state.values()))
    return isinstance(state, list) and any(map(_names_regex, state))
