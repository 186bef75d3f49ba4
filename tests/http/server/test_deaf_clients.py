"""Whatever an answer sends, a client that takes nothing is given up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from src.core.errors import RequestTooLargeError
from src.http.hypercorn.outbox import Outbox
from src.http.server.body import ClientDisconnectedError
from src.http.server.call import Call, EndpointApp, refuse

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


class Connection:
    """A client that takes the first ``taken`` messages of an answer."""

    def __init__(self, taken: int = 0) -> None:
        self.gone = 0
        self._taken = taken
        limits = SimpleNamespace(write_timeout=0.05, body_timeout=5.0, first_byte_timeout=None)
        self.server: Any = SimpleNamespace(
            config=SimpleNamespace(http=limits),
            metrics=SimpleNamespace(on_disconnect=self._on_disconnect, on_rejection=lambda _: None),
            engine=None,
            outbox=Outbox(lambda: None),
        )
        state = SimpleNamespace(server=self.server)
        self.scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "path": "/live",
            "headers": [(b"content-length", b"5")],
            "app": SimpleNamespace(state=state),
        }
        self._arrived = False

    def _on_disconnect(self) -> None:
        self.gone += 1

    async def receive(self) -> dict[str, Any]:
        if self._arrived:
            await asyncio.Event().wait()
        self._arrived = True
        return {"type": "http.request", "body": b"12345", "more_body": False}

    async def send(self, message: Any) -> None:
        self._taken -= 1
        if self._taken < 0:
            await asyncio.Event().wait()

    @property
    def call(self) -> Call:
        return Call(self.server, self.scope, self.send)


@pytest.mark.parametrize("taken", [0, 1])
async def test_every_way_to_send(taken: int) -> None:
    for sending in (
        lambda call: call.answer(b"{}"),
        lambda call: call.answer(b"x" * 2**20),
        lambda call: call.begin(200, (), b"{}"),
        lambda call: call.write(b"data: 1"),
        lambda call: call.end(b"data: 1"),
        lambda call: call.fail(ValueError("wrong")),
    ):
        with pytest.raises(ClientDisconnectedError):
            await asyncio.wait_for(sending(Connection(taken).call), 10)


@pytest.mark.parametrize("taken", [0, 1, 2])
async def test_a_refusal(taken: int) -> None:
    client = Connection(taken)
    await asyncio.wait_for(
        refuse(client.call, client.receive, RequestTooLargeError("too large")), 10
    )
    assert client.gone == 1


@pytest.mark.parametrize("taken", [0, 1])
async def test_a_handler_that_fails(taken: int) -> None:
    async def handler(call: Call) -> None:
        raise RequestTooLargeError("too large")

    client = Connection(taken)
    serving: Any = EndpointApp(handler)
    await asyncio.wait_for(serving(client.scope, client.receive, client.send), 10)
    assert client.gone == 1
