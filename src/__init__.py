"""Slipstream: an async-first LLM inference engine and OpenAI-compatible server."""
