"""Two servers of equal settings with `model.deterministic` give the same answers to every bit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from src.core.config import Config
from src.http import create_app
from tests.http.asking import CHAT, COMPLETIONS, client_of, post
from tests.support.checkpoints import make_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

# Of prompts of all lengths, over a block of the cache and over a chunk of prefill.
PROMPTS = ["word " * length for length in (1, 2, 3, 7, 16, 40, 80)]
COMPLETION: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": 5, "ignore_eos": True}
CHATTING: dict[str, Any] = {
    "max_tokens": 6, "temperature": 0.8, "seed": 3, "logprobs": True, "top_logprobs": 5,
    "ignore_eos": True,
}  # fmt: skip
ASKED: list[tuple[str, dict[str, Any]]] = [
    *((COMPLETIONS, {"prompt": prompt, **COMPLETION}) for prompt in PROMPTS),
    (COMPLETIONS, {"prompt": PROMPTS[5], "echo": True, **COMPLETION}),
    *(
        (CHAT, {"messages": [{"role": "user", "content": prompt}], **CHATTING})
        for prompt in PROMPTS[::2]
    ),
]


async def answers(config: Config, seed: int) -> list[Any]:
    """What a server says to all that is asked at once, in an order of its own.

    That is as JSON: numbers are equal only if all their digits are.
    """
    order = list(range(len(ASKED)))
    random.Random(seed).shuffle(order)
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.server._engine.wait_ready()
        calls = [said(client, seed * number, *ASKED[index]) for number, index in enumerate(order)]
        got = await asyncio.gather(*calls)
    return [got[order.index(index)] for index in range(len(ASKED))]


async def said(client: httpx.AsyncClient, delay: int, path: str, body: dict[str, Any]) -> Any:
    # Some join while others are being computed.
    await asyncio.sleep(delay / 1000)
    (choice,) = (await post(client, path, **body))["choices"]
    assert choice["logprobs"]
    return choice


@pytest.mark.parametrize("architecture", ["deepseekv3", "qwen3next"])
async def test_equal_servers_give_equal_numbers(
    architecture: str, config: Config, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, architecture, tokenizer=True, max_position_embeddings=1024)
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=str(path), deterministic=True),
        device=msgspec.structs.replace(config.device, num_threads=2),
        scheduler=msgspec.structs.replace(config.scheduler, max_num_batched_tokens=64),
        compile=msgspec.structs.replace(config.compile, enforce_eager=True),
    )
    assert await answers(config, 1) == await answers(config, 2)
