"""``/v1/responses``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from src.core.sampling_params import MAX_STOP_STRINGS
from src.http.protocol.chat import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    Name,
    ToolFunction,
)
from src.http.protocol.logprobs import ChatLogprob
from src.http.protocol.sampler import with_sampler_fields

MAX_METADATA: Final = 16

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MAX_METADATA),
]

# A field of `UnsupportedByResponses` may be sent with one of these values: they ask for nothing.
NEUTRAL_IN_RESPONSES: Final[dict[str, tuple[Any, ...]]] = {
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "prompt": (),
}


class UnsupportedByResponses(msgspec.Struct, kw_only=True):
    """Fields that would change the answer and that nothing here can do."""

    context_management: Any = None
    conversation: Any = None
    image: Any = None
    prompt: Any = None


class AcceptedByResponses(UnsupportedByResponses, kw_only=True):
    """Fields without a meaning for a server of one's own, accepted whatever they hold."""

    access_programs: Any = None
    background_options: Any = None
    client_metadata: Any = None
    # Calls of tools that a server runs by itself: there are none.
    max_tool_calls: Any = None
    moderation: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: Any = None
    user: Any = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is asked of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is asked of reasoning; a summary is never made."""

    effort: str | None = None
    summary: str | None = None


if TYPE_CHECKING:
    _Sampled = AcceptedByResponses
else:
    _Sampled = with_sampler_fields(AcceptedByResponses)


class ResponseRequest(_Sampled, kw_only=True):
    """``POST /v1/responses``. ``None`` everywhere means "as if it were not there"."""

    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    # vLLM's
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    # As in a chat, but that it is one segment of the paths to the response.
    request_id: Annotated[str, Meta(pattern=r"^[!-.0-~]{1,128}$(?!\n)")] | None = None
    # Ours: seconds after which the answer ends with what it has.
    timeout: Annotated[float, Meta(gt=0)] | None = None


# Items of `input`, by their type


class InputPart(msgspec.Struct, kw_only=True):
    """One part of a message or of a tool's output. Only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


InputContent = str | Annotated[list[InputPart], Meta(max_length=MAX_CONTENT_PARTS)]


class InputMessage(msgspec.Struct, kw_only=True):
    """A message of anybody; its type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent


class InputFunctionCall(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    namespace: str | None = None


class InputFunctionOutput(msgspec.Struct, kw_only=True):
    """What a call came to. Without an id it answers the calls before it in their order."""

    type: Literal["function_call_output"]
    call_id: Name | None = None
    name: Name | None = None
    output: InputContent


class ReasoningText(msgspec.Struct, kw_only=True):
    """Reasoning, or a part of it."""

    type: str = "reasoning_text"
    text: str


class InputReasoning(msgspec.Struct, kw_only=True):
    """What the model thought; encrypted reasoning of other servers is passed over."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


class InputTools(msgspec.Struct, kw_only=True):
    """Tools that an agent adds among the items, beside those of the request."""

    type: Literal["additional_tools"]
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class FoundTools(msgspec.Struct, kw_only=True):
    """Tools that a search has found: they are offered from then on."""

    type: Literal["tool_search_output"]
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class FunctionTool(ToolFunction, kw_only=True):
    """A function that may be called."""

    type: Literal["function"] = "function"


class NamespaceTool(msgspec.Struct, kw_only=True):
    """Functions under a common name."""

    type: Literal["namespace"]
    name: Name
    tools: list[dict[str, Any]]


# The answer


class OutputText(msgspec.Struct, kw_only=True):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[ChatLogprob] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What the assistant says."""

    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model makes; ``arguments`` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thinks before it answers."""

    id: str
    status: str
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText]
    encrypted_content: None = None


OutputItem = OutputMessage | OutputFunctionCall | OutputReasoning


class InputTokensDetails(msgspec.Struct):
    """How many tokens' KV came from the prefix cache; writing to it costs nothing."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """How many tokens were reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why a response is cut short."""

    reason: str


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response, whole or as far as it has come."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None


class ItemList(msgspec.Struct, kw_only=True):
    """A page of the items that a response was asked with."""

    object: Literal["list"] = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct):
    """How many tokens a request has as a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The answer to ``DELETE``."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
