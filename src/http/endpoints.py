"""Every endpoint: its path, what answers it, who may ask, what it takes and answers with."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from src.http.admin.adapters import load_adapter, unload_adapter
from src.http.admin.debug import (
    change_log_level,
    reset_prefix_cache,
    show_log_level,
    show_plan,
    show_pool,
    show_profile,
    show_requests,
    show_timeline,
    start_profile,
)
from src.http.admin.health import HealthBody, health, live, ready, version
from src.http.admin.info import info
from src.http.admin.load import get_load, is_sleeping, server_load
from src.http.admin.metrics import show_metrics
from src.http.admin.models import list_models, show_model
from src.http.chat.handlers import create_chat_completion
from src.http.completions.handlers import create_completion
from src.http.embeddings.cohere import embed_for_cohere
from src.http.embeddings.handlers import create_embeddings
from src.http.embeddings.inference import embed
from src.http.messages.handlers import count_tokens, create_message
from src.http.openapi.handlers import show_docs, show_openapi
from src.http.openapi.operations import JSON, Operation, Parameter
from src.http.playground.handlers import show_page, show_page_file
from src.http.protocol.adapters import (
    AdapterBody,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from src.http.protocol.chat import ChatBody, ChatRequest
from src.http.protocol.cohere import CohereEmbedBody, CohereEmbedRequest
from src.http.protocol.completions import CompletionBody, CompletionRequest
from src.http.protocol.embeddings import EmbeddingBody, EmbeddingRequest
from src.http.protocol.inference import EmbedRequest, InfoBody
from src.http.protocol.load import LoadBody, ServerLoadBody, SleepBody
from src.http.protocol.messages import (
    CountTokensRequest,
    MessageBody,
    MessageRequest,
    TokenCount,
)
from src.http.protocol.models import ModelCard, ModelList
from src.http.protocol.ranks import (
    ClassifyBody,
    ClassifyRequest,
    PoolingBody,
    PoolingRequest,
    Prediction,
    PredictRequest,
    Rank,
    RerankBody,
    RerankRequest,
    ScoreBody,
    ScoreRequest,
)
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
from src.http.ranks.classes import classify, predict
from src.http.ranks.pooling import pool
from src.http.ranks.reranks import rerank, rerank_for_cohere
from src.http.ranks.scores import score
from src.http.responses.handlers import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    show_response,
)
from src.http.responses.inputs import MAX_PAGE
from src.http.server.call import Handler
from src.http.server.error_format import AnthropicErrorBody
from src.http.tokens.handlers import detokenize, tokenize, tokenizer_info
from src.http.tokens.render import render_chat, render_completion
from src.observability.logs import LEVELS

_GENERATE: Final = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_TOKENS: Final = (400, 401, 404, 408, 413, 415, 500, 503)
_READ: Final = (401, 500, 503)
_ADAPTERS: Final = (400, 401, 403, 404, 408, 409, 413, 415, 500, 503)
_DEBUG: Final = (400, 401, 403, 404, 500, 503)


def _whole(name: str, least: int, most: int) -> Parameter:
    return Parameter(name, {"type": "integer", "minimum": least, "maximum": most})


def _debug(
    path: str,
    method: str,
    handler: Handler,
    kind: str = JSON,
    *parameters: Parameter,
    status: int = 200,
) -> Operation:
    return Operation(
        path,
        method,
        handler,
        tag="Debug",
        answers={status: None},
        kind=kind,
        parameters=parameters,
        refusals=_DEBUG,
        access="admin",
    )


def _stored(
    path: str, method: str, handler: Handler, answer: Any, *parameters: Parameter
) -> Operation:
    name = Parameter("response_id", {"type": "string", "minLength": 1}, "path")
    return Operation(
        path,
        method,
        handler,
        tag="Responses",
        answers={200: answer},
        parameters=(name, *parameters),
        refusals=(400, 401, 404, 500, 503),
    )


def _health(path: str, method: str, handler: Handler) -> Operation:
    answers = {200: HealthBody, 503: HealthBody}
    return Operation(path, method, handler, tag="Health", answers=answers, access="open")


# docs/api.md describes each, and a test fails when it does not.
ENDPOINTS: Final = (
    Operation("/v1/completions", "POST", create_completion,
        tag="Generation", request=CompletionRequest, answers={200: CompletionBody}, streams=True,
        refusals=_GENERATE,
    ),
    Operation("/v1/completions/render", "POST", render_completion,
        tag="Tokens", request=CompletionRequest, answers={200: list[RenderBody]}, refusals=_TOKENS
    ),
    Operation("/v1/chat/completions", "POST", create_chat_completion,
        tag="Generation", request=ChatRequest, answers={200: ChatBody}, streams=True,
        refusals=_GENERATE,
    ),
    Operation("/v1/chat/completions/render", "POST", render_chat,
        tag="Tokens", request=ChatRequest, answers={200: RenderBody}, refusals=_TOKENS
    ),
    Operation("/v1/responses", "POST", create_response,
        tag="Generation", request=ResponseRequest, answers={200: ResponseBody}, streams=True,
        refusals=_GENERATE,
    ),
    Operation("/v1/responses/input_tokens", "POST", count_input_tokens,
        tag="Tokens", request=ResponseRequest, answers={200: InputTokens}, refusals=_TOKENS
    ),
    Operation("/v1/embeddings", "POST", create_embeddings,
        tag="Embeddings", request=EmbeddingRequest, answers={200: EmbeddingBody},
        refusals=_GENERATE,
    ),
    Operation("/v2/embed", "POST", embed_for_cohere,
        tag="Embeddings", request=CohereEmbedRequest, answers={200: CohereEmbedBody},
        refusals=_GENERATE,
    ),
    # huggingface_hub's clients of text-embeddings-inference post to the server's own address.
    *(
        Operation(path, "POST", embed,
            tag="Embeddings", request=EmbedRequest, answers={200: list[list[float]]},
            refusals=_GENERATE,
        )
        for path in ("/embed", "/")
    ),
    *(
        Operation(path, "POST", score,
            tag="Ranks", request=ScoreRequest, answers={200: ScoreBody}, refusals=_GENERATE,
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        Operation(path, "POST", handler,
            tag="Ranks", request=RerankRequest, answers={200: RerankBody | list[Rank]},
            refusals=_GENERATE,
        )
        for path, handler in (
            ("/rerank", rerank), ("/v1/rerank", rerank), ("/v2/rerank", rerank_for_cohere)
        )
    ),
    Operation("/classify", "POST", classify,
        tag="Ranks", request=ClassifyRequest, answers={200: ClassifyBody}, refusals=_GENERATE,
    ),
    Operation("/predict", "POST", predict,
        tag="Ranks", request=PredictRequest,
        answers={200: list[Prediction | list[Prediction]]}, refusals=_GENERATE,
    ),
    Operation("/pooling", "POST", pool,
        tag="Ranks", request=PoolingRequest, answers={200: PoolingBody}, refusals=_GENERATE,
    ),
    _stored("/v1/responses/{response_id}", "GET", show_response,
        ResponseBody,
        Parameter("stream", {"enum": ["true", "false"]}),
        _whole("starting_after", 0, 999_999_999),
    ),
    _stored("/v1/responses/{response_id}", "DELETE", delete_response, DeletedResponse),
    _stored("/v1/responses/{response_id}/cancel", "POST", cancel_response, ResponseBody),
    _stored("/v1/responses/{response_id}/input_items", "GET", list_input_items,
        ItemList,
        _whole("limit", 1, MAX_PAGE),
        Parameter("order", {"enum": ["asc", "desc"]}),
        Parameter("after", {"type": "string"}),
    ),
    Operation("/v1/messages", "POST", create_message,
        tag="Generation", request=MessageRequest, answers={200: MessageBody}, streams=True,
        refusals=_GENERATE, error=AnthropicErrorBody,
    ),
    Operation("/v1/messages/count_tokens", "POST", count_tokens,
        tag="Tokens", request=CountTokensRequest, answers={200: TokenCount}, refusals=_TOKENS,
        error=AnthropicErrorBody,
    ),
    Operation("/v1/load_lora_adapter", "POST", load_adapter,
        tag="Models", request=LoadAdapterRequest, answers={200: AdapterBody},
        refusals=_ADAPTERS, access="admin",
    ),
    Operation("/v1/unload_lora_adapter", "POST", unload_adapter,
        tag="Models", request=UnloadAdapterRequest, answers={200: AdapterBody},
        refusals=_ADAPTERS, access="admin",
    ),
    Operation("/v1/models", "GET", list_models,
        tag="Models", answers={200: ModelList}, refusals=_READ
    ),
    Operation("/v1/models/{model:path}", "GET", show_model,
        tag="Models", answers={200: ModelCard}, refusals=(404, *_READ),
        parameters=(Parameter("model", {"type": "string", "minLength": 1}, "path"),),
    ),
    Operation("/info", "GET", info, tag="Models", answers={200: InfoBody}, refusals=_READ),
    Operation("/tokenize", "POST", tokenize,
        tag="Tokens", request=TokenizeRequest, answers={200: TokenizeBody}, refusals=_TOKENS
    ),
    Operation("/detokenize", "POST", detokenize,
        tag="Tokens", request=DetokenizeRequest, answers={200: DetokenizeBody}, refusals=_TOKENS
    ),
    Operation("/tokenizer_info", "GET", tokenizer_info,
        tag="Tokens", answers={200: TokenizerInfo}, refusals=_READ
    ),
    Operation("/get_load", "GET", get_load, tag="Load", answers={200: LoadBody}, refusals=_READ),
    Operation("/load", "GET", server_load,
        tag="Load", answers={200: ServerLoadBody}, refusals=_READ
    ),
    Operation("/is_sleeping", "GET", is_sleeping,
        tag="Load", answers={200: SleepBody}, refusals=_READ
    ),
    _health("/ping", "GET", health),
    _health("/ping", "POST", health),
    Operation("/live", "GET", live, tag="Health", answers={200: dict[str, str]}, access="open"),
    _health("/ready", "GET", ready),
    _health("/health", "GET", health),
    Operation("/metrics", "GET", show_metrics,
        tag="Health", answers={200: None}, kind="text/plain", refusals=_READ, access="metrics"
    ),
    Operation("/version", "GET", version,
        tag="Health", answers={200: dict[str, str]}, refusals=_READ
    ),
    Operation("/openapi.json", "GET", show_openapi,
        tag="Description", answers={200: None}, refusals=_READ
    ),
    Operation("/docs", "GET", show_docs,
        tag="Description", answers={200: None}, kind="text/html", refusals=_READ
    ),
    Operation("/", "GET", show_page,
        tag="Page", answers={200: None}, kind="text/html", refusals=(401, 404, 500, 503),
        access="page",
    ),
    Operation("/playground/{name}", "GET", show_page_file,
        tag="Page", answers={200: None}, kind="*/*", refusals=(401, 404, 500, 503), access="page",
        parameters=(Parameter("name", {"type": "string", "minLength": 1}, "path"),),
    ),
    _debug("/debug/timeline", "GET", show_timeline,
        JSON,
        _whole("steps", 1, 1_000_000),
        _whole("after", 0, 2**53),
        Parameter("format", {"enum": ["perfetto", "records"]}),
    ),
    _debug("/debug/requests", "GET", show_requests, JSON, _whole("limit", 1, 1000)),
    _debug("/debug/pool", "GET", show_pool, JSON, _whole("cells", 1, 1000)),
    _debug("/debug/plan", "GET", show_plan, JSON, _whole("plans", 1, 1000)),
    msgspec.structs.replace(
        _debug("/debug/profile", "POST", start_profile, JSON, _whole("steps", 1, 100), status=202),
        refusals=(409, *_DEBUG),
    ),
    msgspec.structs.replace(
        _debug("/debug/profile", "GET", show_profile, "application/gzip"),
        answers={200: None, 202: dict[str, Any]},
    ),
    _debug("/debug/reset_prefix_cache", "POST", reset_prefix_cache),
    _debug("/debug/log_level", "GET", show_log_level),
    _debug("/debug/log_level", "POST", change_log_level,
        JSON, Parameter("level", {"enum": list(LEVELS)})
    ),
)  # fmt: skip
