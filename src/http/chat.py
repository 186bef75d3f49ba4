"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec

from src.core.errors import RequestError
from src.core.outputs import Delta, GenerationResult, Usage
from src.engine.client import AsyncEngine
from src.http.call import Call
from src.http.conversation import conversation
from src.http.fields import RequestDecoder
from src.http.generation import Job, finish_reason, job_timeout, run, stop_reason, usage_body
from src.http.logprobs import TokenNames, chat_logprobs, prompt_logprobs
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
    refuse_unsupported(request)
    _check(request)
    messages, options = conversation(request)
    logprobs = check_top_logprobs(request.logprobs, request.top_logprobs)
    engine = await call.server.ready_engine()
    name = served_name(engine.model_info, request.model)
    most = request.max_completion_tokens
    params = sampling_params(
        request,
        engine.model_info.default_sampling,
        max_tokens=request.max_tokens if most is None else most,
        logprobs=logprobs,
    )
    job = Job(
        prompts=[(messages, params)],
        chat=options,
        priority=request.priority or 0,
        timeout=job_timeout(request, call.server.config.http.request_timeout),
        cache_salt=request.cache_salt or "",
    )
    try:
        await run(call, engine, request, job, ChatShape(request, name, engine))
    except RequestError as error:
        raise _spelt(error, request) from None


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


def _spelt(error: RequestError, request: ChatRequest) -> RequestError:
    """The same error, with its field as this client spelt it."""
    if error.param == "prompt":
        error.param = "messages"
    respell_max_tokens(error, request)
    return error


class ChatShape:
    """Spells one request's answers."""

    def __init__(self, request: ChatRequest, model: str, engine: AsyncEngine) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._names = TokenNames(engine.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._shows_prompt_logprobs = request.prompt_logprobs is not None
        options = request.stream_options
        self._counts_always = options is not None and bool(options.continuous_usage_stats)
        self._with_null_usage = options is not None and bool(options.include_usage)
        # All chunks of a stream begin alike; only what differs is encoded for each.
        head = {"id": self.id, "object": "chat.completion.chunk", "created": self._created}
        self._head = b"data: " + _encode({**head, "model": model})[:-1] + b',"choices":['
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
            )
            for completion in result.completions
        ]
        answer = ChatBody(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage_body(usage),
        )
        if self._shows_prompt_logprobs:
            answer.prompt_logprobs = prompt_logprobs(self._names, result.prompt_logprobs or ())
        return _encode(answer)

    def _event(self, delta: Delta) -> bytes:
        events = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            opening = ChatChunkChoice(delta.index, ChatPiece("assistant", ""))
            events = self._chunk(opening, delta.usage)
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return events
        choice = ChatChunkChoice(
            delta.index,
            ChatPiece(content=delta.text or None),
            chat_logprobs(self._names, delta.logprobs) if delta.logprobs else None,
            finish_reason(delta.finish_reason),
            stop_reason(delta.finish_reason, delta.stop_reason),
        )
        return events + self._chunk(choice, delta.usage)

    def _chunk(self, choice: ChatChunkChoice, usage: Usage) -> bytes:
        if self._counts_always:
            end = b'],"usage":' + _encode(usage_body(usage)) + b"}\n\n"
        else:
            end = b'],"usage":null}\n\n' if self._with_null_usage else b"]}\n\n"
        return self._head + _encode(choice) + end
