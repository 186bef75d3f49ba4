"""How a response is encoded: its items as they come, and the whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from src.core.errors import RequestAbortedError
from src.core.outputs import Delta, FinishReason, Usage
from src.http.chat.handlers import ChatJob
from src.http.generation.content_blocks import (
    Block,
    BlockBegin,
    BlockDelta,
    BlockEvent,
    ContentBlockReader,
)
from src.http.generation.generation import is_cut_short
from src.http.generation.json_chunks import apart, json_array, json_chunks
from src.http.generation.logprobs import TokenNames, chat_entries, check_number
from src.http.generation.reasoning_tokens import ReasoningTokens
from src.http.generation.sampling import num_logprobs
from src.http.protocol.chat import ChatMessage, FunctionCall, ToolCall
from src.http.protocol.logprobs import ChatLogprob
from src.http.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseBody,
    ResponseError,
    ResponseRequest,
    ResponseUsage,
)
from src.http.responses.translation import UNDERSTOOD_TOOLS, Translation
from src.http.server.errors import ErrorAnswer

_encode: Final = msgspec.json.Encoder().encode

# A type and its fields
Event: TypeAlias = tuple[str, dict[str, Any]]


class _Logprobs(NamedTuple):
    """Those of a few tokens, as parts of the JSON of a list.

    They are kept for the whole response, which says them again and again: as objects they would
    take ten times the memory, and the event loop each time.
    """

    whole: bytes
    brief: bytes
    """As events have them."""


class ResponseEncoder:
    """One response on its way."""

    def __init__(self, request: ResponseRequest, translation: Translation, chat: ChatJob) -> None:
        self._namespaces = translation.namespaces
        self._parser = chat.plan.parser()
        self._names = TokenNames(chat.engine.tokenizer, as_ids=False)
        ((_, params),) = chat.prompts
        self._logprobs_of_token = num_logprobs(params.logprobs)
        self._max_logprobs = chat.engine.config.http.max_logprobs_per_answer
        self._streams = bool(request.stream)
        self._reader = ContentBlockReader()
        self._reasoning = ReasoningTokens(chat.plan, chat.engine.tokenizer)
        # Of tokens that no text has been shown for, and of the open text.
        self._logprobs: list[_Logprobs] = []
        self._shown_logprobs: list[_Logprobs] = []
        self._sequence = 0
        self._finish_reason: FinishReason | None = None
        self.response = _empty_response(request, chat)

    def opening(self) -> list[bytes]:
        """The events before anything is generated."""
        state = "queued" if self.response.background else "in_progress"
        return self.encoded(
            (f"response.{kind}", {"response": self.response}) for kind in ("created", state)
        )

    def events(self, prompt: int, delta: Delta) -> bytes:
        """The events of the next delta."""
        return b"".join(self.encoded(self.take(delta)))

    def take(self, delta: Delta) -> Iterator[Event]:
        """Take what has been generated; give the events of it.

        Raises
        ------
        InvalidRequestError
            The response has become too long for its log-probabilities.
        """
        logprobs = []
        if delta.logprobs:
            made = delta.usage.completion_tokens * self._logprobs_of_token
            check_number(made, self._max_logprobs, "top_logprobs")
            entries = chat_entries(self._names, delta.logprobs)
            whole = _part(entries)
            # Where there are no events nobody needs the other form.
            brief = _part(_brief(entries)) if self._streams else whole
            logprobs = [_Logprobs(whole, brief)]
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            events += self._parser.finish(cut_short=is_cut_short(delta))
        self._reasoning.count(delta.token_ids)
        yield from self._item_events(self._reader.feed(events), logprobs)

    def finish(self, usage: Usage) -> Iterator[Event]:
        """Complete the response; give its last events.

        Raises
        ------
        RequestAbortedError
            It has been cancelled since.
        """
        if self.response.status == "cancelled":
            raise RequestAbortedError("the response was cancelled")
        cut = self._finish_reason is not FinishReason.STOP
        yield from self._item_events(self._reader.finish(), [], cut=cut)
        response = self.response
        self._reasoning.has_calls = any(block.kind == "call" for block in self._reader.blocks)
        response.usage = self._usage(usage)
        response.completed_at = int(time.time())
        if cut:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.status = "completed"
        yield f"response.{response.status}", {"response": response}

    def ending(self, usage: Usage) -> Iterator[bytes]:
        """Complete the response; give its last events, in pieces."""
        events = list(self.finish(usage))
        return (piece for event in events for piece in self._pieces(event))

    @property
    def counts_logprobs(self) -> bool:
        """Whether it may become too long for its log-probabilities."""
        return self._logprobs_of_token > 0

    def begun(self) -> Iterator[Event]:
        """Something has been generated; give the event of that."""
        if self.response.status == "queued":
            self.response.status = "in_progress"
            yield "response.in_progress", {"response": self.response}

    def failed(self, answer: ErrorAnswer) -> None:
        """The response is over without being complete."""
        if self.response.status in ("queued", "in_progress"):
            self.response.status = "failed"
            self.response.error = ResponseError("server_error", answer.detail.message)

    def cancelled(self) -> None:
        """Nobody wants it any more."""
        if self.response.status in ("queued", "in_progress"):
            self.response.status = "cancelled"

    def cut_short(self) -> None:
        """Keep what there is of the open item, for a response that ends before it is complete."""
        if self._reader.blocks:
            for _ in self._item_events(self._reader.finish(), [], cut=True):
                pass

    def body(self, answer: ErrorAnswer, request_id: str) -> bytes:
        """An error, before anything was streamed."""
        return answer.body

    def event(self, answer: ErrorAnswer, request_id: str) -> bytes:
        """An error, after something was streamed."""
        self.failed(answer)
        return b"".join(self.end_early())

    def end_early(self) -> list[bytes]:
        """The last event of a response that failed or was cancelled."""
        return self.encoded([("response.failed", {"response": self.response})])

    @property
    def message(self) -> ChatMessage:
        """What the assistant has said, for the next turn."""
        content = reasoning = ""
        calls = []
        for block in self._reader.blocks:
            if block.kind == "text":
                content += block.text
            elif block.kind == "reasoning":
                reasoning += block.text
            else:
                function = FunctionCall(name=block.name, arguments=block.text)
                calls.append(ToolCall(id=block.id, function=function))
        return ChatMessage(
            role="assistant",
            content=content or (None if calls else ""),
            reasoning_content=reasoning or None,
            tool_calls=calls or None,
        )

    def _item_events(
        self, events: Iterable[BlockEvent], logprobs: list[_Logprobs], *, cut: bool = False
    ) -> Iterator[Event]:
        self._logprobs += logprobs
        for event in events:
            block = event.block
            if isinstance(event, BlockBegin):
                yield from self._begun(block)
            elif isinstance(event, BlockDelta):
                yield from self._grown(block, event.text)
            else:
                yield from self._ended(block, "incomplete" if cut else "completed")

    def _begun(self, block: Block) -> Iterator[Event]:
        item = _new_item(block, self._namespaces)
        self.response.output.append(item)
        yield "response.output_item.added", {"output_index": block.index, "item": item}
        if block.kind != "call":
            part = OutputText(text="") if block.kind == "text" else ReasoningText(text="")
            yield "response.content_part.added", {**_place(item, block), "part": part}

    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        item = self.response.output[block.index]
        if isinstance(item, OutputMessage):
            new, self._logprobs = self._logprobs, []
            self._shown_logprobs += new
            brief = _listed(entries.brief for entries in new)
            shown = {**_place(item, block), "delta": text, "logprobs": brief}
            yield "response.output_text.delta", shown
        elif isinstance(item, OutputReasoning):
            yield "response.reasoning_text.delta", {**_place(item, block), "delta": text}
        else:
            place = {"item_id": item.id, "output_index": block.index}
            yield "response.function_call_arguments.delta", {**place, "delta": text}

    def _ended(self, block: Block, status: str) -> Iterator[Event]:
        item = self.response.output[block.index]
        item.status = status
        place = _place(item, block)
        if isinstance(item, OutputMessage):
            # Those of tokens without a text of their own come last.
            logprobs = self._shown_logprobs + self._logprobs
            self._shown_logprobs, self._logprobs = [], []
            whole = _listed(entries.whole for entries in logprobs)
            part = OutputText(text=block.text, logprobs=whole)
            item.content = [part]
            brief = _listed(entries.brief for entries in logprobs)
            done = {**place, "text": block.text, "logprobs": brief}
            yield "response.output_text.done", done
            yield "response.content_part.done", {**place, "part": part}
        elif isinstance(item, OutputReasoning):
            item.content = [ReasoningText(text=block.text)]
            yield "response.reasoning_text.done", {**place, "text": block.text}
            yield "response.content_part.done", {**place, "part": item.content[0]}
        else:
            item.arguments = block.text
            del place["content_index"]
            done = {**place, "name": item.name, "arguments": block.text}
            yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {"output_index": block.index, "item": item}

    def _usage(self, usage: Usage) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._reasoning.tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )

    def encoded(self, events: Iterable[Event]) -> list[bytes]:
        """Events as they are sent, each by itself."""
        return [b"".join(self._pieces(event)) for event in events]

    def _pieces(self, event: Event) -> Iterator[bytes]:
        kind, fields = event
        numbered = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        yield b"event: " + kind.encode() + b"\ndata: "
        yield from json_chunks(numbered)
        yield b"\n\n"


def _new_item(block: Block, namespaces: Mapping[str, str]) -> OutputItem:
    suffix = uuid.uuid4().hex
    if block.kind == "text":
        return OutputMessage(id=f"msg_{suffix}", status="in_progress", content=[])
    if block.kind == "reasoning":
        return OutputReasoning(id=f"rs_{suffix}", status="in_progress", content=[])
    return OutputFunctionCall(
        id=f"fc_{suffix}",
        call_id=block.id,
        name=block.name,
        arguments="",
        status="in_progress",
        namespace=namespaces.get(block.name, msgspec.UNSET),
    )


def _part(entries: list[Any]) -> bytes:
    """The JSON of entries as it stands in that of a longer list."""
    return _encode(entries)[1:-1]


def _listed(parts: Iterable[bytes]) -> Any:
    """The list of these parts, which is encoded again and again."""
    lists = [[part] for part in parts]
    return apart(list(json_array(lists))) if lists else []


def _brief(logprobs: Iterable[ChatLogprob]) -> list[dict[str, Any]]:
    """As events have them: without the bytes."""
    return [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "top_logprobs": [
                {"token": top.token, "logprob": top.logprob} for top in entry.top_logprobs
            ],
        }
        for entry in logprobs
    ]


def _place(item: OutputItem, block: Block) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": block.index, "content_index": 0}


def _empty_response(request: ResponseRequest, chat: ChatJob) -> ResponseBody:
    ((_, params),) = chat.prompts
    effort = request.reasoning.effort if request.reasoning is not None else None
    return ResponseBody(
        id=f"resp_{request.request_id or uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=_shown(request.instructions),
        max_output_tokens=request.max_output_tokens,
        metadata=_shown(request.metadata or {}),
        model=chat.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=_shown({"effort": effort, "summary": None}),
        temperature=params.temperature,
        text=_shown({"format": _format(request), "verbosity": _verbosity(request)}),
        tool_choice=_shown(request.tool_choice or "auto"),
        tools=_shown([tool for tool in request.tools or () if tool["type"] in UNDERSTOOD_TOOLS]),
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        truncation=request.truncation or "disabled",
    )


def _shown(given: object) -> Any:
    """What a client said, to be shown again and nothing else: as JSON it takes what it counts."""
    return msgspec.Raw(_encode(given))


def _format(request: ResponseRequest) -> dict[str, Any]:
    form = request.text.format if request.text is not None else None
    if form is None:
        return {"type": "text"}
    given = {**msgspec.structs.asdict(form)}
    return {name: value for name, value in given.items() if value is not None}


def _verbosity(request: ResponseRequest) -> str:
    given = request.text.verbosity if request.text is not None else None
    return given or "medium"
