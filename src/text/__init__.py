"""Text: tokenizer, chat template, incremental detokenizer, stop strings. No torch in here."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from src.text.chat_template import ChatTemplate
    from src.text.detokenizer import IncrementalDetokenizer, detokenize
    from src.text.output import OutputText, TextDelta
    from src.text.stop_strings import StopStrings
    from src.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "OutputText",
    "StopStrings",
    "TextDelta",
    "Tokenizer",
    "detokenize",
]

_HOMES = {
    "ChatTemplate": "chat_template",
    "IncrementalDetokenizer": "detokenizer",
    "OutputText": "output",
    "StopStrings": "stop_strings",
    "TextDelta": "output",
    "Tokenizer": "tokenizer",
    "detokenize": "detokenizer",
}


def __getattr__(name: str) -> Any:
    # Resolved on first use: the process that renders templates needs no tokenizer.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
