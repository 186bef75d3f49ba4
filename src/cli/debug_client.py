"""A client for a server's debug endpoints; it only uses the standard library."""

from __future__ import annotations

import argparse
import http.client
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from src.cli.options import config_of
from src.core.errors import SlipstreamError

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_SECONDS: Final = 30.0

T = TypeVar("T")


class ServerError(SlipstreamError):
    """The server does not answer, or not with the requested data."""


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options for the server's address and key."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", default=DEFAULT_URL, help=f"its address (default: {DEFAULT_URL})")
    group.add_argument(
        "--key",
        help="its admin key (default: http.admin_key or http.admin_key_file of the settings)",
    )


def client_of(arguments: argparse.Namespace) -> DebugClient:
    """A client of the server that the options name.

    Raises
    ------
    ConfigError
        The settings are wrong.
    ServerError
        The address is invalid.
    """
    key = arguments.key
    if key is None:
        from src.http.server.keys import admin_key

        key = admin_key(config_of(arguments).http)
    return DebugClient(arguments.url, key)


class DebugClient:
    """One connection, which is reopened if the server has closed it."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ServerError(f"--url: {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"--url: expected http://HOST:PORT, got {url}")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._connection = kind(parts.hostname, port, timeout=_SECONDS)
        # As bytes, because a key may contain any character.
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}

    def get(self, path: str) -> bytes:
        """The body of a successful answer.

        Raises
        ------
        ServerError
            There is no answer, or it is an error.
        """
        try:
            status, body = self._request(path)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerError(f"{self.url} does not answer: {error}") from error
        if status == 200:
            return body
        if status == 404 and path.startswith("/debug"):
            raise ServerError(
                f"{self.url} has no debug endpoints: start it with http.admin_key or "
                "http.admin_key_file"
            )
        if status == 401:
            raise ServerError(f"{self.url} does not take the admin key; give it with --key")
        raise ServerError(f"{self.url}{path} answers {status}: {_message(body)}")

    def decode(self, path: str, kind: type[T]) -> T:
        """The decoded JSON of a successful answer.

        Raises
        ------
        ServerError
            As for `get`, or the answer has another form.
        """
        try:
            return msgspec.json.decode(self.get(path), type=kind)
        except msgspec.DecodeError as error:
            raise ServerError(f"{self.url}{path} answers something else: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _request(self, path: str) -> tuple[int, bytes]:
        try:
            return self._once(path)
        except (ConnectionError, http.client.RemoteDisconnected):
            # The idle connection was closed; a new one shows whether the server is there.
            self._connection.close()
            return self._once(path)

    def _once(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", self._prefix + path, headers=self._headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()


class _Detail(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Detail


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        return body[:200].decode("utf-8", "replace")
