"""The cost of sampling 32 tokens from a vocabulary of 32,000, by sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from src.core.request import Request
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.sampling import SampleBatch, Sampler, SamplingState
from src.engine.sizing.roofline import Roofline
from src.ops.build.kernels import ensure_built

_ROWS, _VOCAB_SIZE, _PROMPT_LEN, _LEN = 32, 32_000, 512, 640

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "bias of 100 tokens": {"logit_bias": dict.fromkeys(range(100), 1.0)},
}


@pytest.mark.parametrize("name", CASES)
def test_sample(benchmark: Any, name: str, roofline: Roofline) -> None:
    ensure_built(wait=True)
    state = SamplingState(_ROWS, _VOCAB_SIZE, torch.device("cpu"))
    prompt = list(range(_PROMPT_LEN))
    for row in range(_ROWS):
        asked = Request(
            key=row, prompt_token_ids=prompt, params=SamplingParams(seed=row, **CASES[name]),
            max_tokens=128,
        )  # fmt: skip
        state.install(row, DeviceRequest.of(asked), _PROMPT_LEN)
    sampler = Sampler(state)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_ROWS, _VOCAB_SIZE, generator=generator)
    tokens = torch.randint(0, _VOCAB_SIZE, (_ROWS, _LEN), dtype=torch.int32, generator=generator)
    batch = SampleBatch(rows=list(range(_ROWS)), positions=[_LEN - 1] * _ROWS)
    # A copy, because the sampler may overwrite its input.
    given = logits.clone()

    def turn() -> torch.Tensor:
        return sampler.sample(given, batch, tokens).token_ids

    def restore() -> None:
        given.copy_(logits)

    benchmark.group = "sampler"
    chosen = benchmark.pedantic(turn, setup=restore, rounds=50, warmup_rounds=3)
    assert len(chosen) == _ROWS
    # Every logit has to be read at least once.
    least = logits.nbytes / roofline.bandwidth
    benchmark.extra_info |= {
        "case": name,
        "fraction of roofline": least / benchmark.stats.stats.median,
    }
