"""What vectors are made of: the texts of a request, and a conversation in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from src.core.errors import InvalidRequestError, RequestError
from src.engine.client import AsyncEngine
from src.engine.requests.embedding_run import EmbeddingOptions
from src.http.chat.conversation import conversation
from src.http.chat.handlers import chat_names, with_client_names
from src.http.protocol.chat import ChatMessage, ChatRequest
from src.http.server.call import Call

Text: TypeAlias = str | list[int]
Given: TypeAlias = str | Sequence[int | str | list[int]] | None

# Fields that only messages have a use for, named as a chat has them.
_OF_MESSAGES: Final = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)


def given_texts(given: Given, most: int, field: str = "input") -> Sequence[Text]:
    """The texts of a request: a text and a list of token ids are one, other lists are several.

    Raises
    ------
    InvalidRequestError
        There is none, there are more than ``most``, or a list mixes kinds; names ``field``.
    """
    if given is None:
        raise InvalidRequestError(f"missing required field `{field}`", param=field)
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError(f"{field} must not be an empty list", param=field)
    kind = type(given[0])
    if kind is not int and len(given) > most:
        raise InvalidRequestError(
            f"{field} may have at most {most} entries, got {len(given)}", param=field
        )
    if set(map(type, given)) != {kind}:
        raise InvalidRequestError(
            f"{field} must be a string, a list of token ids, a list of strings or a list of lists "
            "of token ids, got a mixed list",
            param=field,
        )
    return [cast(list[int], given)] if kind is int else cast(list[Text], given)


async def given_inputs(call: Call, engine: AsyncEngine, request: Any) -> Sequence[Text]:
    """The texts of a request that may have ``messages`` instead, as token ids.

    Raises
    ------
    InvalidRequestError
        What `given_texts` and the conversation raise, or there are both.
    """
    messages: list[ChatMessage] | None = request.messages
    if messages is None:
        for name in _OF_MESSAGES:
            if getattr(request, name) is not None:
                raise InvalidRequestError(f"{name} may only be given with messages", param=name)
        texts = given_texts(request.input, call.server.config.http.max_embedding_inputs)
        _check_text_fields(request, texts)
        return texts
    if request.input is not None:
        raise InvalidRequestError("one of input and messages is required", param="messages")
    if getattr(request, "prompt_name", None) is not None:
        raise InvalidRequestError(
            "prompt_name may only be given with texts, not with messages", param="prompt_name"
        )
    same: dict[str, Any] = {name: getattr(request, name) for name in _OF_MESSAGES}
    # Nothing is answered: the conversation ends where it ends.
    same["add_generation_prompt"] = bool(request.add_generation_prompt)
    chat = ChatRequest(messages=messages, add_special_tokens=request.add_special_tokens, **same)
    shown, options = await conversation(chat, engine.config, call.tenant)
    try:
        return [await engine.tokenize(shown, chat=options)]
    except RequestError as error:
        raise with_client_names(error, chat_names(chat)) from None


def _check_text_fields(request: Any, texts: Sequence[Text]) -> None:
    """Refuse what is done to texts, and was asked for with token ids.

    Raises
    ------
    InvalidRequestError
        Names the field.
    """
    if isinstance(texts[0], str):
        return
    for name in ("prompt_name", "add_special_tokens"):
        if getattr(request, name, None):
            raise InvalidRequestError(
                f"{name} may only be given with texts, not with token ids", param=name
            )


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error, with its field as this protocol names it: ours to its own."""
    if (own := error.param) is not None and own in names:
        error.rename(own, names[own])
    return error


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors, see `renamed`."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, names) from None


def input_names(request: Any) -> Mapping[str, str]:
    """What errors of `given_inputs` call the input, if it is a conversation."""
    return {} if request.messages is None else {"input": "messages"}


def pooled_options(
    call: Call,
    *,
    answer_id: str | None = None,
    model: str | None = None,
    lora: str | None = None,
    priority: int | None = None,
    timeout: float | None = None,
    cache_salt: str | None = None,
) -> EmbeddingOptions:
    """What every call for vectors or scores is made with.

    ``answer_id`` and ``model`` are those of the answer; they are for the request's trace.

    Raises
    ------
    InvalidRequestError
        The header that says how long the request may take cannot be read.
    """
    if call.trace is not None:
        call.trace.response_id = answer_id or call.id
        call.trace.model = model or call.trace.model
    return {
        "request_id": call.id,
        "priority": priority or 0,
        "timeout": call.timeout(timeout, call.server.config.http.request_timeout),
        "cache_salt": cache_salt or "",
        "tenant": call.tenant,
        "lora": lora,
        "trace": call.trace,
    }
