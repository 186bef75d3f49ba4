"""Which syntax a model writes calls and reasoning in, by what its chat template shows it."""

from __future__ import annotations

import functools

from src.text.reasoning import REASONING_SYNTAXES, ReasoningSyntax
from src.text.source import shows
from src.text.tool_calls.syntax import Syntax
from src.text.tool_calls.syntaxes import SYNTAXES


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
    if setting != "auto":
        return SYNTAXES[setting]
    known = SYNTAXES.values()
    return next((one for one in known if shows(template, one.shown_by)), SYNTAXES["json"])


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
    known = REASONING_SYNTAXES.values()
    return next((one for one in known if shows(template, one.shown_by)), None)
