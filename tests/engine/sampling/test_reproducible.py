"""A row's token depends on its request, its tokens and its logits, and on nothing else."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from src.core.outputs import TokenLogprobs
from tests.engine.sampling.harness import Bench, Owner, sequence
from tests.engine.sampling.test_parameters import V, owners

WISHES: list[dict[str, Any]] = [
    {"temperature": 1.3, "seed": 7},
    {"temperature": 0.0},
    {"top_p": 0.8, "seed": 7},
    {"top_k": 5, "top_p": 0.9, "seed": -3, "logprobs": 4},
    {"min_p": 0.05, "repetition_penalty": 1.4, "seed": 2**63 - 1},
    {"typical_p": 0.6, "top_p": 0.9, "seed": 11},
    {"top_n_sigma": 1.2, "top_k": 30, "seed": 12},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "bad": [(1, 2), (3,)], "logprobs": 2},
    {"min_tokens": 20, "end": [4], "logit_bias": {4: 9.0}, "allowed_token_ids": tuple(range(30))},
]


def logits_of(owner: Owner) -> torch.Tensor:
    """Logits as a deterministic model would give them: a function of the tokens alone."""
    seed = hash(tuple(owner.token_ids)) % 2**63
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3


def step(bench: Bench, rows: list[int]) -> list[tuple[int, TokenLogprobs | None]]:
    logits = torch.stack([logits_of(bench.held[row]) for row in rows])
    _, output = bench.sample(rows, logits)
    tokens = output.token_ids.tolist()
    for row, token_id in zip(rows, tokens, strict=True):
        bench.append(row, token_id)
    return list(zip(tokens, output.logprob_lists(), strict=True))


def alone(owner: Owner, steps: int) -> list[tuple[int, TokenLogprobs | None]]:
    bench = Bench(V, 1)
    bench.install(0, copy.deepcopy(owner))
    return [step(bench, [0])[0] for _ in range(steps)]


def test_alone_and_in_one_batch_in_any_order_and_row() -> None:
    steps = 25
    wanted = [alone(sequence([1, 2, index], **wish), steps) for index, wish in enumerate(WISHES)]
    assert len({token for sampled in wanted for token, _ in sampled}) > 10
    shuffler = random.Random(0)
    for _ in range(5):
        bench = Bench(V, 12)
        rows = shuffler.sample(range(12), len(WISHES))
        for index, row in enumerate(rows):
            bench.install(row, sequence([1, 2, index], **WISHES[index]))
        got: list[list[Any]] = [[] for _ in WISHES]
        for _ in range(steps):
            order = shuffler.sample(range(len(WISHES)), len(WISHES))
            for index, sampled in zip(order, step(bench, [rows[i] for i in order]), strict=True):
                got[index].append(sampled)
        assert got == wanted


def test_after_preemption_in_another_row() -> None:
    """Whoever resumes, with the output so far as known tokens, goes on as if never interrupted."""
    for wish in WISHES:
        wanted = alone(sequence([1, 2, 3], **wish), 12)
        bench = Bench(V, 3)
        owner = sequence([1, 2, 3], **wish)
        got = []
        for row, steps in ((2, 5), (0, 4), (2, 3)):
            for other in (1, 2):
                bench.install(other, sequence([9], [9], top_k=1, presence_penalty=2.0))
            bench.install(row, owner)
            got += [step(bench, [row])[0] for _ in range(steps)]
        assert got == wanted


def test_seeds_differ() -> None:
    sampled = [[t for t, _ in alone(sequence(seed=seed), 10)] for seed in (0, 1, -1, 2**32, 2**62)]
    assert all(a != b for a, b in itertools.combinations(sampled, 2))


class RowReuse(RuleBasedStateMachine):
    """Rows change hands at random; every step equals that of a state that knows no other owner."""

    @initialize()
    def start(self) -> None:
        self.bench = Bench(V, 5, 64)

    @rule(row=st.integers(0, 4), owner=owners)
    def install(self, row: int, owner: Owner) -> None:
        self.bench.install(row, copy.deepcopy(owner))

    @precondition(lambda self: any(len(o.token_ids) < 60 for o in self.bench.held.values()))
    @rule(order=st.permutations(range(5)), count=st.integers(1, 5))
    def sample(self, order: list[int], count: int) -> None:
        held = self.bench.held
        rows = [row for row in order if row in held and len(held[row].token_ids) < 60][:count]
        wanted = [alone(held[row], 1)[0] for row in rows]
        assert step(self.bench, rows) == wanted


TestRowReuse = RowReuse.TestCase
TestRowReuse.settings = settings(
    max_examples=20,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
