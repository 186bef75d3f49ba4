"""The final table: a line per figure, with its goal and the device's limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

# "impossible": the figure does not exist on this kind of device.
Outcome = Literal["measured", "failed", "not run", "impossible"]

_HEADS = ("figure", "measured", "goal", "limit", "of limit", "met")
_ROW_WIDTH = 100


class Row(msgspec.Struct, frozen=True):
    """One figure.

    Attributes
    ----------
    measured
        The value; ``None`` if there is none, and ``note`` then says why.
    goal
        The value to reach; ``None`` for figures without a goal.
    limit
        The theoretical limit of the device.
    rises
        Whether a higher value is better.
    """

    figure: str
    unit: str = ""
    measured: float | None = None
    goal: float | None = None
    limit: float | None = None
    rises: bool = False
    outcome: Outcome = "measured"
    note: str = ""

    @property
    def of_limit(self) -> float | None:
        """The reached fraction of the limit, 1 at best."""
        if not self.measured or not self.limit:
            return None
        return self.measured / self.limit if self.rises else self.limit / self.measured

    @property
    def met(self) -> bool | None:
        """Whether the goal was met; ``None`` without a goal or a value."""
        if self.goal is None or self.measured is None:
            return None
        return self.measured >= self.goal if self.rises else self.measured <= self.goal


def exit_code(rows: Sequence[Row]) -> int:
    """1 if a measurable figure is missing, else 3 if a goal was missed, else 0."""
    if any(row.outcome in ("failed", "not run") for row in rows):
        return 1
    return 3 if any(row.met is False for row in rows) else 0


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table, followed by the notes."""
    cells = [_HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADS))]
    lines = [
        "  ".join(
            text.rjust(width) if 0 < column < len(_HEADS) - 1 else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "-" * min(_ROW_WIDTH, max(map(len, lines))))
    return [*lines, *(f"{row.figure}: {row.note}" for row in rows if row.note)]


def facts_of(row: Row) -> dict[str, Any]:
    """A row for a result file, including derived values."""
    derived = {"of_limit": row.of_limit, "met": row.met}
    return {**msgspec.to_builtins(row), **derived}


def number(value: float) -> str:
    """A number with three significant digits, without an exponent."""
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cells(row: Row) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{number(value)} {row.unit}".strip()

    fraction, verdict = row.of_limit, {None: "", True: "yes", False: "NO"}[row.met]
    return (
        row.figure,
        shown(row.measured),
        shown(row.goal),
        shown(row.limit),
        "" if fraction is None else f"{100 * fraction:.0f} %",
        verdict if row.outcome == "measured" else row.outcome,
    )
