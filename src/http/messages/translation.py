"""From Anthropic's messages to the chat that they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from src.core.errors import InvalidRequestError
from src.http.chat.foreign import (
    ForeignResultBlock,
    ForeignUseBlock,
    not_understood,
    readable,
)
from src.http.chat.input_items import check_parts, read_item, with_instructions
from src.http.chat.placeholders import block_text, is_media
from src.http.generation.field_names import Names
from src.http.protocol.chat import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    Tool,
    ToolCall,
    ToolFunction,
)
from src.http.protocol.messages import (
    ClientTool,
    ConversationRequest,
    MessageRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from src.http.protocol.structured import JsonSchemaFormat, ResponseFormat

# What a chat calls its fields, and what this protocol does.
FIELD_NAMES: Final[Names] = (
    (re.compile(r"(messages|prompt)\b.*"), "messages"),
    (re.compile(r"max_completion_tokens\b"), "max_tokens"),
    (re.compile(r"stop\b"), "stop_sequences"),
    (re.compile(r"thinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"response_format\b.*"), "output_config.format"),
    (re.compile(r"reasoning_effort\b"), "output_config.effort"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
)

# What Claude Code puts before its system prompt, for billing. It differs in every request, so the
# prefix cache would never match.
_BILLING: Final = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")

# Blocks that only mean something to the server that made them.
_FOREIGN: Final = ("redacted_thinking", "fallback", "mcp_tool_listing")
_FOREIGN_USES: Final = ("server_tool_use", "mcp_tool_use")


def translate(
    request: ConversationRequest, *, sets_thinking: bool, replaces_media: bool
) -> ChatRequest:
    """The chat that a request asks for.

    ``sets_thinking`` says whether ``thinking`` may set a variable of the chat template, and
    ``replaces_media`` whether a text stands for images and documents.

    Raises
    ------
    InvalidRequestError
        It asks for something that cannot be done or read; names the field.
    """
    check_parts("messages", _contents(request))
    messages: list[ChatMessage] = []
    for index, message in enumerate(request.messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            messages.append(ChatMessage(role=message.role, content=message.content))
        elif message.role == "assistant":
            messages += _AssistantReader(replaces_media).read(where, message.content)
        else:
            messages += _user(where, message.content, message.role, replaces_media)
    # A last message of the assistant is the beginning of its answer.
    continues = messages[-1].role == "assistant" and messages[-1].tool_calls is None
    choice = request.tool_choice
    config = request.output_config
    tools = _tools(request.tools or ())
    chat = ChatRequest(
        model=request.model,
        messages=with_instructions(_system(request), messages),
        tools=tools or None,
        tool_choice=_tool_choice(choice, is_offered=bool(tools), is_given=bool(request.tools)),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        reasoning_effort=None if config is None else config.effort,
        continue_final_message=continues or None,
    )
    if config is not None and config.format is not None:
        schema = JsonSchemaFormat(name="answer", schema=config.format.schema, strict=True)
        chat.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    template_kwargs: dict[str, Any] = {}
    if request.thinking is not None and sets_thinking:
        template_kwargs["enable_thinking"] = request.thinking.type != "disabled"
    if isinstance(request, MessageRequest):
        template_kwargs |= request.chat_template_kwargs or {}
        _sample(chat, request)
        if request.thinking is not None and request.thinking.type != "disabled":
            chat.thinking_token_budget = request.thinking.budget_tokens
    chat.chat_template_kwargs = template_kwargs or None
    return chat


def _contents(request: ConversationRequest) -> Iterator[object]:
    for message in request.messages:
        yield message.content
        if isinstance(message.content, list):
            yield from (block.get("content") for block in message.content)


def _sample(chat: ChatRequest, request: MessageRequest) -> None:
    chat.max_tokens = request.max_tokens
    chat.stream = request.stream
    chat.stop = request.stop_sequences
    for name in ("temperature", "top_p", "top_k"):
        setattr(chat, name, getattr(request, name))
    chat.seed = request.seed
    chat.ignore_eos = request.ignore_eos
    chat.priority = request.priority
    chat.cache_salt = request.cache_salt
    chat.timeout = request.timeout


def _system(request: ConversationRequest) -> str | None:
    if request.system is None:
        return None
    if isinstance(request.system, str):
        return _BILLING.sub("", request.system)
    texts = []
    for index, block in enumerate(request.system):
        given = read_item(f"system[{index}]", block, TextBlock).text
        text = _BILLING.sub("", given)
        if text or not given:
            texts.append(text)
    return "\n\n".join(texts)


class _AssistantReader:
    """Reads what the assistant said: one message, or several where tools ran meanwhile."""

    def __init__(self, replaces_media: bool) -> None:
        self._replaces_media = replaces_media
        self._messages: list[ChatMessage] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []

    def read(self, where: str, blocks: Sequence[dict[str, Any]]) -> list[ChatMessage]:
        """The messages of these blocks."""
        for index, block in enumerate(blocks):
            self._take(f"{where}[{index}]", block)
        if not self._messages or self._texts or self._thoughts or self._calls:
            self._end_message()
        return self._messages

    def _take(self, place: str, block: dict[str, Any]) -> None:
        match block.get("type"):
            case "text":
                self._texts.append(read_item(place, block, TextBlock).text)
            case "thinking":
                self._thoughts.append(read_item(place, block, ThinkingBlock).thinking)
            case "tool_use":
                self._call(read_item(place, block, ToolUseBlock))
            case str() as kind if kind in _FOREIGN_USES:
                self._call(read_item(place, block, ForeignUseBlock))
            case str() as kind if kind.endswith("_tool_result"):
                self._result(place, read_item(place, block, ForeignResultBlock))
            case str() as kind if kind in _FOREIGN:
                return
            case _:
                self._texts.append(_text(place, block, self._replaces_media))

    def _call(self, use: ToolUseBlock | ForeignUseBlock) -> None:
        function = FunctionCall(name=use.name, arguments=use.input)
        self._calls.append(ToolCall(id=use.id, function=function))

    def _result(self, place: str, result: ForeignResultBlock) -> None:
        """The result of a tool that ran elsewhere, while the assistant went on."""
        if self._texts or self._thoughts or self._calls:
            self._end_message()
        text = readable(f"{place}.content", result.content, replaces_media=self._replaces_media)
        self._messages.append(
            ChatMessage(role="tool", content=text or "", tool_call_id=result.tool_use_id)
        )

    def _end_message(self) -> None:
        texts, thoughts, calls = self._texts, self._thoughts, self._calls
        self._messages.append(
            ChatMessage(
                role="assistant",
                content="".join(texts) if texts or not calls else None,
                reasoning_content="\n".join(thoughts) or None,
                tool_calls=calls or None,
            )
        )
        self._texts, self._thoughts, self._calls = [], [], []


def _user(
    where: str, blocks: Sequence[dict[str, Any]], role: Any, replaces_media: bool
) -> list[ChatMessage]:
    """Results of tools are messages of their own, before what the user says.

    Templates look for them right behind the calls, wherever a client put its text.
    """
    messages: list[ChatMessage] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match block.get("type"):
            case "tool_result" if role == "user":
                result = read_item(place, block, ToolResultBlock)
                content = _result(f"{place}.content", result, replaces_media)
                messages.append(
                    ChatMessage(role="tool", content=content, tool_call_id=result.tool_use_id)
                )
            case "mcp_tool_listing" | "fallback":
                continue
            case _:
                texts.append(_text(place, block, replaces_media))
    if texts:
        messages.append(ChatMessage(role=role, content="\n\n".join(texts)))
    if not messages:
        raise InvalidRequestError(f"{where} must not be empty", param=where)
    return messages


def _result(where: str, result: ToolResultBlock, replaces_media: bool) -> str:
    if result.content is None or isinstance(result.content, str):
        return result.content or ""
    return "\n".join(
        _text(f"{where}[{index}]", block, replaces_media)
        for index, block in enumerate(result.content)
    )


def _text(where: str, block: dict[str, Any], replaces_media: bool) -> str:
    """The text of a block, or what stands for one that has none."""
    kind = block.get("type")
    if kind == "text":
        return read_item(where, block, TextBlock).text
    if isinstance(kind, str) and is_media(kind):
        text = block_text(block) if replaces_media else None
    elif kind == "tool_result":
        # Of the user's alone, and not within another.
        text = None
    else:
        text = readable(where, block, replaces_media=replaces_media)
    if text is None or not isinstance(kind, str):
        raise not_understood(where, kind)
    return text


def _tools(given: Sequence[dict[str, Any]]) -> list[Tool]:
    """The client's own tools; those that come without a schema run elsewhere."""
    tools = []
    for index, item in enumerate(given):
        if item.get("type") not in (None, "custom"):
            continue
        tool = read_item(f"tools[{index}]", item, ClientTool)
        function = ToolFunction(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        tools.append(Tool(function=function))
    return tools


def _tool_choice(
    choice: ToolChoice | None, *, is_offered: bool, is_given: bool
) -> str | dict[str, Any] | None:
    """As a chat spells it."""
    if choice is None:
        return None
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequestError("tool_choice.name is required", param="tool_choice.name")
    if not is_given and choice.type != "none":
        raise InvalidRequestError("tool_choice may only be given with tools", param="tool_choice")
    if not is_offered and choice.type == "auto":
        # All of the tools run elsewhere.
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
