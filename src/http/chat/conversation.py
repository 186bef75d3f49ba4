"""From a client's messages to what a chat template is given."""

from __future__ import annotations

from typing import Any

import msgspec

from src.core.config import ChatSection, Config, HttpSection
from src.core.errors import InvalidRequestError
from src.engine.requests.prompts import ChatOptions
from src.http.chat.placeholders import placeholder
from src.http.chat.tools import shown_tool
from src.http.generation.sampling import unsupported
from src.http.protocol.chat import MAX_MESSAGES, ChatMessage, ChatRequest, ContentPart
from src.http.server.body import check_structure


async def conversation(
    request: ChatRequest, config: Config, tenant: str = ""
) -> tuple[list[dict[str, Any]], ChatOptions]:
    """The messages of ``tenant`` as a template sees them, and what else it is told.

    Raises
    ------
    InvalidRequestError
        A message cannot be read, or the request brings what ``config`` does not allow; names the
        field.
    """
    _check_templates(request, config.chat)
    _check(request, replaces_media=config.chat.media_placeholders == "all")
    await _check_arguments(request, config.http)
    messages = [_message(index, message) for index, message in enumerate(request.messages)]
    return messages, _chat_options(request, tenant)


def _check_templates(request: ChatRequest, settings: ChatSection) -> None:
    if request.chat_template is not None and settings.request_templates != "all":
        raise _untrusted("chat_template", "all")
    if request.chat_template_kwargs and settings.request_templates == "none":
        raise _untrusted("chat_template_kwargs", "kwargs")


def _untrusted(field: str, value: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} is not taken from requests by this server "
        f'(chat.request_templates = "{value}" would allow it)',
        param=field,
        code="unsupported_parameter",
    )


def _check(request: ChatRequest, *, replaces_media: bool) -> None:
    count = sum(
        len(items)
        for message in request.messages
        for items in (message.content, message.tool_calls)
        if isinstance(items, list)
    )
    # In other protocols messages are made of parts, and of what was said before.
    for number, things in (
        (len(request.messages), "messages"),
        (count, "content parts and tool calls"),
    ):
        if number > MAX_MESSAGES:
            raise InvalidRequestError(
                f"messages may have at most {MAX_MESSAGES} {things} in all, got {number}",
                param="messages",
            )
    for index, message in enumerate(request.messages):
        for field in ("function_call", "audio"):
            if getattr(message, field) is not None:
                raise unsupported(f"messages[{index}].{field}")
        if isinstance(message.content, list):
            for position, part in enumerate(message.content):
                where = f"messages[{index}].content[{position}]"
                if replaces_media and (text := placeholder(part.type)) is not None:
                    message.content[position] = ContentPart(type="text", text=text)
                    continue
                if part.type not in ("text", "refusal"):
                    raise InvalidRequestError(
                        f"{where}.type: this model takes text only, got {part.type[:100]!r}",
                        param=f"{where}.type",
                        code="unsupported_parameter",
                    )
                if (part.text if part.type == "text" else part.refusal) is None:
                    raise InvalidRequestError(
                        f"{where}.{part.type} is required", param=f"{where}.{part.type}"
                    )


async def _check_arguments(request: ChatRequest, limits: HttpSection) -> None:
    """Templates get arguments as objects: texts that would become too many count like a body."""
    texts = [
        call.function.arguments.encode()
        for message in request.messages
        for call in message.tool_calls or ()
        if isinstance(call.function.arguments, str)
    ]
    await check_structure(
        *texts,
        max_nodes=limits.max_json_nodes,
        max_values=limits.max_json_values,
        what="messages: arguments of tool calls",
        param="messages",
    )


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """The message as a template sees it. ``developer`` is a newer name for ``system``."""
    if message.content is None and message.role != "assistant":
        where = f"messages[{index}].content"
        raise InvalidRequestError(f"{where} is required", param=where)
    built: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(built.get("content"), list):
        built["content"] = [
            {key: value for key, value in part.items() if value is not None}
            for part in built["content"]
        ]
    if not message.tool_calls:
        # Templates ask whether there are calls by whether there is such a list.
        built.pop("tool_calls", None)
    if message.role == "developer":
        built["role"] = "system"
    return built


def _chat_options(request: ChatRequest, tenant: str) -> ChatOptions:
    template_kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    continues = bool(request.continue_final_message)
    generates = request.add_generation_prompt
    tools = None if request.tool_choice == "none" else request.tools
    return ChatOptions(
        tools=[shown_tool(tool) for tool in tools] if tools else None,
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        documents=request.documents,
        template=request.chat_template,
        template_kwargs=template_kwargs,
        add_special_tokens=request.add_special_tokens,
        tenant=tenant,
    )
