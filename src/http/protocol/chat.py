"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from src.http.protocol.generation import GenerationRequest
from src.http.protocol.logprobs import ChatLogprobs, PromptLogprobs
from src.http.protocol.usage import UsageBody

# Longer than any checkpoint's own.
MAX_TEMPLATE_CHARS: Final = 1 << 17
MAX_FUNCTION_NAME_CHARS: Final = 256
# Bounds of what is walked on the event loop, so that one body of the largest size cannot stall it.
MAX_MESSAGES: Final = 4096
MAX_CONTENT_PARTS: Final = 1024
MAX_TOOLS: Final = 512
MAX_TOOL_CALLS: Final = 512
MAX_DOCUMENTS: Final = 1024


# What names a call or a function: nothing can refer to an empty one.
Name = Annotated[str, Meta(min_length=1)]


class FunctionCall(msgspec.Struct, kw_only=True):
    """The call of one function: its name and its arguments as JSON text; null are none."""

    name: Name
    arguments: str | dict[str, Any] | None = ""

    def __post_init__(self) -> None:
        if self.arguments is None:
            self.arguments = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made in an earlier message."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content. Only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_CONTENT_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Refused by name.
    function_call: Any = None
    audio: Any = None


class ToolFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the model is told about a function."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: ToolFunction


class ChatRequest(GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    echo: bool | None = None


class AnswerFunction(msgspec.Struct):
    """The function that is called; ``arguments`` is JSON text."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant makes."""

    id: str
    type: str = "function"
    function: AnswerFunction


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The assistant's message. Reasoning has two names, the second of which vLLM had first."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnswerToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One whole answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class PieceFunction(msgspec.Struct, omit_defaults=True):
    """The name of a function, or more of its arguments."""

    name: str | None = None
    arguments: str | None = None


class PieceToolCall(msgspec.Struct, omit_defaults=True):
    """The next piece of call ``index``; what is not in its arguments comes with the first."""

    index: int
    id: str | None = None
    type: str | None = None
    function: PieceFunction | None = None


class ChatPiece(msgspec.Struct, omit_defaults=True):
    """The next piece of an answer; the role comes with the first."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[PieceToolCall] | None = None


class ChatChunkChoice(msgspec.Struct):
    """The next piece of one answer of a stream."""

    index: int
    delta: ChatPiece
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    step_starts: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatBody(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
