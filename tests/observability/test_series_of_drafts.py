"""Series of drafts, before there are any."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest

from src.core.config import Config, SpeculationSection
from src.http import create_app
from tests.support.engines import small_config

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("method", "sources"),
    [("auto", ("prediction", "suffix", "grammar")), ("ngram", ("prediction", "ngram"))],
)
async def test_counts_of_all_who_may_draft_are_there_from_the_start(
    method: str, sources: tuple[str, ...], checkpoint: Path
) -> None:
    """Whoever takes their rates sees the first drafts too."""
    config: Config = small_config(checkpoint)
    section = SpeculationSection(method=method, num_speculative_tokens=3)
    app = create_app(msgspec.structs.replace(config, speculation=section), owns_process=False)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client,
    ):
        await app.state.server.ready_engine()
        lines = (await client.get("/metrics")).text.splitlines()
    by_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    found = [line for line in lines if line.startswith(by_place)]
    assert len(found) == 3
    for source in sources:
        of_source = [line for line in lines if f'source="{source}"' in line and "draft" in line]
        assert len(of_source) == 2, source
        found += of_source
    assert {float(line.rsplit(" ", 1)[1]) for line in found} == {0.0}
