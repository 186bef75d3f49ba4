"""No step waits for the device: what a CPU can see of it; `test_gpu` has the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src import AsyncEngine, SamplingParams
from src.core.errors import SlipstreamError
from src.engine import startup
from src.engine.execution import row_state
from src.engine.execution.row_state import RowState
from src.engine.sampling import sampler
from tests.support.engines import assert_idle, random_prompts, small_config
from tests.support.fake_capture import FakeCapture
from tests.support.no_waiting import WaitsError, no_waiting, watch_on_cpu

pytestmark = pytest.mark.anyio

# All that a request may ask of the sampler, one way of truncation each.
EVERY: dict[str, Any] = {
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 1.0},
    "bad_words": ("the end",),
    "min_tokens": 4,
    "logprobs": 3,
    "prompt_logprobs": 2,
}
WISHES = [
    SamplingParams(temperature=0, max_tokens=6),
    SamplingParams(max_tokens=6, seed=1),
    SamplingParams(max_tokens=6, seed=1, min_p=0.01),
    SamplingParams(max_tokens=6, seed=1, top_k=20, top_p=0.9, min_p=0.01, **EVERY),
    SamplingParams(max_tokens=6, seed=1, top_p=0.9, **EVERY),
    SamplingParams(max_tokens=6, seed=1, allowed_token_ids=[3, 4, 5], logprobs=0),
]


async def served(checkpoint: Path, **changes: Any) -> None:
    """Steps of every kind, and more requests than rows."""
    config = small_config(checkpoint, scheduler__max_num_seqs=4, **changes)
    async with AsyncEngine.open(config) as engine:
        prompts = random_prompts(12, longest=40)
        await asyncio.gather(
            *(
                engine.generate(prompt, WISHES[index % len(WISHES)])
                for index, prompt in enumerate(prompts)
            )
        )
        assert_idle(engine)


@pytest.mark.parametrize("graphs", ["off", "wait"])
async def test_no_step_waits_for_the_device(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    """From a plan to its copy-out, eagerly and in captured steps."""
    monkeypatch.setattr(startup, "capture_backend", lambda device: FakeCapture())
    seen = watch_on_cpu(monkeypatch)
    changes = {
        "compile__enforce_eager": graphs == "off",
        "compile__startup": "off",
        "compile__cuda_graphs": graphs,
        "compile__cuda_graph_max_tokens": 16,
    }
    await served(checkpoint, **changes)
    assert seen.count("apply") == seen.count("compute") == seen.count("copy_out") > 10


@pytest.mark.parametrize("place", ["apply", "compute"])
async def test_a_step_that_waits_is_seen(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def append(self: RowState, given: Any) -> None:
        (self.tokens[given.row] == 1).nonzero()

    def truncate(logits: Tensor, selection: Any) -> None:
        logits[logits < 0] = 0

    monkeypatch.setattr(startup, "capture_backend", lambda device: None)
    if place == "apply":
        monkeypatch.setattr(row_state.RowState, "append_blocks", append)
    else:
        monkeypatch.setattr(sampler, "_truncate", truncate)
    seen = watch_on_cpu(monkeypatch)
    # What is no failure of a step, but a mistake in the program, ends the engine.
    with pytest.raises((AssertionError, SlipstreamError)):
        await served(checkpoint, compile__enforce_eager=True, compile__startup="off")
    what = "aten.nonzero.default" if place == "apply" else "aten.index_put_.default by a mask"
    assert f"{what} waits for the device" in seen


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x[0].item(),
        lambda x: int(x.sum()),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x),
        lambda x: x + torch.tensor([1, 2]),
    ],
)
async def test_what_waits_is_refused(asks: Any) -> None:
    numbers = torch.ones(2, dtype=torch.int64)
    asks(numbers)
    with pytest.raises(WaitsError), no_waiting():
        asks(numbers)
