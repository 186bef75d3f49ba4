"""Which syntax a model writes calls and reasoning in, by what its chat template shows it."""

from __future__ import annotations

import functools
from typing import Final, TypeVar

from src.text.reasoning import REASONING_SYNTAXES, ReasoningSyntax
from src.text.source import shows
from src.text.tool_calls.syntax import Syntax
from src.text.tool_calls.syntaxes import SYNTAXES

S = TypeVar("S", Syntax, ReasoningSyntax)

# How many are of this package.
_OWN_CALLS: Final = len(SYNTAXES)
_OWN_REASONING: Final = len(REASONING_SYNTAXES)


def add_tool_call_syntax(syntax: Syntax) -> None:
    """Read calls in a syntax that is not of this package, in this process.

    ``auto`` looks for it before those of this package.

    Raises
    ------
    ValueError
        Another one has its name.
    """
    _add(SYNTAXES, syntax)
    tool_call_syntax.cache_clear()


def add_reasoning_syntax(syntax: ReasoningSyntax) -> None:
    """The same of how reasoning is marked."""
    _add(REASONING_SYNTAXES, syntax)
    reasoning_syntax.cache_clear()


def _add(known: dict[str, S], syntax: S) -> None:
    name = syntax.name
    if not name or name in ("auto", "none"):
        raise ValueError(f"{name!r} cannot be the name of a syntax")
    if known.get(name, syntax) is not syntax:
        raise ValueError(f"there is a syntax {name!r} already")
    # In one step: another engine's threads may read the table.
    known[name] = syntax


def _shown(known: dict[str, S], own: int, template: str) -> S | None:
    """Return the first that a template shows: those that were added last, then this package's."""
    there = list(known.values())
    ordered = there[own:][::-1] + there[:own]
    return next((one for one in ordered if shows(template, one.shown_by)), None)


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
    return _shown(SYNTAXES, _OWN_CALLS, template) or SYNTAXES["json"]


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
    return _shown(REASONING_SYNTAXES, _OWN_REASONING, template)
