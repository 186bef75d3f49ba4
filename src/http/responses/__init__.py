"""``/v1/responses``: a chat in another spelling, with a memory of past answers."""
