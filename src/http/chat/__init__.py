"""Conversations: `/v1/chat/completions`, and what other protocols share with it."""
