"""What each endpoint takes and answers with. A test compares this with the routes there are."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from src.http.admin.health import HealthBody
from src.http.protocol.adapters import (
    AdapterBody,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from src.http.protocol.chat import ChatBody, ChatRequest
from src.http.protocol.completions import CompletionBody, CompletionRequest
from src.http.protocol.errors import ErrorBody
from src.http.protocol.load import LoadBody, ServerLoadBody, SleepBody
from src.http.protocol.messages import (
    CountTokensRequest,
    MessageBody,
    MessageRequest,
    TokenCount,
)
from src.http.protocol.models import ModelCard, ModelList
from src.http.protocol.responses import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseBody,
    ResponseRequest,
)
from src.http.protocol.tokens import (
    DetokenizeBody,
    DetokenizeRequest,
    RenderBody,
    TokenizeBody,
    TokenizeRequest,
    TokenizerInfo,
)
from src.http.responses.inputs import MAX_PAGE
from src.http.server.error_spelling import AnthropicErrorBody
from src.observability.logs import LEVELS

JSON: Final = "application/json"


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of a path or a query; ``schema`` is JSON schema."""

    name: str
    schema: dict[str, Any]
    place: str = "query"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint.

    Attributes
    ----------
    tag
        The group that it is shown in.
    request
        What its body is decoded into; ``None`` takes none.
    answers
        Status to the type of the body; ``None`` is a body that is described by ``kind`` alone.
    kind
        The content type of an answer.
    streams
        Whether it answers with server-sent events to ``stream = true``.
    refusals
        With which statuses it refuses.
    closed
        Whether it needs an API key where there are any, or (``admin``) the admin key, or is one of
        the page's files (``page``), which need none.
    error
        What a refusal looks like.
    """

    tag: str
    request: Any = None
    answers: dict[int, Any]
    kind: str = JSON
    streams: bool = False
    parameters: tuple[Parameter, ...] = ()
    refusals: tuple[int, ...] = ()
    closed: str = "key"
    error: Any = ErrorBody


_GENERATE: Final = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_TOKENS: Final = (400, 401, 404, 408, 413, 415, 500, 503)
_READ: Final = (401, 500, 503)
_ADAPTERS: Final = (400, 401, 403, 404, 408, 409, 413, 415, 500, 503)
_DEBUG: Final = (400, 401, 403, 404, 500, 503)


def _whole(name: str, least: int, most: int) -> Parameter:
    return Parameter(name, {"type": "integer", "minimum": least, "maximum": most})


def _debug(kind: str = JSON, *parameters: Parameter, status: int = 200) -> Operation:
    return Operation(
        tag="Debug",
        answers={status: None},
        kind=kind,
        parameters=parameters,
        refusals=_DEBUG,
        closed="admin",
    )


def _stored(answer: Any, *parameters: Parameter) -> Operation:
    name = Parameter("response_id", {"type": "string", "minLength": 1}, "path")
    return Operation(
        tag="Responses",
        answers={200: answer},
        parameters=(name, *parameters),
        refusals=(400, 401, 404, 500, 503),
    )


_HEALTH: Final = Operation(tag="Health", answers={200: HealthBody, 503: HealthBody}, closed="open")

OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("/v1/completions", "POST"): Operation(
        tag="Generation", request=CompletionRequest, answers={200: CompletionBody}, streams=True,
        refusals=_GENERATE,
    ),
    ("/v1/completions/render", "POST"): Operation(
        tag="Tokens", request=CompletionRequest, answers={200: list[RenderBody]}, refusals=_TOKENS
    ),
    ("/v1/chat/completions", "POST"): Operation(
        tag="Generation", request=ChatRequest, answers={200: ChatBody}, streams=True,
        refusals=_GENERATE,
    ),
    ("/v1/chat/completions/render", "POST"): Operation(
        tag="Tokens", request=ChatRequest, answers={200: RenderBody}, refusals=_TOKENS
    ),
    ("/v1/responses", "POST"): Operation(
        tag="Generation", request=ResponseRequest, answers={200: ResponseBody}, streams=True,
        refusals=_GENERATE,
    ),
    ("/v1/responses/input_tokens", "POST"): Operation(
        tag="Tokens", request=ResponseRequest, answers={200: InputTokens}, refusals=_TOKENS
    ),
    ("/v1/responses/{response_id}", "GET"): _stored(
        ResponseBody,
        Parameter("stream", {"enum": ["true", "false"]}),
        _whole("starting_after", 0, 999_999_999),
    ),
    ("/v1/responses/{response_id}", "DELETE"): _stored(DeletedResponse),
    ("/v1/responses/{response_id}/cancel", "POST"): _stored(ResponseBody),
    ("/v1/responses/{response_id}/input_items", "GET"): _stored(
        ItemList,
        _whole("limit", 1, MAX_PAGE),
        Parameter("order", {"enum": ["asc", "desc"]}),
        Parameter("after", {"type": "string"}),
    ),
    ("/v1/messages", "POST"): Operation(
        tag="Generation", request=MessageRequest, answers={200: MessageBody}, streams=True,
        refusals=_GENERATE, error=AnthropicErrorBody,
    ),
    ("/v1/messages/count_tokens", "POST"): Operation(
        tag="Tokens", request=CountTokensRequest, answers={200: TokenCount}, refusals=_TOKENS,
        error=AnthropicErrorBody,
    ),
    ("/v1/load_lora_adapter", "POST"): Operation(
        tag="Models", request=LoadAdapterRequest, answers={200: AdapterBody},
        refusals=_ADAPTERS, closed="admin",
    ),
    ("/v1/unload_lora_adapter", "POST"): Operation(
        tag="Models", request=UnloadAdapterRequest, answers={200: AdapterBody},
        refusals=_ADAPTERS, closed="admin",
    ),
    ("/v1/models", "GET"): Operation(tag="Models", answers={200: ModelList}, refusals=_READ),
    ("/v1/models/{model:path}", "GET"): Operation(
        tag="Models", answers={200: ModelCard}, refusals=(404, *_READ),
        parameters=(Parameter("model", {"type": "string", "minLength": 1}, "path"),),
    ),
    ("/tokenize", "POST"): Operation(
        tag="Tokens", request=TokenizeRequest, answers={200: TokenizeBody}, refusals=_TOKENS
    ),
    ("/detokenize", "POST"): Operation(
        tag="Tokens", request=DetokenizeRequest, answers={200: DetokenizeBody}, refusals=_TOKENS
    ),
    ("/tokenizer_info", "GET"): Operation(
        tag="Tokens", answers={200: TokenizerInfo}, refusals=_READ
    ),
    ("/get_load", "GET"): Operation(tag="Load", answers={200: LoadBody}, refusals=_READ),
    ("/load", "GET"): Operation(tag="Load", answers={200: ServerLoadBody}, refusals=_READ),
    ("/is_sleeping", "GET"): Operation(tag="Load", answers={200: SleepBody}, refusals=_READ),
    ("/ping", "GET"): _HEALTH,
    ("/ping", "POST"): _HEALTH,
    ("/live", "GET"): Operation(tag="Health", answers={200: dict[str, str]}, closed="open"),
    ("/ready", "GET"): _HEALTH,
    ("/health", "GET"): _HEALTH,
    ("/metrics", "GET"): Operation(
        tag="Health", answers={200: None}, kind="text/plain", refusals=_READ, closed="metrics"
    ),
    ("/version", "GET"): Operation(tag="Health", answers={200: dict[str, str]}, refusals=_READ),
    ("/openapi.json", "GET"): Operation(tag="Description", answers={200: None}, refusals=_READ),
    ("/docs", "GET"): Operation(
        tag="Description", answers={200: None}, kind="text/html", refusals=_READ
    ),
    ("/", "GET"): Operation(
        tag="Page", answers={200: None}, kind="text/html", refusals=(401, 404, 500, 503),
        closed="page",
    ),
    ("/playground/{name}", "GET"): Operation(
        tag="Page", answers={200: None}, kind="*/*", refusals=(401, 404, 500, 503), closed="page",
        parameters=(Parameter("name", {"type": "string", "minLength": 1}, "path"),),
    ),
    ("/debug/timeline", "GET"): _debug(
        JSON,
        _whole("steps", 1, 1_000_000),
        _whole("after", 0, 2**53),
        Parameter("format", {"enum": ["perfetto", "records"]}),
    ),
    ("/debug/requests", "GET"): _debug(JSON, _whole("limit", 1, 1000)),
    ("/debug/pool", "GET"): _debug(JSON, _whole("cells", 1, 1000)),
    ("/debug/plan", "GET"): _debug(JSON, _whole("plans", 1, 1000)),
    ("/debug/profile", "POST"): msgspec.structs.replace(
        _debug(JSON, _whole("steps", 1, 100), status=202), refusals=(409, *_DEBUG)
    ),
    ("/debug/profile", "GET"): msgspec.structs.replace(
        _debug("application/gzip"), answers={200: None, 202: dict[str, Any]}
    ),
    ("/debug/reset_prefix_cache", "POST"): _debug(),
    ("/debug/log_level", "GET"): _debug(),
    ("/debug/log_level", "POST"): _debug(JSON, Parameter("level", {"enum": list(LEVELS)})),
}  # fmt: skip
