"""Text: tokenizer, chat template, incremental detokenizer, stop strings. No torch in here."""
