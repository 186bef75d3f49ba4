"""A model whose arithmetic goes wrong: an error that says so, and no answer full of null."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import safetensors.torch
import torch
from starlette.applications import Starlette

from src.core.config import Config, ModelSection
from src.http import create_app
from tests.support.checkpoints import make_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

MESSAGES = [{"role": "user", "content": "hi"}]
# Path, body, and whether its protocol has a code for an error.
REQUESTS: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/completions", {"prompt": "hi", "logprobs": 2, "max_tokens": 4}, True),
    ("/v1/completions", {"prompt": "hi", "temperature": 0, "max_tokens": 4}, True),
    ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2, "max_tokens": 4}, True),
    ("/v1/chat/completions", {"messages": MESSAGES, "top_k": 3, "max_tokens": 4}, True),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, True),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, False),
]


@pytest.fixture(scope="module", params=["one NaN", "all NaN", "one infinity"])
async def app(
    config: Config,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    anyio_backend: str,
) -> AsyncIterator[Starlette]:
    path = make_checkpoint(
        tmp_path_factory.mktemp("unsound") / "tiny", tokenizer=True, num_hidden_layers=1
    )
    file = path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    head = weights["lm_head.weight"]
    if request.param == "one infinity":
        # Whatever the sign of what they are multiplied by, one of the two is +inf.
        head[7, 0], head[8, 0] = torch.inf, -torch.inf
    elif request.param == "one NaN":
        head[7] = torch.nan
    else:
        head[:] = torch.nan
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    model = ModelSection(path=str(path), served_model_name=("tiny",))
    app = create_app(msgspec.structs.replace(config, model=model), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server._engine.wait_ready()
        yield app


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "body", "has_code"),
    REQUESTS,
    ids=[f"{path}-{i}" for i, (path, *_) in enumerate(REQUESTS)],
)
async def test_it_is_an_error_that_says_so(
    app: Starlette, path: str, body: dict[str, Any], has_code: bool, stream: bool
) -> None:
    engine = await app.state.server.ready_engine()
    name, reason = "slipstream_row_failures_total", "logits"
    before = engine.metrics.value(name, reason=reason)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        answer = await client.post(path, json={"model": "tiny", "stream": stream, **body})
    # A stream that has begun cannot change its status.
    assert answer.status_code == 500 or (stream and answer.status_code == 200)
    assert "NaN or +inf" in answer.text
    if answer.status_code == 500 and has_code:
        assert json.loads(answer.content)["error"]["code"] == "invalid_logits"
    # In a stream of responses an error has a word of theirs.
    elif has_code and path != "/v1/responses":
        assert "invalid_logits" in answer.text
    assert engine.metrics.value(name, reason=reason) > before
    assert engine.metrics.value("slipstream_step_failures_total") == 0
    assert engine.status.ready
