"""The ASGI application: routes, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from src.core.config import Config
from src.core.errors import RequestError
from src.http.endpoints import ENDPOINTS
from src.http.hypercorn.direct import SERVER_SEND
from src.http.openapi.operations import Access
from src.http.playground.files import is_page_request
from src.http.server.call import Call, EndpointApp, refuse
from src.http.server.errors import MethodNotAllowedError, RouteNotFoundError
from src.http.server.guard import Guard
from src.http.server.lifespan import lifespan
from src.http.server.state import Server


class Application(Starlette):
    """Keeps the server's own ``send``, which the framework wraps."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Any message of the server's."""
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)


def create_app(config: Config | None = None, *, owns_process: bool = True) -> Starlette:
    """An application with an engine of its own, which its lifespan opens and closes.

    Parameters
    ----------
    config
        ``None`` reads the file and the environment when the lifespan begins.
    owns_process
        End the process when the model cannot be loaded or the engine dies. ``False`` is for a
        program that embeds the application and watches over it itself.
    """
    server = Server(config, owns_process=owns_process)
    app = Application(
        routes=[
            Route(entry.path, EndpointApp(entry.handler), methods=[entry.method])
            for entry in ENDPOINTS
        ],
        middleware=[
            Middleware(
                Guard,
                server=server,
                open_paths=_paths_of("open"),
                admin_paths=_paths_of("admin"),
                is_page=is_page_request,
            )
        ],
        exception_handlers={HTTPException: _no_route},
        lifespan=lifespan,
    )
    # `/v1/models/` is not `/v1/models`: a redirect would be built from the Host header.
    app.router.redirect_slashes = False
    app.state.server = server
    app.state.endpoints = ENDPOINTS
    return app


def _paths_of(access: Access) -> frozenset[str]:
    return frozenset(entry.path for entry in ENDPOINTS if entry.access == access)


class _Refusal(Response):
    """An error that is answered without its request's body having been read."""

    def __init__(self, error: RequestError, headers: Mapping[str, str] | None) -> None:
        super().__init__()
        self._error = error
        self._extra = [
            (name.lower().encode(), value.encode()) for name, value in (headers or {}).items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and read the body to its end or end the connection."""
        call = Call(scope["app"].state.server, scope, send)
        await refuse(call, receive, self._error, headers=self._extra)


async def _no_route(request: Request, error: Exception) -> Response:
    """There is nothing here, or not for this method."""
    assert isinstance(error, HTTPException)
    path, method = request.scope["path"][:200], request.scope["method"][:20]
    if error.status_code == 405:
        not_allowed = MethodNotAllowedError(f"{path} does not take {method}")
        return _Refusal(not_allowed, {"allow": ", ".join(_methods_of(request))})
    return _Refusal(RouteNotFoundError(f"there is nothing at {path}"), error.headers)


def _methods_of(request: Request) -> list[str]:
    """Methods of all routes of this path; the router knows those of the first."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    taken = [
        route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE
    ]
    return sorted({method for methods in taken for method in methods})
