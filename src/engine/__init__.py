"""The engine: a pure scheduler, a device half, and the loop between them."""
