"""This engine's server over HTTP, as OpenAI's client asks it: vectors in base64."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import time
from typing import Any

from vector_turns import Opened, answer_turns

_IDLE = 2.0  # seconds
# Keeps the server open; it is killed with this process's group.
_OPEN = contextlib.ExitStack()


def open_engine(options: dict[str, Any]) -> Opened:
    import numpy

    from benchmarks.serving import ready_server
    from src.core.settings import load_config

    overrides = [
        ("model.path", options["embedder"]),
        ("model.dtype", options["dtype"]),
        ("compile.startup", "wait"),
    ]
    server = _OPEN.enter_context(ready_server(load_config(None, overrides=overrides)))
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port))
    last = [time.monotonic()]

    def embed(texts: list[str]) -> list[Any]:
        body = json.dumps({"input": texts, "encoding_format": "base64"})
        if time.monotonic() - last[0] > _IDLE:
            # The server may have closed it; it is opened again with the next request.
            connection.close()
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        read = json.loads(answer.read())
        last[0] = time.monotonic()
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{answer.status}: {read}")
        return [
            numpy.frombuffer(base64.b64decode(each["embedding"]), numpy.float32)
            for each in read["data"]
        ]

    return Opened(embed, None, {"dtype": options["dtype"]})


if __name__ == "__main__":
    answer_turns(open_engine)
