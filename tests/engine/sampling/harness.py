"""Requests, token buffers and calls of the sampler, small."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from src.core.request import Request
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.sampling import SampleBatch, SampleOutput, Sampler, SamplingState
from src.engine.sampling.processors import Processors

CPU = torch.device("cpu")


@dataclass
class Owner:
    """A request with the output it has so far."""

    request: Request
    output: list[int]

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.request.prompt_token_ids + self.output


def sequence(
    prompt: Iterable[int] = (1, 2, 3),
    output: Iterable[int] = (),
    *,
    seed: int = 0,
    end: Iterable[int] = (),
    bad: Iterable[tuple[int, ...]] = (),
    **params: Any,
) -> Owner:
    return Owner(
        Request(
            key=0,
            prompt_token_ids=list(prompt),
            params=SamplingParams(**params),
            max_tokens=1000,
            seed=seed,
            end_token_ids=frozenset(end),
            bad_words_token_ids=tuple(bad),
        ),
        list(output),
    )


class Bench:
    """A sampler with its rows and token buffer; unwritten places of the buffer are poison."""

    def __init__(
        self,
        vocab_size: int,
        num_rows: int = 8,
        max_model_len: int = 64,
        processors: Processors | None = None,
    ) -> None:
        self.state = SamplingState(num_rows, vocab_size, CPU, processors)
        self.sampler = Sampler(self.state)
        self.tokens = torch.full((num_rows, max_model_len), -1, dtype=torch.int32)
        self.held: dict[int, Owner] = {}

    def install(self, row: int, owner: Owner) -> None:
        self.held[row] = owner
        self.tokens[row] = -1
        self.tokens[row, : len(owner.token_ids)] = torch.tensor(owner.token_ids, dtype=torch.int32)
        self.state.install(row, DeviceRequest.of(owner.request), owner.prompt_len)

    def append(self, row: int, token_id: int) -> None:
        owner = self.held[row]
        self.tokens[row, len(owner.token_ids)] = token_id
        owner.output.append(token_id)

    def sample(self, rows: Sequence[int], logits: Tensor) -> tuple[Tensor, SampleOutput]:
        """Logits as they went into the draw, and the output; the caller's logits stay."""
        logits = logits.clone()
        positions = [len(self.held[row].token_ids) for row in rows]
        output = self.sampler.sample(logits, SampleBatch(rows, positions), self.tokens)
        return logits, output


def process(owner: Owner, logits: Tensor) -> Tensor:
    """One sequence alone: [V] logits as they go into the draw."""
    bench = Bench(len(logits), 1, max(64, len(owner.token_ids) + 1))
    bench.install(0, owner)
    return bench.sample([0], logits[None])[0][0]
