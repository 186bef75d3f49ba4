"""``/openapi.json`` and ``/docs``: the endpoints as the types describe them that parse requests."""
