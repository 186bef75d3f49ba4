"""From a request for a response to the chat that it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from src.core.errors import InvalidRequestError
from src.core.sampler_parameters import SAMPLER_NAMES
from src.http.chat.foreign import CALL_ITEMS, RESULT_ITEMS, call_of, not_understood, result_of
from src.http.chat.input_items import check_parts, read_item, with_instructions
from src.http.chat.placeholders import placeholder
from src.http.generation.field_names import Names
from src.http.generation.sampling import unsupported
from src.http.protocol.chat import (
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    Tool,
    ToolCall,
    ToolFunction,
)
from src.http.protocol.responses import (
    FoundTools,
    FunctionTool,
    InputContent,
    InputFunctionCall,
    InputFunctionOutput,
    InputMessage,
    InputPart,
    InputReasoning,
    InputTools,
    NamespaceTool,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    ResponseRequest,
)
from src.http.protocol.structured import JsonSchemaFormat, ResponseFormat

LOGPROBS: Final = "message.output_text.logprobs"

# What a chat calls its fields, and what this protocol does.
FIELD_NAMES: Final[Names] = (
    (re.compile(r"(messages|prompt)\b.*"), "input"),
    (re.compile(r"max(_completion)?_tokens\b"), "max_output_tokens"),
    (re.compile(r"response_format\.json_schema\b"), "text.format"),
    (re.compile(r"response_format\b"), "text.format"),
    (re.compile(r"reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
)

# Fields that a chat has under the same name.
_SAME: Final = (
    "model",
    *SAMPLER_NAMES,
    "seed",
    "stop",
    "ignore_eos",
    "thinking_token_budget",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "timeout",
)
# Types of tools; those of other types run elsewhere, are passed over and not shown again.
UNDERSTOOD_TOOLS: Final = ("function", "namespace")
# Items that ask for nothing and tell the model nothing.
PASSED_OVER: Final = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response")
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "summary_text")

Media: TypeAlias = Literal["none", "messages", "all"]
"""The setting ``chat.media_placeholders``."""

# Where tools are given, and the tools.
GivenTools: TypeAlias = tuple[str, Sequence[dict[str, Any]]]
InputItem: TypeAlias = InputMessage | InputFunctionCall | InputFunctionOutput | InputReasoning


class Translation(msgspec.Struct):
    """The chat, and the messages of it that a next turn needs to know.

    ``namespaces`` tells the namespace of a function that has one.
    """

    chat: ChatRequest
    turn: list[ChatMessage]
    namespaces: dict[str, str]


def translate(
    request: ResponseRequest,
    history: Sequence[ChatMessage],
    find_item: Callable[[str], OutputItem | None],
    max_referred_chars: int,
    *,
    media: Media = "messages",
) -> Translation:
    """The chat that a request asks for.

    ``history`` is what was said before, and ``find_item`` knows the items of past responses, of
    which the request may bring ``max_referred_chars`` in all. ``media`` says where a text stands
    for images and files: nowhere, in what tools came to, or in all messages.

    Raises
    ------
    InvalidRequestError
        It asks for something that cannot be done or read; names the field.
    """
    references = _References(find_item, max_referred_chars)
    said, brought = _read_input(request, references, media)
    turn = [*history, *said]
    if not turn:
        raise InvalidRequestError("input is required", param="input")
    tools, namespaces = _tools([("tools", request.tools or ()), *brought])
    wants_logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    effort = request.reasoning.effort if request.reasoning is not None else None
    chat = ChatRequest(
        messages=with_instructions(request.instructions, turn),
        tools=tools or None,
        tool_choice=_tool_choice(request.tool_choice, has_tools=bool(tools)),
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        response_format=_response_format(request),
        reasoning_effort=effort if effort != "none" else None,
        stream=request.stream,
        **{name: getattr(request, name) for name in _SAME},
    )
    return Translation(chat, turn, namespaces)


def _read_input(
    request: ResponseRequest, references: _References, media: Media
) -> tuple[list[ChatMessage], list[GivenTools]]:
    """The messages of the input, and the tools that it brings."""
    if request.input is None:
        return [], []
    if isinstance(request.input, str):
        return [ChatMessage(role="user", content=request.input)], []
    check_parts("input", (item.get(n) for item in request.input for n in ("content", "output")))
    reader = _ItemReader(references, media)
    for index, item in enumerate(request.input):
        reader.read(f"input[{index}]", item)
    return reader.finish(), reader.tools


class _References:
    """The items of past responses that a request refers to."""

    def __init__(self, find_item: Callable[[str], OutputItem | None], max_chars: int) -> None:
        self._find_item = find_item
        self._max_chars = max_chars
        # Every reference counts: each is a text of its own in the prompt.
        self._chars = 0
        self._read: dict[str, tuple[InputItem, int]] = {}

    def item(self, where: str, item_id: object) -> InputItem:
        """What a reference at ``where`` stands for."""
        read = self._read.get(item_id) if isinstance(item_id, str) else None
        if read is None:
            found = self._find_item(item_id) if isinstance(item_id, str) else None
            if found is None:
                raise InvalidRequestError(
                    f"{where}.id: there is no item {str(item_id)[:100]!r}; it may have been "
                    "forgotten, or not stored",
                    param=f"{where}.id",
                )
            read = self._read[found.id] = _as_input(found)
        item, chars = read
        self._chars += chars
        if self._chars > self._max_chars:
            raise InvalidRequestError(
                f"{where}.id: the items that input refers to may have {self._max_chars} characters "
                f"in all, got {self._chars} or more",
                param=f"{where}.id",
            )
        return item


def _as_input(item: OutputItem) -> tuple[InputItem, int]:
    """The item as a client would send it, and how long it is."""
    if isinstance(item, OutputFunctionCall):
        call = InputFunctionCall(
            type="function_call", call_id=item.call_id, name=item.name, arguments=item.arguments
        )
        return call, len(item.name) + len(item.arguments)
    chars = sum(len(part.text) for part in item.content)
    if isinstance(item, OutputMessage):
        parts = [InputPart(type=part.type, text=part.text) for part in item.content]
        return InputMessage(role=item.role, content=parts), chars
    return InputReasoning(type="reasoning", content=item.content), chars


class _ItemReader:
    """Joins what the assistant thought, said and called into one message, as templates expect."""

    def __init__(self, references: _References, media: Media) -> None:
        self._references = references
        self._replaces_media = media == "all"
        # What a tool came to is history, even where a user's own picture is refused.
        self._replaces_results = media != "none"
        self.tools: list[GivenTools] = []
        """Tools that come among the items."""
        self._messages: list[ChatMessage] = []
        # Index of a message -> what was thought before it, joined once all of it is there.
        self._thoughts: dict[int, list[str]] = {}

    def finish(self) -> list[ChatMessage]:
        """The messages of all items."""
        for index, texts in self._thoughts.items():
            self._messages[index].reasoning_content = "\n".join(texts)
        return self._messages

    def read(self, where: str, item: dict[str, Any]) -> None:
        """Take the next item, whose field is ``where``."""
        match item.get("type", "message"):
            case "message":
                self._take(where, read_item(where, item, InputMessage))
            case "function_call":
                self._take(where, read_item(where, item, InputFunctionCall))
            case "function_call_output":
                self._take(where, read_item(where, item, InputFunctionOutput))
            case "reasoning":
                self._take(where, read_item(where, item, InputReasoning))
            case "additional_tools":
                self.tools.append((f"{where}.tools", read_item(where, item, InputTools).tools))
            case "item_reference" | None if "id" in item:
                self._take(where, self._references.item(where, item["id"]))
            case str() as kind if kind in CALL_ITEMS:
                self._call(call_of(where, item))
                self._result(where, item)
            case str() as kind if kind in RESULT_ITEMS:
                self._result(where, item)
                if kind == "tool_search_output":
                    self.tools.append((f"{where}.tools", read_item(where, item, FoundTools).tools))
            case "compaction" if self._replaces_results:
                self._messages.append(ChatMessage(role="user", content=placeholder("compaction")))
            case str() as kind if kind in PASSED_OVER:
                return
            case other:
                raise not_understood(where, str(other), "items")

    def _take(self, where: str, item: InputItem) -> None:
        match item:
            case InputMessage():
                self._message(where, item)
            case InputFunctionCall():
                function = FunctionCall(name=item.name, arguments=item.arguments)
                self._call(ToolCall(id=item.call_id, function=function))
            case InputFunctionOutput():
                content = _content(f"{where}.output", item.output, self._replaces_results)
                said = ChatMessage(
                    role="tool", content=content, tool_call_id=item.call_id, name=item.name
                )
                self._messages.append(said)
            case InputReasoning():
                self._reasoning(item)

    def _message(self, where: str, message: InputMessage) -> None:
        content = _content(f"{where}.content", message.content, self._replaces_media)
        last = self._assistant() if message.role == "assistant" else None
        if last is not None and last.content is None and last.tool_calls is None:
            last.content = content
        else:
            self._messages.append(ChatMessage(role=message.role, content=content))

    def _call(self, call: ToolCall) -> None:
        message = self._assistant() or self._new_assistant()
        if message.tool_calls is None:
            message.tool_calls = []
        message.tool_calls.append(call)

    def _result(self, where: str, item: dict[str, Any]) -> None:
        """What a tool came to that is no function of the client's, where the item tells it."""
        message = result_of(where, item, replaces_media=self._replaces_results)
        if message is not None:
            self._messages.append(message)

    def _reasoning(self, item: InputReasoning) -> None:
        text = "\n".join(part.text for part in item.content or ())
        if not text:
            return
        message = self._assistant()
        if message is None or message.content is not None or message.tool_calls is not None:
            self._new_assistant()
        self._thoughts.setdefault(len(self._messages) - 1, []).append(text)

    def _assistant(self) -> ChatMessage | None:
        last = self._messages[-1] if self._messages else None
        return last if last is not None and last.role == "assistant" else None

    def _new_assistant(self) -> ChatMessage:
        self._messages.append(ChatMessage(role="assistant"))
        return self._messages[-1]


