"""Sends requests to an ASGI application in this process, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.applications import Starlette


class InProcessAnswer(msgspec.Struct, frozen=True):
    """One answer."""

    status: int
    request_id: str
    body: bytes


class InProcessClient:
    """Sends requests to ``app``, whose lifespan must have started."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def post(self, path: str, body: bytes) -> InProcessAnswer:
        """Send JSON; returns the answer."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        head: dict[str, Any] = {}
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            # Never resolves: this client does not disconnect.
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        names = dict(head["headers"])
        request_id = names.get(b"x-request-id", b"").decode()
        return InProcessAnswer(head["status"], request_id, b"".join(parts))
