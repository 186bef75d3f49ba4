"""Prompts as tokens: `/tokenize`, `/detokenize`, and the endpoints that render."""
