"""``/v1/messages``: Anthropic's protocol."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from src.core.sampling_params import MAX_STOP_STRINGS
from src.http.protocol.chat import (
    MAX_CONTENT_PARTS,
    MAX_FUNCTION_NAME_CHARS,
    MAX_MESSAGES,
    MAX_TOOLS,
    Name,
)

# A field of `UnsupportedByMessages` may be sent with one of these values: they ask for nothing.
NEUTRAL_IN_MESSAGES: Final[dict[str, tuple[Any, ...]]] = {
    "container": (),
    "mcp_servers": ([],),
}


class UnsupportedByMessages(msgspec.Struct, kw_only=True):
    """Fields that would change the answer and that nothing here can do."""

    container: Any = None
    mcp_servers: Any = None


class AcceptedByMessages(UnsupportedByMessages, kw_only=True):
    """Fields without a meaning for a server of one's own, accepted whatever they hold."""

    cache_control: Any = None
    # Edits of conversations that get too long: this server makes none.
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One message; its blocks are read by their types."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_CONTENT_PARTS)]


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks first, and for how many tokens at most."""

    type: str
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    display: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """How free the model is to use tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """What is asked of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class ConversationRequest(AcceptedByMessages, kw_only=True):
    """What tokens are counted of. ``None`` everywhere means "as if it were not there"."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_CONTENT_PARTS)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class CountTokensRequest(ConversationRequest, kw_only=True):
    """``POST /v1/messages/count_tokens``."""


class MessageRequest(ConversationRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Ours
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None


# Blocks of a message, by their type


class TextBlock(msgspec.Struct, kw_only=True):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, kw_only=True):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_CONTENT_PARTS)] | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str


class ClientTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_FUNCTION_NAME_CHARS)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


# The answer


class AnswerText(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str
    citations: None = None


class AnswerThinking(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thinks before it answers; nothing signs it."""

    thinking: str
    signature: str = ""


class AnswerToolUse(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model makes."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of one message; those that came from the prefix cache are counted apart."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


class MessageBody(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
