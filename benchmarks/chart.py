"""Draws engines beside each other as bars, in an SVG that needs no library and no font of its own.

The colours follow the reader's scheme, light or dark, on a ground of the picture's own, so that it
can be read on any page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

_WIDTH: Final = 960
_MARGIN: Final = 24
_LABELS: Final = 196
"""Width of the column of names."""
_GAP: Final = 20
"""Between panels."""
_ROW: Final = 22
_BAR: Final = 14
_VALUE: Final = 46
"""Kept free to the right of the longest bar, for its value."""

_STYLE: Final = """\
.ground{fill:#ffffff;stroke:#d0d7de}.ink{fill:#1f2328}.soft{fill:#59636e}
.other{fill:#afb8c1}.own{fill:#0969da}.line{stroke:#d0d7de}
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.title{font-size:16px;font-weight:600}.bold{font-weight:600}.small{font-size:11px}
@media (prefers-color-scheme:dark){
.ground{fill:#0d1117;stroke:#3d444d}.ink{fill:#f0f6fc}.soft{fill:#9198a1}
.other{fill:#59636e}.own{fill:#4493f8}.line{stroke:#3d444d}}"""


@dataclass(frozen=True)
class Panel:
    """One figure of all engines: its name, its unit, and whether more of it is better."""

    title: str
    unit: str
    more_is_better: bool


@dataclass(frozen=True)
class Bars:
    """One engine: its values by panel, ``None`` where it has none, as numbers and as texts."""

    name: str
    is_own: bool
    values: Sequence[float | None]
    texts: Sequence[str]


def draw(
    title: str, notes: Sequence[str], panels: Sequence[Panel], groups: Mapping[str, Sequence[Bars]]
) -> str:
    """An SVG: engines as rows, in groups that are fair to compare; figures as columns.

    Bars of a panel have one scale, from 0, over all groups.
    """
    everyone = [bars for group in groups.values() for bars in group]
    width = (_WIDTH - 2 * _MARGIN - _LABELS - _GAP * len(panels)) / len(panels)
    lefts = [_MARGIN + _LABELS + _GAP + place * (width + _GAP) for place in range(len(panels))]
    most = [
        max((bars.values[place] or 0.0 for bars in everyone), default=0.0) or 1.0
        for place in range(len(panels))
    ]
    parts = [_text(_MARGIN, 36, title, "ink title")]
    for left, panel in zip(lefts, panels, strict=True):
        parts.append(_text(left, 64, panel.title, "ink bold"))
        better = "more is better" if panel.more_is_better else "less is better"
        parts.append(_text(left, 79, f"{panel.unit}, {better}", "soft small"))
    y = 88.0
    for name, group in groups.items():
        parts.append(f'<path class="line" d="M{_MARGIN} {y:g}H{_WIDTH - _MARGIN}"/>')
        parts.append(_text(_MARGIN, y + 18, name, "soft bold"))
        y += 26
        for bars in group:
            parts.append(_text(_MARGIN, y + 12, bars.name, "ink bold" if bars.is_own else "ink"))
            for place, left in enumerate(lefts):
                value = bars.values[place]
                if value is not None:
                    length = max(1.0, (width - _VALUE) * value / most[place])
                    parts.append(_bar(left, y, length, bars.texts[place], bars.is_own))
            y += _ROW
        y += 4
    for note in notes:
        y += 16
        parts.append(_text(_MARGIN, y, note, "soft small"))
    height = y + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}"'
            f' width="{_WIDTH}" height="{height:g}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="ground" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1:g}"'
            ' rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _bar(left: float, top: float, length: float, text: str, is_own: bool) -> str:
    kind, ink = ("own", "ink bold") if is_own else ("other", "ink")
    return (
        f'<rect class="{kind}" x="{left:g}" y="{top + 1:g}" width="{length:.1f}"'
        f' height="{_BAR}" rx="2"/>' + _text(left + length + 5, top + 12, text, ink)
    )


def _text(x: float, y: float, text: str, classes: str) -> str:
    return f'<text class="{classes}" x="{x:.1f}" y="{y:g}">{escape(text)}</text>'
