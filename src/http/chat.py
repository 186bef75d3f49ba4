"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from src.core.errors import RequestError
from src.core.outputs import Delta, GenerationResult, Usage
from src.engine.client import AsyncEngine
from src.http.call import Call
from src.http.conversation import conversation
from src.http.fields import RequestDecoder
from src.http.fingerprint import system_fingerprint
from src.http.generation import Job, finish_reason, job_timeout, run, stop_reason, usage_body
from src.http.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from src.http.prompts import tokens_to_keep
from src.http.protocol.chat import (
    ChatAnswer,
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatPiece,
    ChatRequest,
)
from src.http.sampling import (
    check_top_logprobs,
    refuse_unsupported,
    respell_max_tokens,
    sampling_params,
    unsupported,
)
from src.http.server import served_name

_decode: Final = RequestDecoder(ChatRequest)
_encode = msgspec.json.Encoder().encode


async def create_chat_completion(call: Call) -> None:
    """Answer a conversation ``n`` times."""
    request = _decode(call)
    try:
        chat = await prepare_chat(call, request)
        await run(call, chat.engine, request, chat.job, ChatShape(request, chat))
    except RequestError as error:
        raise spelt(error, request) from None


class PreparedChat(NamedTuple):
    """A conversation that may be submitted: who serves it, under which name, and as what.

    ``prompt_token_ids`` are only there where the request needs them beforehand.
    """

    engine: AsyncEngine
    model: str
    job: Job
    prompt_token_ids: list[int] | None


async def prepare_chat(call: Call, request: ChatRequest) -> PreparedChat:
    """Check a request and turn it into a job, for every endpoint that holds conversations.

    Raises
    ------
    SlipstreamError
        The request cannot be served; :func:`spelt` names its fields as a client does.
    """
    refuse_unsupported(request)
    _check(request)
    messages, options = conversation(request)
    logprobs = check_top_logprobs(request.logprobs, request.top_logprobs)
    engine = await call.server.ready_engine()
    info = engine.model_info
    name = served_name(info, request.model)
    most = request.max_completion_tokens
    max_tokens = request.max_tokens if most is None else most
    params = sampling_params(
        request, info.default_sampling, max_tokens=max_tokens, logprobs=logprobs
    )
    keep = tokens_to_keep(request.truncate_prompt_tokens, info.max_model_len, max_tokens or 1)
    prompt_token_ids = None
    if keep is not None or request.return_token_ids:
        prompt_token_ids = await engine.tokenize(messages, chat=options)
        prompt_token_ids = prompt_token_ids if keep is None else prompt_token_ids[-keep:]
    job = Job(
        prompts=[(messages if prompt_token_ids is None else prompt_token_ids, params)],
        chat=options,
        priority=request.priority or 0,
        timeout=job_timeout(request, call.server.config.http.request_timeout),
        cache_salt=request.cache_salt or "",
    )
    return PreparedChat(engine, name, job, prompt_token_ids)


def _check(request: ChatRequest) -> None:
    choice = request.tool_choice
    if choice is not None and choice not in ("auto", "none"):
        raise unsupported("tool_choice", " other than auto and none")
    if request.echo:
        raise unsupported("echo")
    tools = () if choice == "none" else request.tools or ()
    if tools and request.parallel_tool_calls is False:
        # How many calls the model writes is up to the model: they come back as text.
        raise unsupported("parallel_tool_calls", " = false with tools")
    for index, tool in enumerate(tools):
        if tool.function.strict:
            raise unsupported(f"tools[{index}].function.strict", " = true")


def spelt(error: RequestError, request: ChatRequest) -> RequestError:
    """The same error, with its field as this client spelt it."""
    if error.param == "prompt":
        error.param = "messages"
    respell_max_tokens(error, request)
    return error


class ChatShape:
    """Spells one request's answers."""

    def __init__(self, request: ChatRequest, chat: PreparedChat) -> None:
        self.id = f"chatcmpl-{request.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        engine, self._model = chat.engine, chat.model
        self._fingerprint = system_fingerprint(engine.config)
        # Shown where it is asked for: in an answer's outermost object, in a stream with the roles.
        self._prompt_token_ids = chat.prompt_token_ids if request.return_token_ids else None
        self._names = TokenNames(engine.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._shows_prompt_logprobs = request.prompt_logprobs is not None
        options = request.stream_options
        self._counts_always = options is not None and bool(options.continuous_usage_stats)
        self._with_null_usage = options is not None and bool(options.include_usage)
        # All chunks of a stream begin alike; only what differs is encoded for each.
        head = {"id": self.id, "object": "chat.completion.chunk", "created": self._created}
        head |= {"model": self._model, "system_fingerprint": self._fingerprint}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._begun: set[int] = set()

    def events(self, prompt: int, deltas: Sequence[Delta]) -> bytes:
        """One event for each delta that says anything, and one with the role before the first."""
        return b"".join(self._event(delta) for delta in deltas)

    def usage_event(self, usage: Usage) -> bytes:
        """The event of ``include_usage``."""
        return self._head + b'],"usage":' + _encode(usage_body(usage)) + b"}\n\n"

    def body(self, results: Sequence[GenerationResult], usage: Usage) -> bytes:
        """The whole answer."""
        (result,) = results
        choices = [
            ChatChoice(
                completion.index,
                ChatAnswer(content=completion.text),
                None
                if completion.logprobs is None
                else chat_logprobs(self._names, completion.logprobs),
                finish_reason(completion.finish_reason) or "",
                stop_reason(completion.finish_reason, completion.stop_reason),
                self._shown(completion.token_ids),
            )
            for completion in result.completions
        ]
        answer = ChatBody(
            id=self.id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage_body(usage),
        )
        if self._prompt_token_ids is not None:
            answer.prompt_token_ids = self._prompt_token_ids
        if self._shows_prompt_logprobs:
            answer.prompt_logprobs = prompt_logprobs(self._names, result.prompt_logprobs or ())
        return _encode(answer)

    def _event(self, delta: Delta) -> bytes:
        events = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            opening = ChatChunkChoice(delta.index, ChatPiece("assistant", ""))
            events = self._chunk(opening, delta.usage, self._prompt_token_ids)
        token_ids = self._shown(delta.token_ids)
        if not (delta.text or delta.logprobs or token_ids) and delta.finish_reason is None:
            return events
        choice = ChatChunkChoice(
            delta.index,
            ChatPiece(content=delta.text or None),
            chat_logprobs(self._names, delta.logprobs) if delta.logprobs else None,
            finish_reason(delta.finish_reason),
            stop_reason(delta.finish_reason, delta.stop_reason),
            token_ids,
        )
        return events + self._chunk(choice, delta.usage)

    def _shown(self, token_ids: list[int]) -> list[int] | msgspec.UnsetType:
        return msgspec.UNSET if self._prompt_token_ids is None else token_ids

    def _chunk(
        self, choice: ChatChunkChoice, usage: Usage, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        if self._counts_always:
            end = b'],"usage":' + _encode(usage_body(usage)) + b"}\n\n"
        else:
            end = b'],"usage":null}\n\n' if self._with_null_usage else b"]}\n\n"
        if prompt_token_ids is not None:
            end = end[:-3] + b',"prompt_token_ids":' + _encode(prompt_token_ids) + end[-3:]
        return self._head + _encode(choice) + end
