"""How chat completions spell what the engine says."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from src.core.outputs import Completion, Delta, FinishReason, GenerationResult, Usage
from src.engine.client import AsyncEngine
from src.http.generation.fingerprint import system_fingerprint
from src.http.generation.generation import (
    counts_always,
    finish_reason,
    is_cut_short,
    shows_steps,
    stop_reason,
    usage_body,
)
from src.http.generation.json_chunks import apart, json_array, json_chunks
from src.http.generation.logprobs import TokenNames, chat_entries, chat_pieces, prompt_pieces
from src.http.generation.reasoning_tokens import ReasoningTokens
from src.http.protocol.chat import (
    AnswerFunction,
    AnswerToolCall,
    ChatAnswer,
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatPiece,
    ChatRequest,
    PieceFunction,
    PieceToolCall,
)
from src.http.protocol.logprobs import ChatLogprobs
from src.text.answer import (
    Answer,
    AnswerEvent,
    AnswerParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    whole_answer,
)
from src.text.answer_plan import AnswerPlan

_encode = msgspec.json.Encoder().encode

_TOOL_CALLS: Final = "tool_calls"
# Tokens that are looked at in one go.
_COUNTED: Final = 1024


class ChatEncoder:
    """Spells one request's answers, which ``plan`` reads.

    ``prompt_token_ids`` are those of the prompt, where they are to be shown.
    """

    def __init__(
        self,
        request: ChatRequest,
        engine: AsyncEngine,
        plan: AnswerPlan,
        *,
        model: str,
        prompt_token_ids: list[int] | None,
    ) -> None:
        self.id = f"chatcmpl-{request.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._plan = plan
        self._echoed = echoed_text(request)
        self._fingerprint = system_fingerprint(engine.config)
        # Shown where it is asked for: in an answer's outermost object, in a stream with the roles.
        self._prompt_token_ids = prompt_token_ids if request.return_token_ids else None
        self._names = TokenNames(engine.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._shows_prompt_logprobs = request.prompt_logprobs is not None
        options = request.stream_options
        self._with_null_usage = options is not None and bool(options.include_usage)
        self._counts_always = counts_always(options)
        self._shows_steps = shows_steps(options)
        # All chunks of a stream begin alike; only what differs is encoded for each.
        head = {"id": self.id, "object": "chat.completion.chunk", "created": self._created}
        head |= {"model": self._model, "system_fingerprint": self._fingerprint}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._streams: dict[int, _ChoiceStream] = {}
        # Of each choice, where answers may have some.
        self._reasoning: defaultdict[int, ReasoningTokens] | None = None
        if plan.reasoning is not None:
            self._reasoning = defaultdict(lambda: ReasoningTokens(plan, engine.tokenizer))

    def usage_event(self, usage: Usage) -> bytes:
        """The event of ``include_usage``."""
        return self._head + b'],"usage":' + self._usage(usage) + b"}\n\n"

    def body(self, results: Sequence[GenerationResult], usage: Usage) -> Iterator[bytes]:
        """The whole answer, in pieces."""
        (result,) = results
        answer = ChatBody(
            id=self.id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=apart(json_array(map(self._choice, result.completions))),
            # Told when the choices have been: what is reasoning in them is counted on the way.
            usage=apart(self._usage(usage) for _ in range(1)),
        )
        if self._prompt_token_ids is not None:
            answer.prompt_token_ids = self._prompt_token_ids
        if self._shows_prompt_logprobs:
            pieces = prompt_pieces(self._names, result.prompt_logprobs or ())
            answer.prompt_logprobs = apart(pieces)
        return json_chunks(answer)

    def _usage(self, usage: Usage) -> bytes:
        counts = self._reasoning
        tokens = None if counts is None else sum(count.tokens for count in counts.values())
        return _encode(usage_body(usage, tokens))

    def _choice(self, completion: Completion) -> Iterator[bytes]:
        if self._reasoning is not None:
            token_ids, count = completion.token_ids, self._reasoning[completion.index]
            for begin in range(0, len(token_ids), _COUNTED):
                count.count(token_ids[begin : begin + _COUNTED])
                # Others may get their turn.
                yield b""
        text, cut_short = completion.text, is_cut_short(completion)
        answer = whole_answer(self._plan.parser(), text, cut_short=cut_short)
        if self._reasoning is not None:
            self._reasoning[completion.index].has_calls = bool(answer.tool_calls)
        choice = ChatChoice(
            completion.index,
            _message(self._echoed, answer),
            None,
            _finish_reason(completion.finish_reason, calls=bool(answer.tool_calls)) or "",
            stop_reason(completion.finish_reason, completion.stop_reason),
            self._shown(completion.token_ids),
        )
        if completion.logprobs is not None:
            choice.logprobs = apart(chat_pieces(self._names, completion.logprobs))
        yield from json_chunks(choice)

    def events(self, prompt: int, delta: Delta) -> bytes:
        """One event, if the delta says anything, and one with the role before the first."""
        events = b""
        if self._reasoning is not None:
            self._reasoning[delta.index].count(delta.token_ids)
        stream = self._streams.get(delta.index)
        if stream is None:
            parser = None if self._plan.is_plain else self._plan.parser()
            stream = self._streams[delta.index] = _ChoiceStream(parser)
            opening = ChatChunkChoice(delta.index, ChatPiece("assistant", self._echoed))
            events = self._chunk(opening, delta.usage, self._prompt_token_ids)
        pieces = stream.pieces(delta)
        if self._reasoning is not None:
            self._reasoning[delta.index].has_calls = stream.calls
        token_ids = self._shown(delta.token_ids)
        starts = delta.begins_steps if self._shows_steps else msgspec.UNSET
        if not (pieces or delta.logprobs or token_ids or starts) and delta.finish_reason is None:
            return events
        choices = [ChatChunkChoice(delta.index, piece) for piece in pieces or [ChatPiece()]]
        # What belongs to the tokens comes with the last that they say.
        if delta.logprobs:
            choices[-1].logprobs = ChatLogprobs(chat_entries(self._names, delta.logprobs))
        choices[-1].token_ids, choices[-1].step_starts = token_ids, starts
        if delta.finish_reason is not None:
            if pieces:
                # Clients that see a reason look for no text beside it.
                choices.append(ChatChunkChoice(delta.index, ChatPiece()))
            choices[-1].finish_reason = _finish_reason(delta.finish_reason, calls=stream.calls)
            choices[-1].stop_reason = stop_reason(delta.finish_reason, delta.stop_reason)
        return events + b"".join(self._chunk(choice, delta.usage) for choice in choices)

    def _shown(self, token_ids: list[int]) -> list[int] | msgspec.UnsetType:
        return msgspec.UNSET if self._prompt_token_ids is None else token_ids

    def _chunk(
        self, choice: ChatChunkChoice, usage: Usage, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        if self._counts_always:
            end = b'],"usage":' + self._usage(usage) + b"}\n\n"
        else:
            end = b'],"usage":null}\n\n' if self._with_null_usage else b"]}\n\n"
        if prompt_token_ids is not None:
            end = end[:-3] + b',"prompt_token_ids":' + _encode(prompt_token_ids) + end[-3:]
        return self._head + _encode(choice) + end


class _ChoiceStream:
    """One choice of a stream, read as it comes; without a ``parser`` all of it is text."""

    def __init__(self, parser: AnswerParser | None) -> None:
        self._parser = parser
        self.calls = False
        """Whether there has been a call."""

    def pieces(self, delta: Delta) -> list[ChatPiece]:
        """What a delta adds: text and reasoning in one piece, then one for each call."""
        if self._parser is None:
            return [ChatPiece(None, delta.text)] if delta.text else []
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish(cut_short=is_cut_short(delta))
        pieces, calls = _pieces(events)
        self.calls = self.calls or calls
        return pieces


def echoed_text(request: ChatRequest) -> str:
    """What ``echo`` puts before an answer: the last message's text, where it is the assistant's."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text or part.refusal or "" for part in last.content)


