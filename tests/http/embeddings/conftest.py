"""A small encoder behind the server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from src.core.config import Config, ModelSection
from src.http import create_app
from tests.http.asking import client_of
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules

SIZE = 64


@pytest.fixture(scope="session")
async def embedding_client(
    config: Config, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[httpx.AsyncClient]:
    directory = make_encoder(tmp_path_factory.mktemp("embeddings") / "tiny", "bert")
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling={"pooling_mode": "mean"}, prompts={"query": "query: "})
    http = msgspec.structs.replace(
        config.http, max_embedding_inputs=40, max_embedding_values=36 * SIZE
    )
    model = ModelSection(path=str(directory), served_model_name=("tiny-bert",))
    app = create_app(msgspec.structs.replace(config, model=model, http=http), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server._engine.wait_ready()
        async with client_of(app) as client:
            yield client
