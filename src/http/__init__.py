"""The OpenAI-compatible HTTP server. ``app`` is a plain ASGI application::

    hypercorn src.http:app

Importing builds nothing heavy: the lifespan reads the configuration and begins to load the model.
"""

from src.http.application import create_app

app = create_app()

__all__ = ["app", "create_app"]