def _message(echoed: str, answer: Answer) -> ChatAnswer:
    message = ChatAnswer(content=echoed + answer.content)
    if answer.reasoning:
        message.reasoning = message.reasoning_content = answer.reasoning
        message.content = message.content or None
    if answer.tool_calls:
        message.tool_calls = [
            AnswerToolCall(id=call.id, function=AnswerFunction(call.name, call.arguments))
            for call in answer.tool_calls
        ]
        message.content = message.content or None
    return message


def _pieces(events: Sequence[AnswerEvent]) -> tuple[list[ChatPiece], bool]:
    """Events as pieces of a message, and whether a call is among them."""
    if len(events) == 1 and isinstance(events[0], ContentDelta):
        return [ChatPiece(None, events[0].text)], False
    content = reasoning = ""
    calls: dict[int, PieceToolCall] = {}
    for event in events:
        match event:
            case ContentDelta(text=text):
                content += text
            case ReasoningDelta(text=text):
                reasoning += text
            case ToolCallBegin(index=index, id=call_id, name=name):
                calls[index] = PieceToolCall(index, call_id, "function", PieceFunction(name, ""))
            case ToolCallArguments(index=index, text=text):
                call = calls.setdefault(index, PieceToolCall(index, function=PieceFunction()))
                assert call.function is not None
                call.function.arguments = (call.function.arguments or "") + text
    pieces = [ChatPiece(tool_calls=[call]) for call in calls.values()]
    if content or reasoning:
        thought = reasoning or None
        pieces.insert(0, ChatPiece(None, content or None, thought, thought))
    return pieces, bool(calls)


def _finish_reason(reason: FinishReason | None, *, calls: bool) -> str | None:
    """As OpenAI spells it: an answer that calls tools and ended by itself has its own reason."""
    return _TOOL_CALLS if calls and reason is FinishReason.STOP else finish_reason(reason)
