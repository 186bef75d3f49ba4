"""Every query of the dashboard names metrics and labels that a real server shows."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from src.core.config import Config
from src.http import create_app
from tests.observability.dashboard import Query, dashboard, queries
from tests.support.engines import small_config

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

# Prometheus adds these to what it scrapes.
TARGET_LABELS = {"instance", "job"}

Series = dict[str, list[dict[str, str]]]


def demo_config() -> Config:
    config = small_config(Path("configs/demo"), model__served_model_name=("demo",))
    section = msgspec.structs.replace(config.observability, stats_interval=0)
    return msgspec.structs.replace(config, observability=section)


@pytest.fixture(scope="module")
async def series(anyio_backend: str) -> Series:
    """Labels of all samples by name, after an answer and a refusal."""
    app = create_app(demo_config(), owns_process=False)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        await app.state.server.ready_engine()
        body = {"prompt": "hello", "max_tokens": 3}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        unknown = await client.post("/v1/completions", json={**body, "model": "other"})
        assert unknown.status_code == 404
        text = (await client.get("/metrics")).text
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}-{query.legend}")
async def test_a_query_finds_its_series(query: Query, series: Series) -> None:
    assert query.selectors
    # Every name of ours is followed by braces, so none escapes this test.
    names = re.findall(r"(?:vllm:|slipstream_|process_)\w+", query.expression)
    assert names == [name for name, _ in query.selectors]
    shown: set[str] = set()
    for name, labels in query.selectors:
        assert name in series, f"{name} is not in /metrics"
        wanted = {
            label: value.replace("$model_name", "demo")
            for label, value in labels.items()
            if label not in TARGET_LABELS
        }
        fitting = [sample for sample in series[name] if wanted.items() <= sample.items()]
        assert fitting, f"no series of {name} has {wanted}"
        shown |= fitting[0].keys()
    assert query.grouping <= shown | TARGET_LABELS


async def test_every_metric_of_ours_is_on_the_dashboard(series: Series) -> None:
    asked = {name for query in queries() for name, _ in query.selectors}
    suffix = re.compile(r"_(bucket|sum|count)$")
    families = {suffix.sub("", name) for name in asked}
    ours = {suffix.sub("", name) for name in series if name.startswith("slipstream_")}
    assert ours <= families


def test_panels_have_a_title_and_a_place_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for one, other in combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one['title']} lies on {other['title']}"


def test_quantiles_show_their_traces() -> None:
    latencies = [
        target
        for panel in dashboard()["panels"]
        if panel["title"] in ("Time to first token", "Inter-token latency", "End to end")
        for target in panel["targets"]
        if "histogram_quantile" in target["expr"]
    ]
    assert len(latencies) == 9
    assert all(target["exemplar"] for target in latencies)
