"""What a chat request says of tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from src.core.errors import InvalidRequestError
from src.http.generation.sampling import unsupported
from src.http.protocol.chat import ChatRequest, Tool
from src.text.answer import ToolOffer

_PARAM: Final = "tool_choice"


def tool_offer(request: ChatRequest) -> ToolOffer:
    """The tools that may be called, and whether one must be.

    Raises
    ------
    InvalidRequestError
        ``tool_choice`` has no known form, names a function that there is not, or is given without
        tools, unless it asks for none.
    """
    choice = request.tool_choice
    if choice not in (None, "none") and not request.tools:
        raise _refusal("may only be given with tools")
    tools = {tool.function.name: shown_tool(tool) for tool in request.tools or ()}
    parallel = request.parallel_tool_calls is not False
    if choice is None:
        return ToolOffer(tools=list(tools.values()), parallel=parallel)
    mode: Literal["none", "auto", "required"]
    match choice:
        case "none" | "auto" | "required":
            mode, names = choice, None
        case {"type": "function", "function": {"name": str(name)}}:
            mode, names, parallel = "required", [name], False
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)},
        }:
            names = [_allowed_name(entry) for entry in allowed]
        case {"type": "custom"}:
            raise unsupported(_PARAM, " of a custom tool")
        case _:
            raise _refusal(
                "must be none, auto, required, an object that names a function "
                '({"type": "function", "function": {"name": ...}}) or one of allowed tools'
            )
    if names is not None:
        tools = {name: _offered(name, tools) for name in names}
    if mode == "required" and not tools:
        raise _refusal("cannot require a call where no tools are given")
    return ToolOffer(tools=list(tools.values()), choice=mode, parallel=parallel)


def shown_tool(tool: Tool) -> dict[str, Any]:
    """The tool as a template sees it. Its schema, which may be large, is not copied."""
    function = tool.function
    shown: dict[str, Any] = {"name": function.name}
    for name in ("description", "parameters", "strict"):
        if (value := getattr(function, name)) is not None:
            shown[name] = value
    return {"type": tool.type, "function": shown}


def _allowed_name(entry: Any) -> str:
    match entry:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise _refusal("allows tools by objects that name a function, got something else")


def _offered(name: str, tools: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if name not in tools:
        raise _refusal(f"names the function {name[:100]!r}, which is not among the tools")
    return tools[name]


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{_PARAM} {what}", param=_PARAM)
