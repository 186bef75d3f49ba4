"""The guard in front of all routes: who has no key gets no further, whatever the route.

It refuses by default: only the paths that it is given as open and the files of the page at ``/``
are let through, so a route that is added tomorrow is closed, and so is a path without a route. It
reads the path where the router reads it, in the ASGI scope, and never from a URL, which would be
rebuilt from the ``Host`` header.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from src.core.config import HttpSection
from src.core.errors import ConfigError, InvalidRequestError, NotReadyError, RequestError
from src.http.server.body import header
from src.http.server.body_work import OWNER
from src.http.server.browsers import ALLOWED_HOST, ORIGIN, is_foreign_page, is_known_host
from src.http.server.call import Call, refuse
from src.http.server.errors import (
    ForeignPageError,
    MisdirectedRequestError,
    PermissionDeniedError,
    RouteNotFoundError,
    UnauthorizedError,
)
from src.http.server.keys import ADMITTED, TENANT, Keys, bearer, credentials, load_keys
from src.http.server.state import Server

METRICS: Final = "/metrics"
DEBUG: Final = "/debug"
# What tools of the debug endpoints read beside them, with the same key.
ADMIN_READS: Final = frozenset({METRICS, "/v1/models"})

CHALLENGE: Final = ((b"www-authenticate", b'Bearer realm="slipstream"'),)
# What a page's script may read of an answer, beside what browsers always show.
_EXPOSED: Final = ("retry-after", "traceresponse", "x-request-id")


class Guard:
    """An ASGI application around another one, which lets through who may pass.

    Parameters
    ----------
    open_paths
        What probes ask, who have no keys. It says how the server is, and nothing of what it does.
    admin_paths
        What changes what is served, or shows what others do: not for those who only use it.
    is_page
        Whether a request of a path, as the router sees it, reads the page or one of its files.
    """

    def __init__(
        self,
        app: ASGIApp,
        server: Server,
        *,
        open_paths: Set[str],
        admin_paths: Set[str],
        is_page: Callable[[Scope, str], bool],
    ) -> None:
        self._app = app
        self._server = server
        self._open_paths = open_paths
        self._admin_paths = admin_paths
        self._is_page = is_page
        self._cors: tuple[tuple[str, ...], ASGIApp] = ((), self._guarded)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer those who may not pass; run the application for the others."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            if _has_two_lengths(scope):
                error = InvalidRequestError(
                    "Content-Length and Transfer-Encoding exclude each other"
                )
                await refuse(Call(self._server, scope, send), receive, error)
                return
            await self._cors_app()(scope, receive, send)
        else:
            # No endpoint speaks anything else: the handshake of a WebSocket is answered with 403.
            await send({"type": "websocket.close", "code": 1008})

    def _cors_app(self) -> ASGIApp:
        """A browser's preflight has no key, so it is answered before the guard."""
        origins = self._server.config.http.cors_origins
        if origins != self._cors[0]:
            cors = CORSMiddleware(
                self._guarded,
                allow_origins=origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=_EXPOSED,
            )
            self._cors = (origins, cors)
        return self._cors[1]

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        unknown = isinstance(refusal, UnauthorizedError)
        headers = CHALLENGE if unknown else ()
        await refuse(Call(self._server, scope, send), receive, refusal, headers=headers)

    def _refusal(self, scope: Scope) -> RequestError | None:
        """Why this request may not pass; ``None`` for one that may."""
        path = route_path(scope)
        http = self._server.config.http
        if is_foreign_page(scope, http.cors_origins):
            return ForeignPageError()
        if path in self._open_paths:
            return None
        keys = self._server.keys
        if keys is None:
            return NotReadyError("the server is starting")
        if not len(keys.api) and not is_known_host(scope, http.allowed_hosts):
            return MisdirectedRequestError(header(scope, b"host") or "")
        if http.playground and self._is_page(scope, path):
            return None
        if path.startswith(DEBUG):
            return _debug_refusal(scope, keys)
        if path in self._admin_paths and (len(keys.api) or len(keys.admin)):
            return _admin_refusal(scope, keys)
        if not len(keys.api) or (path == METRICS and http.public_metrics):
            return None
        given = credentials(scope)
        admitted = keys.api.admitted(given)
        if admitted is not None:
            scope[ADMITTED] = admitted
            scope[TENANT] = keys.tenant(admitted)
            OWNER.set(scope[TENANT])
            return None
        if path in ADMIN_READS and keys.admin.admits(bearer(scope)):
            return None
        what = "this is no API key" if given else "an API key is needed"
        return UnauthorizedError(f"{what}: Authorization: Bearer KEY, or x-api-key: KEY")


def _has_two_lengths(scope: Scope) -> bool:
    """Whether the request has both Content-Length and Transfer-Encoding.

    A proxy in front may have believed the other one: that is how a second request is smuggled
    past it (RFC 9112, section 6.3).
    """
    names = {name for name, _ in scope["headers"]}
    return b"content-length" in names and b"transfer-encoding" in names


def check_access(section: HttpSection) -> Keys:
    """The configured keys, after a look at everything that says who may come in.

    Raises
    ------
    ConfigError
        What `load_keys` raises, or an origin or a host is none.
    """
    for origin in section.cors_origins:
        if ORIGIN.fullmatch(origin) is None:
            raise ConfigError(
                f"http.cors_origins: expected * or an origin such as https://example.org, "
                f"got {origin!r}"
            )
    for host in section.allowed_hosts:
        if ALLOWED_HOST.fullmatch(host) is None:
            raise ConfigError(
                "http.allowed_hosts: expected * or a name such as gpu-box.lan or *.example.org, "
                f"without a port, got {host!r}; addresses need no entry"
            )
    return load_keys(section)


def route_path(scope: Scope) -> str:
    """The path as the router sees it: without the prefix under which a proxy serves it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and (path == root or path[len(root)] == "/"):
        return path[len(root) :]
    return path


def _debug_refusal(scope: Scope, keys: Keys) -> RequestError | None:
    if not len(keys.admin):
        # Nothing tells this from a path that does not exist, to those who may ask for one at all.
        if not len(keys.api) or keys.api.admits(credentials(scope)):
            return RouteNotFoundError(f"there is nothing at {scope['path'][:200]}")
        return UnauthorizedError("an API key is needed: Authorization: Bearer KEY")
    return _admin_refusal(scope, keys)


def _admin_refusal(scope: Scope, keys: Keys) -> RequestError | None:
    if keys.admin.admits(bearer(scope)):
        return None
    if keys.api.admits(credentials(scope)):
        return PermissionDeniedError("this needs the admin key, and got an API key")
    return UnauthorizedError("this needs the admin key: Authorization: Bearer KEY")
