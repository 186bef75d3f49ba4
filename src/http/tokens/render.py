"""``POST /v1/completions/render`` and ``/v1/chat/completions/render``.

Routers that send a prompt to where its beginning is cached ask for its token ids. Nothing is
queued, but the request is checked as if it were.
"""

from __future__ import annotations

import uuid
from typing import Final

import msgspec

from src.core.errors import RequestError
from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.http.chat.handlers import chat_names, prepare_chat, with_client_names
from src.http.completions.handlers import prepare_completion
from src.http.generation.json_chunks import gathered, json_array
from src.http.generation.sampling import FieldNames
from src.http.protocol.chat import ChatRequest
from src.http.protocol.completions import CompletionRequest
from src.http.protocol.generation import GenerationRequest
from src.http.protocol.tokens import RenderBody
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder

_decode_chat: Final = RequestDecoder(ChatRequest)
_decode_completion: Final = RequestDecoder(CompletionRequest)
_encode: Final = msgspec.json.Encoder().encode


async def render_chat(call: Call) -> None:
    """The token ids of a conversation."""
    request = _decode_chat(call)
    try:
        chat = await prepare_chat(call, request)
        ((prompt, params),) = chat.prompts
        token_ids = await chat.engine.tokenize(prompt, chat=chat.chat)
        body = _body(chat.engine, chat.model, request, token_ids, params)
    except RequestError as error:
        raise with_client_names(error, chat_names(request)) from None
    await call.answer(_encode(body))


async def render_completion(call: Call) -> None:
    """The token ids of each prompt."""
    request = _decode_completion(call)
    try:
        completion = await prepare_completion(call, request)
        # Each has its own copy of the parameters, which may be long lists.
        bodies = json_array(
            [_encode(_body(completion.engine, completion.model, request, token_ids, params))]
            for token_ids, (_, params) in zip(
                completion.prompt_token_ids or [], completion.prompts, strict=True
            )
        )
        pieces = await gathered(bodies)
    except RequestError as error:
        FieldNames.of(request).apply(error)
        raise
    await call.answer(*pieces)


def _body(
    engine: AsyncEngine,
    model: str,
    request: GenerationRequest,
    token_ids: list[int],
    params: SamplingParams,
) -> RenderBody:
    engine.check(params)
    return RenderBody(
        request_id=request.request_id or uuid.uuid4().hex,
        model=model,
        token_ids=token_ids,
        sampling_params=msgspec.to_builtins(params),
        stream=bool(request.stream),
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )
