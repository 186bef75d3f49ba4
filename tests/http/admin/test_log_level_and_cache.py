"""What an administrator changes while the server runs: the prefix cache and the log level."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from src.core.config import Config, Secret
from src.http import create_app
from src.observability.logs import LEVELS

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

KEY = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
async def admin(config: Config, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    http = msgspec.structs.replace(config.http, admin_key=Secret(KEY))
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://slipstream",
            headers={"authorization": f"Bearer {KEY}"},
        ) as client:
            yield client


async def test_the_prefix_cache_is_emptied(admin: httpx.AsyncClient) -> None:
    async def cached_tokens() -> int:
        body = {"prompt": list(range(20, 84)), "max_tokens": 1, "temperature": 0}
        answer = (await admin.post("/v1/completions", json=body)).json()
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert await cached_tokens() == 0
    assert await cached_tokens() == 48
    answer = await admin.post("/debug/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {"reset": True})
    assert await cached_tokens() == 0
    assert await cached_tokens() == 48
    assert (await admin.get("/debug/reset_prefix_cache")).status_code == 405
    assert (await admin.post("/debug/reset_prefix_cache?now=1")).status_code == 400


async def test_the_log_level_is_changed(admin: httpx.AsyncClient) -> None:
    logger = logging.getLogger("src")
    before = logger.level
    try:
        for level in LEVELS:
            answer = await admin.post(f"/debug/log_level?level={level}")
            assert answer.json() == {"level": level}
            assert logger.getEffectiveLevel() == getattr(logging, level.upper())
            assert (await admin.get("/debug/log_level")).json() == {"level": level}
        for wrong in ("", "level=", "level=loud", "level=INFO", "level=info&level=debug", "x=1"):
            answer = await admin.post(f"/debug/log_level?{wrong}")
            assert answer.status_code == 400
        assert logger.getEffectiveLevel() == logging.ERROR
    finally:
        logger.setLevel(before)
