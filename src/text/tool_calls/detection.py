"""Which syntax a model writes calls and reasoning in, by what its chat template shows it."""

from __future__ import annotations

import functools
import re
from typing import Final

from src.text.reasoning import REASONING_SYNTAXES, ReasoningSyntax
from src.text.tool_calls.syntaxes import SYNTAXES, Syntax

# The first that a template has decides. What follows a tag in another syntax than ours would be
# text anyway, so nothing is lost where a template is of a family that is not known.
_MARKS: Final = (
    (re.compile(r"\[TOOL_CALLS\]"), "mistral"),
    (re.compile(r"<tool_call>"), "hermes"),
    (re.compile(r"<\|python_start\|>|\[func_name1\("), "pythonic"),
    (re.compile(r"<\|python_tag\|>|\\?\"parameters\\?\": "), "llama3_json"),
)
_REASONING_MARKS: Final = (
    (re.compile(r"</think>"), "think"),
    (re.compile(r"\[/THINK\]"), "mistral"),
)


@functools.lru_cache(maxsize=64)
def tool_call_syntax(setting: str, template: str) -> Syntax | None:
    """Return how calls are written; ``None`` where the setting is that they are not read.

    Parameters
    ----------
    setting
        ``chat.tool_call_parser``; ``auto`` looks at the template.
    template
        The Jinja source of the chat template. One that shows no syntax gets the generic ``json``.
    """
    if setting == "none":
        return None
    name = setting
    if setting == "auto":
        name = next((name for mark, name in _MARKS if mark.search(template)), "json")
    return SYNTAXES[name]


@functools.lru_cache(maxsize=64)
def reasoning_syntax(setting: str, template: str) -> ReasoningSyntax | None:
    """Return how reasoning is marked; ``None`` where it is not.

    Parameters
    ----------
    setting
        ``chat.reasoning_parser``; ``auto`` looks at the template.
    template
        The Jinja source of the chat template.
    """
    if setting == "none":
        return None
    if setting != "auto":
        return REASONING_SYNTAXES[setting]
    name = next((name for mark, name in _REASONING_MARKS if mark.search(template)), None)
    return None if name is None else REASONING_SYNTAXES[name]
