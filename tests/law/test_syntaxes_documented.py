"""The tables of syntaxes in docs/tools.md are those of the code, row for row."""

from __future__ import annotations

from collections.abc import Iterator

from src.core.settings import CHECKOUT
from src.text.reasoning import REASONING_SYNTAXES
from src.text.tool_calls.syntax import Syntax
from src.text.tool_calls.syntaxes import SYNTAXES

PAGE = (CHECKOUT / "docs" / "tools.md").read_text()


def code(text: str) -> str:
    """The text as code in a cell of a table."""
    text = text.replace("|", "\\|").replace("\n", "\u21b5")
    return f"```` {text} ````" if "`" in text else f"`{text}`"


def marks(shown_by: tuple[str | tuple[str, ...], ...], without: str) -> str:
    parts = [(mark,) if isinstance(mark, str) else mark for mark in shown_by]
    return ", or ".join(" and ".join(map(code, mark)) for mark in parts) or without


def forced(syntax: Syntax) -> str:
    if not syntax.forms:
        return "in the form of `json`"
    first, *others = syntax.forms
    many = "as shown" if first.separator is not None else "as shown, one call"
    if first.needs:
        return f"`name[ARGS]{{...}}` where {code(first.needs)} is a token, else as shown"
    return f"{many}, or in the form of `hermes`" if others else many


def rows() -> Iterator[str]:
    for syntax in SYNTAXES.values():
        cells = [syntax.models, code(syntax.example), marks(syntax.shown_by, "none of the above")]
        cells.append(forced(syntax))
        yield f"| `{syntax.name}` | {' | '.join(cells)} |"
    for reasoning in REASONING_SYNTAXES.values():
        tags = f"{code(reasoning.opening)} ... {code(reasoning.closing)}"
        cells = [reasoning.models, tags, marks(reasoning.shown_by, "never; set it by name")]
        yield f"| `{reasoning.name}` | {' | '.join(cells)} |"


def test_the_page_has_the_tables_of_the_code() -> None:
    known = [line for line in PAGE.splitlines() if line.startswith("| `")]
    names = {line.split("`")[1] for line in rows()}
    documented = [line for line in known if line.split("`")[1] in names]
    assert documented == list(rows()), "docs/tools.md should have:\n" + "\n".join(rows())
