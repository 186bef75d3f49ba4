"""``/tokenize``, ``/detokenize``, ``/tokenizer_info`` and the ``/render`` of what generates."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from src.http.protocol.chat import MAX_DOCUMENTS, MAX_MESSAGES, MAX_TOOLS, ChatMessage, Tool


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: of a ``prompt`` or of ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # For messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The tokens of a prompt; ``token_strs`` are as the vocabulary spells them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


class DetokenizeBody(msgspec.Struct):
    """The text of tokens, special ones included."""

    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The answer of ``/tokenizer_info``; special tokens by their role, such as ``eos_token``."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    clean_up_tokenization_spaces: bool
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None


class RenderBody(msgspec.Struct, kw_only=True):
    """What a request comes down to: the token ids that it would prefill, and how it samples."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    priority: int
    cache_salt: str | None
