"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from src.core.errors import InvalidRequestError, PromptTooLongError, RequestError
from src.core.sampling_params import shown
from src.engine.client import AsyncEngine
from src.engine.requests.prompts import ChatOptions
from src.http.chat.conversation import conversation
from src.http.chat.handlers import chat_names, with_client_names
from src.http.generation.sampling import unsupported
from src.http.protocol.chat import ChatRequest
from src.http.protocol.tokens import (
    DetokenizeBody,
    DetokenizeRequest,
    TokenizeBody,
    TokenizeRequest,
    TokenizerInfo,
)
from src.http.server.body_work import in_turn
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import served_name

_decode_tokenize: Final = RequestDecoder(TokenizeRequest)
_decode_detokenize: Final = RequestDecoder(DetokenizeRequest)
_encode: Final = msgspec.json.Encoder().encode

# Fields that only messages have a use for, named as a chat has them.
_OF_MESSAGES: Final = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "tools",
)


async def tokenize(call: Call) -> None:
    """The token ids that a prompt or a conversation would be served as."""
    request = _decode_tokenize(call)
    engine = await call.admitted_engine()
    served_name(engine, request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("one of prompt and messages is required", param="prompt")
    if request.messages is None:
        token_ids = await _of_text(engine, request, call.tenant)
    else:
        token_ids = await _of_messages(engine, request, call.tenant)
    names = None
    if request.return_token_strs:
        names = await in_turn(_names, engine, token_ids)
    body = TokenizeBody(
        count=len(token_ids),
        max_model_len=engine.model_info.max_model_len,
        tokens=token_ids,
        token_strs=names,
    )
    await call.answer(_encode(body))


async def detokenize(call: Call) -> None:
    """The text of token ids, special tokens included."""
    request = _decode_detokenize(call)
    engine = await call.admitted_engine()
    info = engine.model_info
    served_name(engine, request.model)
    if len(request.tokens) > info.max_model_len:
        raise PromptTooLongError(
            f"tokens may have at most {info.max_model_len} entries, the model's context, got "
            f"{len(request.tokens)}",
            param="tokens",
        )
    for token_id in request.tokens:
        if not 0 <= token_id < info.vocab_size:
            raise InvalidRequestError(
                f"tokens must be from 0 to {info.vocab_size - 1}, got {shown(token_id)}",
                param="tokens",
            )
    text = await in_turn(engine.tokenizer.decode, request.tokens, False)
    await call.answer(_encode(DetokenizeBody(text)))


async def tokenizer_info(call: Call) -> None:
    """What a client needs to know of the tokenizer."""
    engine = await call.admitted_engine()
    tokenizer = engine.tokenizer
    sources = tokenizer.chat_template.sources if tokenizer.has_chat_template else None
    if sources is not None and len(sources) == 1:
        template: str | dict[str, str] | None = next(iter(sources.values()))
    else:
        template = sources
    body = TokenizerInfo(
        # The class of transformers that reads the same files.
        tokenizer_class="PreTrainedTokenizerFast",
        vocab_size=tokenizer.vocab_size,
        model_max_length=engine.model_info.max_model_len,
        clean_up_tokenization_spaces=tokenizer.cleans_up,
        special_tokens=tokenizer.special_tokens,
        chat_template=template,
    )
    await call.answer(_encode(body))


async def _of_text(engine: AsyncEngine, request: TokenizeRequest, tenant: str) -> list[int]:
    for name in _OF_MESSAGES:
        if getattr(request, name) is not None:
            raise InvalidRequestError(f"{name} may only be given with messages", param=name)
    assert request.prompt is not None
    if not request.prompt:
        # A prompt needs a token, unlike a text whose tokens are asked for.
        return engine.tokenizer.encode("", request.add_special_tokens is not False)
    options = ChatOptions(add_special_tokens=request.add_special_tokens, tenant=tenant)
    return await engine.tokenize(request.prompt, chat=options)


async def _of_messages(engine: AsyncEngine, request: TokenizeRequest, tenant: str) -> list[int]:
    if request.chat_template is not None:
        raise unsupported("chat_template")
    assert request.messages is not None
    same: dict[str, Any] = {name: getattr(request, name) for name in _OF_MESSAGES}
    chat = ChatRequest(
        messages=request.messages, add_special_tokens=request.add_special_tokens, **same
    )
    messages, options = await conversation(chat, engine.config, tenant)
    try:
        return await engine.tokenize(messages, chat=options)
    except RequestError as error:
        raise with_client_names(error, chat_names(chat)) from None


def _names(engine: AsyncEngine, token_ids: list[int]) -> list[str]:
    tokenizer = engine.tokenizer
    return [tokenizer.id_to_token(token_id) or "" for token_id in token_ids]