def _content(where: str, content: InputContent, replaces_media: bool) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        if part.type in _TEXT_PARTS:
            shown = ContentPart(type="text", text=part.text)
        elif part.type == "refusal":
            shown = ContentPart(type="text", text=part.refusal)
        elif replaces_media and (stand_in := placeholder(part.type)) is not None:
            shown = ContentPart(type="text", text=stand_in)
        else:
            raise InvalidRequestError(
                f"{where}[{index}].type: this model takes text only, got {part.type[:100]!r}",
                param=f"{where}[{index}].type",
                code="unsupported_parameter",
            )
        if shown.text is None:
            raise InvalidRequestError(
                f"{where}[{index}].text is required", param=f"{where}[{index}].text"
            )
        parts.append(shown)
    # One text is what every template takes.
    return (parts[0].text or "") if len(parts) == 1 else parts


def _tools(given: Sequence[GivenTools]) -> tuple[list[Tool], dict[str, str]]:
    """The functions among the tools; tools that run elsewhere are passed over.

    Of one name the first place that gives it is meant, and there the last one.
    """
    tools: dict[str, Tool] = {}
    namespaces: dict[str, str] = {}
    # Of all places. Namespaces add their own.
    number = _counted_tools(sum(len(items) for _, items in given))
    for place, items in given:
        found, spaces, number = _tools_at(place, items, number)
        for name, tool in found.items():
            if name not in tools:
                tools[name] = tool
                if name in spaces:
                    namespaces[name] = spaces[name]
    return list(tools.values()), namespaces


