"""The picture of the dashboard shows what Prometheus answered, and says what it did not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.bench.plots.canvas import write
from tests.observability.dashboard import dashboard
from tests.observability.dashboard_picture import Series, draw, series_of, shown, without_data


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "percentunit", "25 %"),
        (2.5, "s", "2.5 s"),
        (0.0125, "s", "12.5 ms"),
        (2e-5, "s", "20 µs"),
        (0.0, "s", "0"),
        (3 << 20, "bytes", "3 MiB"),
        (12, "bytes", "12 B"),
        (12_300, "short", "12.3 K"),
        (0.5, "reqps", "0.5 /s"),
    ],
)
def test_values_have_the_dashboard_s_units(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_every_unit_of_the_dashboard_is_known() -> None:
    units = {
        panel["fieldConfig"]["defaults"]["unit"]
        for panel in dashboard()["panels"]
        if panel["type"] != "row"
    }
    assert units <= {"percentunit", "s", "bytes", "short", "reqps"}


def test_a_matrix_becomes_lines_without_what_is_no_number() -> None:
    answer = [
        {"metric": {"phase": "plan"}, "values": [[1, "0.5"], [2, "NaN"], [3, "2"]]},
        {"metric": {"phase": "queue"}, "values": [[1, "NaN"]]},
    ]
    assert series_of(answer, "{{phase}} s") == [Series("plan s", [(1.0, 0.5), (3.0, 2.0)])]


def test_every_panel_is_drawn_with_its_lines(tmp_path: Path) -> None:
    document = dashboard()
    results = {
        (panel["title"], target["expr"]): [Series(target["legendFormat"], [(0, 1.0), (9, 3.0)])]
        for panel in document["panels"]
        for target in panel.get("targets", ())
    }
    missing = next(iter(results))
    results[missing] = []
    assert without_data(results) == [": ".join(missing)]
    figure = draw(document, results)
    panels = {panel["title"]: panel for panel in document["panels"] if panel["type"] != "row"}
    drawn = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert drawn.keys() == panels.keys()
    for title, axes in drawn.items():
        targets = len(panels[title]["targets"]) - (title == missing[0])
        is_stat = panels[title]["type"] == "stat"
        assert (len(axes.texts) == 2 * targets) if is_stat else (len(axes.lines) == targets), title
    places = [axes.get_position() for axes in figure.axes]
    assert not any(one.overlaps(other) for one in places for other in places if one is not other)
    write(figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
