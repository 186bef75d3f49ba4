"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Final

import msgspec

from src.core.errors import PromptTooLongError, RequestError
from src.http.chat.handlers import ChatJob, chat_names, prepare_chat, with_client_names
from src.http.generation.field_names import with_client_field_names
from src.http.generation.generation import collected, describe_trace, forward, submitted
from src.http.generation.sampling import FieldNames, check_neutral
from src.http.messages.encoder import MessageEncoder
from src.http.messages.translation import FIELD_NAMES, translate
from src.http.protocol.chat import ChatRequest
from src.http.protocol.messages import (
    NEUTRAL_IN_MESSAGES,
    ConversationRequest,
    CountTokensRequest,
    MessageRequest,
    TokenCount,
)
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder

_decode: Final = RequestDecoder(MessageRequest)
_decode_count: Final = RequestDecoder(CountTokensRequest)


async def create_message(call: Call) -> None:
    """Answer a conversation, as blocks."""
    request = _decode(call)
    chat_request = _translated(call, request)
    names = chat_names(chat_request)
    try:
        chat = await _prepared(call, chat_request)
        # An answer may take long, and there may be many.
        del request, chat_request
        await _answer(call, chat)
    except RequestError as error:
        raise _with_client_names(error, names) from None


async def count_tokens(call: Call) -> None:
    """How many tokens a conversation has as a prompt."""
    chat_request = _translated(call, _decode_count(call))
    try:
        chat = await _prepared(call, chat_request)
        ((prompt, _),) = chat.prompts
        token_ids = await chat.engine.tokenize(prompt, chat=chat.chat)
    except RequestError as error:
        raise _with_client_names(error, chat_names(chat_request)) from None
    await call.answer(msgspec.json.encode(TokenCount(len(token_ids))))


def _with_client_names(error: RequestError, names: FieldNames) -> RequestError:
    """The same error in the words of this protocol."""
    error = with_client_field_names(with_client_names(error, names), FIELD_NAMES)
    if isinstance(error, PromptTooLongError):
        # As Anthropic says it: agents read these words and numbers, and shorten what they send.
        if error.lengths is None:
            error.message = f"prompt is too long: {error.message}"
        else:
            prompt_len, max_tokens, context = error.lengths
            error.message = f"prompt is too long: {prompt_len} tokens > {context} maximum"
            if max_tokens:
                error.message = (
                    "input length and `max_tokens` exceed context limit: "
                    f"{prompt_len} + {max_tokens} > {context}, decrease input length or "
                    "`max_tokens` and try again"
                )
    return error


def _translated(call: Call, request: ConversationRequest) -> ChatRequest:
    check_neutral(request, NEUTRAL_IN_MESSAGES)
    settings = call.server.config.chat
    return translate(
        request,
        sets_thinking=settings.request_templates != "none",
        replaces_media=settings.media_placeholders != "none",
    )


async def _prepared(call: Call, request: ChatRequest) -> ChatJob:
    # Clients ask every model to think, whether it can or not.
    return await prepare_chat(call, request, needs_thinking=False)


async def _answer(call: Call, chat: ChatJob) -> None:
    encoder = MessageEncoder(chat)
    describe_trace(call, encoder.id, chat.asked_model, stream=chat.streams)
    async with submitted(chat, call.id, call.trace) as (submission,):
        if chat.streams:
            await forward(call, 0, submission, encoder)
            await call.end(encoder.ending(submission.usage))
        else:
            result = await collected(submission)
            await call.answer(encoder.body(result.completions[0], submission.usage))