def _counted_tools(number: int) -> int:
    if number > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools may have at most {MAX_TOOLS} entries, those of namespaces included, got "
            f"{number} or more",
            param="tools",
        )
    return number


def _tools_at(
    place: str, given: Sequence[dict[str, Any]], number: int
) -> tuple[dict[str, Tool], dict[str, str], int]:
    """By name, the functions of one place and their namespaces; and the number of all tools."""
    tools: dict[str, Tool] = {}
    namespaces: dict[str, str] = {}
    for index, item in enumerate(given):
        where = f"{place}[{index}]"
        match item.get("type"):
            case "function":
                tool = _function(read_item(where, item, FunctionTool))
                tools[tool.function.name] = tool
            case "namespace":
                namespace = read_item(where, item, NamespaceTool)
                number = _counted_tools(number + len(namespace.tools))
                for position, inner in enumerate(namespace.tools):
                    if inner.get("type") != "function":
                        continue
                    tool = _function(read_item(f"{where}.tools[{position}]", inner, FunctionTool))
                    if tool.function.name in tools:
                        continue
                    tools[tool.function.name] = tool
                    namespaces[tool.function.name] = namespace.name
            case str():
                continue
            case _:
                raise InvalidRequestError(f"{where}.type is required", param=f"{where}.type")
    return tools, namespaces, number


def _function(tool: FunctionTool) -> Tool:
    return Tool(
        function=ToolFunction(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
    )


def _tool_choice(
    choice: str | dict[str, Any] | None, *, has_tools: bool
) -> str | dict[str, Any] | None:
    """As a chat spells it."""
    match choice:
        case "auto" if not has_tools:
            # Unlike in a chat that is what is said where nothing is said.
            return None
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            # Tools that run elsewhere are passed over here too.
            functions = [
                {"type": "function", "function": {"name": tool.get("name")}}
                for tool in tools
                if isinstance(tool, dict) and tool.get("type") == "function"
            ]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
        case {"type": str(kind)}:
            raise unsupported("tool_choice", f" of type {kind[:100]!r}")
        case _:
            return choice


def _response_format(request: ResponseRequest) -> ResponseFormat | None:
    form = request.text.format if request.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat(type="json_object")
    if form.schema is None:
        raise InvalidRequestError("text.format.schema is required", param="text.format.schema")
    return ResponseFormat(
        type="json_schema",
        json_schema=JsonSchemaFormat(name=form.name, schema=form.schema, strict=form.strict),
    )
