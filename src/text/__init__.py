"""Text: tokenizer, chat template, incremental detokenizer, stop strings. No torch in here."""

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
