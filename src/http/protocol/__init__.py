"""The messages of the protocols that are spoken here: OpenAI's, with vLLM's extensions.

One module per family of endpoints. A field that has no meaning for a server of one's own (``user``,
``store``, ...) is declared in `Accepted`, and taken whatever it holds. A field whose meaning cannot
be honoured is declared in `Unsupported`, so that it is refused by its name instead of being
ignored.
"""
