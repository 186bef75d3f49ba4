"""The admin key, and the guard in front of what only an administrator may see.

Without a key nothing behind the guard exists, as far as anybody can tell. The guard is part of the
route: whatever the router sends to an endpoint of ``/debug`` has passed it, so there is no second
reading of a path that could differ from the router's. Neither the key nor what was given as one is
ever kept, compared or shown as text, only as a hash.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Final

from starlette.types import Receive, Scope, Send

from src.core.config import HttpSection
from src.core.errors import ConfigError
from src.http.call import Call, Endpoint, refuse
from src.http.errors import RouteNotFoundError, UnauthorizedError
from src.http.server import Server

CHALLENGE: Final = ((b"www-authenticate", b'Bearer realm="slipstream"'),)
_SCHEME: Final = b"bearer "
# Nobody's key is longer, and hashing is not for free.
_MAX_CREDENTIALS: Final = 4096


def admin_key(section: HttpSection) -> str | None:
    """The configured key; ``None`` without one.

    Raises
    ------
    ConfigError
        Both ways to give it are used, its file cannot be read, or it is empty.
    """
    if section.admin_key is not None and section.admin_key_file is not None:
        raise ConfigError("http.admin_key and http.admin_key_file are both set; set one of them")
    if section.admin_key is not None:
        key, source = section.admin_key.reveal(), "http.admin_key"
    elif section.admin_key_file is not None:
        source = f"http.admin_key_file={section.admin_key_file}"
        try:
            key = Path(section.admin_key_file).expanduser().read_text(encoding="utf-8")
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: cannot be read: {type(error).__name__}") from None
    else:
        return None
    if not key.strip():
        raise ConfigError(f"{source}: the key is empty")
    return key.strip()


def admin_key_hash(section: HttpSection) -> bytes | None:
    """The hash of the configured key; ``None`` without one. Raises what :func:`admin_key` does."""
    key = admin_key(section)
    return None if key is None else _hash(key.encode())


class AdminEndpoint(Endpoint):
    """An endpoint that does not exist without a configured key, and asks for it otherwise."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let those pass who have the key."""
        server: Server = scope["app"].state.server
        expected = server.admin_key_hash
        if expected is not None and hmac.compare_digest(_hash(_credentials(scope)), expected):
            await super().__call__(scope, receive, send)
            return
        call = Call(server, scope, send)
        if expected is None:
            missing = RouteNotFoundError(f"there is nothing at {scope['path'][:200]}")
            await refuse(call, receive, missing)
        else:
            wrong = UnauthorizedError("this needs the admin key: Authorization: Bearer KEY")
            await refuse(call, receive, wrong, headers=CHALLENGE)


def _credentials(scope: Scope) -> bytes:
    """What follows ``Bearer`` in the request; empty if there is nothing, or more than one."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1 or len(given[0]) > _MAX_CREDENTIALS:
        return b""
    value: bytes = given[0]
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME else b""


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
