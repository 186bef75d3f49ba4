"""The ASGI application: routes, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from src.core.config import Config
from src.core.errors import RequestError
from src.http.admin.adapters import load_adapter, unload_adapter
from src.http.admin.debug import DEBUG_ENDPOINTS
from src.http.admin.health import health, live, ready, version
from src.http.admin.load import get_load, is_sleeping, server_load
from src.http.admin.metrics import show_metrics
from src.http.admin.models import list_models, show_model
from src.http.chat.handlers import create_chat_completion
from src.http.completions.handlers import create_completion
from src.http.hypercorn.direct import SERVER_SEND
from src.http.messages.handlers import count_tokens, create_message
from src.http.openapi.handlers import show_docs, show_openapi
from src.http.playground.handlers import show_page, show_page_file
from src.http.responses.handlers import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    show_response,
)
from src.http.server.call import Call, Endpoint, refuse
from src.http.server.errors import MethodNotAllowedError, RouteNotFoundError
from src.http.server.guard import Guard
from src.http.server.lifespan import lifespan
from src.http.server.state import Server
from src.http.tokens.handlers import detokenize, tokenize, tokenizer_info
from src.http.tokens.render import render_chat, render_completion

# Path, method, handler; docs/api.md describes each, and a test fails when it does not.
ENDPOINTS: Final = (
    ("/v1/completions", "POST", create_completion),
    ("/v1/completions/render", "POST", render_completion),
    ("/v1/chat/completions", "POST", create_chat_completion),
    ("/v1/chat/completions/render", "POST", render_chat),
    ("/v1/responses", "POST", create_response),
    ("/v1/responses/input_tokens", "POST", count_input_tokens),
    ("/v1/responses/{response_id}", "GET", show_response),
    ("/v1/responses/{response_id}", "DELETE", delete_response),
    ("/v1/responses/{response_id}/cancel", "POST", cancel_response),
    ("/v1/responses/{response_id}/input_items", "GET", list_input_items),
    ("/v1/messages", "POST", create_message),
    ("/v1/messages/count_tokens", "POST", count_tokens),
    ("/v1/load_lora_adapter", "POST", load_adapter),
    ("/v1/unload_lora_adapter", "POST", unload_adapter),
    ("/v1/models", "GET", list_models),
    ("/v1/models/{model:path}", "GET", show_model),
    ("/tokenize", "POST", tokenize),
    ("/detokenize", "POST", detokenize),
    ("/tokenizer_info", "GET", tokenizer_info),
    ("/get_load", "GET", get_load),
    ("/load", "GET", server_load),
    ("/is_sleeping", "GET", is_sleeping),
    ("/ping", "GET", health),
    ("/ping", "POST", health),
    ("/live", "GET", live),
    ("/ready", "GET", ready),
    ("/health", "GET", health),
    ("/metrics", "GET", show_metrics),
    ("/version", "GET", version),
    ("/openapi.json", "GET", show_openapi),
    ("/docs", "GET", show_docs),
    ("/", "GET", show_page),
    ("/playground/{name}", "GET", show_page_file),
    *DEBUG_ENDPOINTS,
)


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
            Route(path, Endpoint(handler), methods=[verb]) for path, verb, handler in ENDPOINTS
        ],
        middleware=[Middleware(Guard, server=server)],
        exception_handlers={HTTPException: _no_route},
        lifespan=lifespan,
    )
    # `/v1/models/` is not `/v1/models`: a redirect would be built from the Host header.
    app.router.redirect_slashes = False
    app.state.server = server
    app.state.endpoints = ENDPOINTS
    return app


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
