"""All syntaxes of calls. A new one is an entry in one of the files beside this, and a line here."""

from __future__ import annotations

from typing import Final

from src.text.tool_calls.json_calls import (
    GRANITE,
    HERMES,
    JSON,
    LLAMA3_JSON,
    MISTRAL,
    PHI4_MINI_JSON,
)
from src.text.tool_calls.member_calls import GLM45, QWEN3_CODER
from src.text.tool_calls.python_calls import LLAMA4_PYTHONIC, NEMOTRON_JSON, PYTHONIC
from src.text.tool_calls.syntax import Syntax
from src.text.tool_calls.tagged_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    LLAMA3_FUNCTION,
    OPENAI,
)

SYNTAXES: Final[dict[str, Syntax]] = {
    syntax.name: syntax
    for syntax in (
        MISTRAL,
        OPENAI,
        KIMI_K2,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        QWEN3_CODER,
        GLM45,
        NEMOTRON_JSON,
        LLAMA3_FUNCTION,
        GRANITE,
        HERMES,
        PHI4_MINI_JSON,
        LLAMA4_PYTHONIC,
        PYTHONIC,
        LLAMA3_JSON,
        JSON,
    )
}
"""By the names that the setting ``chat.tool_call_parser`` takes.

The setting ``auto`` takes the first that the chat template shows, or ``json`` if it shows none.
What follows a tag in another syntax would be text anyway, so nothing is lost with an unknown
family.
"""
