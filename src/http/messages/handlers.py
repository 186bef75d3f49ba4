"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Final

import msgspec

from src.core.errors import RequestError
from src.http.call import Call
from src.http.chat import PreparedChat, prepare_chat, spelt
from src.http.fields import RequestDecoder
from src.http.generation import collected, describe_trace, forward, submitted
from src.http.messages.shape import MessageShape
from src.http.messages.translation import FIELD_NAMES, translate
from src.http.protocol.chat import ChatRequest
from src.http.protocol.messages import (
    NEUTRAL_IN_MESSAGES,
    ConversationRequest,
    CountTokensRequest,
    MessageRequest,
    TokenCount,
)
from src.http.respelling import respell
from src.http.sampling import check_neutral

_decode: Final = RequestDecoder(MessageRequest)
_decode_count: Final = RequestDecoder(CountTokensRequest)


async def create_message(call: Call) -> None:
    """Answer a conversation, as blocks."""
    request = _decode(call)
    chat_request = _translated(call, request)
    try:
        await _answer(call, request, await prepare_chat(call, chat_request))
    except RequestError as error:
        raise respell(spelt(error, chat_request), FIELD_NAMES) from None


async def count_tokens(call: Call) -> None:
    """How many tokens a conversation has as a prompt."""
    chat_request = _translated(call, _decode_count(call))
    try:
        chat = await prepare_chat(call, chat_request)
        ((prompt, _),) = chat.job.prompts
        token_ids = await chat.engine.tokenize(prompt, chat=chat.job.chat)
    except RequestError as error:
        raise respell(spelt(error, chat_request), FIELD_NAMES) from None
    await call.answer(msgspec.json.encode(TokenCount(len(token_ids))))


def _translated(call: Call, request: ConversationRequest) -> ChatRequest:
    check_neutral(request, NEUTRAL_IN_MESSAGES)
    settings = call.server.config.chat
    return translate(request, sets_thinking=settings.request_templates != "none")


async def _answer(call: Call, request: MessageRequest, chat: PreparedChat) -> None:
    shape = MessageShape(chat)
    describe_trace(call, shape.id, request.model, stream=bool(request.stream))
    async with submitted(chat.engine, chat.job, call.id, call.trace) as (submission,):
        if request.stream:
            await forward(call, 0, submission, shape)
            await call.end(shape.ending(submission.usage))
        else:
            result = await collected(submission)
            await call.answer(shape.body(result.completions[0], submission.usage))
