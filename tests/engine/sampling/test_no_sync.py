"""Sampling never asks the device: it runs on a device whose tensors have no data at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from src.core.step_message import DeviceRequest
from src.engine.sampling import SampleBatch, Sampler, SamplingState, gather_logprobs
from tests.engine.sampling.harness import sequence

V = 3000
META = torch.device("meta")


@pytest.fixture
def no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned host memory needs a driver; the copy from it to nowhere does not."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


class NoHostScalars(TorchFunctionMode):
    """Refuses ``x[index] = number``: on CUDA, and only there, the number is a copy that waits."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            raise RuntimeError("a number is written through an index")
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("no_pinning")
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"top_k": 2000, "top_p": 0.9},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 2.0, "frequency_penalty": 1.0},
        {"logit_bias": {1: 2.0}, "allowed_token_ids": (1, 2), "min_tokens": 5, "end": [3]},
        {"bad": [(1,), (2, 3), (3, 4, 5)]},
        {"logprobs": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("others", [0, 2])
def test_every_parameter(params: dict[str, Any], others: int) -> None:
    state = SamplingState(4, V, META)
    sampler = Sampler(state)
    batch = range(1 + others)
    for row in batch:
        owner = sequence(**({} if row else params))
        state.install(row, DeviceRequest.of(owner.request), owner.prompt_len)
    tokens = torch.zeros(4, 64, dtype=torch.int32, device=META)
    for position in (3, 4):
        logits = torch.zeros(len(batch), V, device=META)
        with NoHostScalars():
            output = sampler.sample(logits, SampleBatch(batch, [position] * len(batch)), tokens)
        assert output.token_ids.device.type == "meta"
        assert output.token_ids.shape == (len(batch),)
        assert (output.logprobs is not None) == ("logprobs" in params)


@pytest.mark.usefixtures("no_pinning")
def test_prompt_scores() -> None:
    scores = gather_logprobs(
        torch.zeros(7, V, device=META), torch.zeros(7, dtype=torch.int64, device=META), 5
    )
    assert scores.top_logprobs.shape == (7, 5)


def test_such_a_device_notices_a_question() -> None:
    nothing = torch.zeros(3, device=META)
    for ask in (torch.Tensor.item, torch.Tensor.tolist, torch.nonzero, lambda x: x[x > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask(nothing if ask is not torch.Tensor.item else nothing.sum())
    with NoHostScalars(), pytest.raises(RuntimeError, match="written through an index"):
        nothing[torch.zeros(1, dtype=torch.int64, device=META)] = -1.0
