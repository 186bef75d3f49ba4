"""Logits processors in the sampler: batched, per request, and none can touch another's row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from src.core.sampling_params import LogitsProcessorCall
from src.engine.sampling import SampleBatch
from src.engine.sampling.logits import BANNED
from src.engine.sampling.processors import LogitsProcessor, ProcessedRows
from src.ops.sampling.gumbel_argmax import NO_TOKEN
from tests.engine.sampling.harness import Bench, sequence

V = 40


class Amount(msgspec.Struct, frozen=True):
    by: float = 1.0


class Add(LogitsProcessor[Amount]):
    name = "add"
    arguments = Amount

    def __init__(self) -> None:
        self.gathered = 0
        self.seen: list[tuple[list[float], list[list[int]], list[int]]] = []

    def gather(self, arguments: Sequence[Amount], vocab_size: int, device: torch.device) -> Tensor:
        assert vocab_size == V
        self.gathered += 1
        return torch.tensor([each.by for each in arguments])[:, None]

    def apply(self, logits: Tensor, rows: ProcessedRows[Amount]) -> None:
        lengths = rows.lengths.tolist()
        known = [row[:length] for row, length in zip(rows.tokens.tolist(), lengths)]
        self.seen.append(([each.by for each in rows.arguments], known, rows.prompt_lens.tolist()))
        logits += rows.gathered


class Does(LogitsProcessor[Any]):
    """Whatever a test has it do."""

    name = "does"

    def __init__(self, does: Callable[[Tensor], object]) -> None:
        self.does = does

    def apply(self, logits: Tensor, rows: ProcessedRows[Any]) -> None:
        self.does(logits)


def call(name: str, **arguments: Any) -> LogitsProcessorCall:
    return LogitsProcessorCall(name, arguments)


def bench_of(*processors: LogitsProcessor[Any]) -> Bench:
    return Bench(V, processors={each.name: each for each in processors})


def test_rows_that_ask_are_given_together_with_their_own_tokens() -> None:
    add = Add()
    bench = bench_of(add)
    bench.install(0, sequence([1, 2], [3], logits_processors=(call("add", by=2.0),)))
    bench.install(1, sequence([4]))
    bench.install(2, sequence([5, 6, 7], logits_processors=(call("add"),)))
    logits = torch.randn(3, V)
    changed, _ = bench.sample([2, 1, 0], logits)
    assert torch.equal(changed, logits + torch.tensor([[1.0], [0.0], [2.0]]))
    assert add.seen == [([1.0, 2.0], [[5, 6, 7], [1, 2, 3]], [3, 2])]


def test_arguments_are_gathered_when_other_rows_sample() -> None:
    add = Add()
    bench = bench_of(add)
    for row in range(2):
        bench.install(row, sequence(logits_processors=(call("add"),)))
    for expected, rows in ((1, [0, 1]), (1, [0, 1]), (2, [0]), (3, [0, 1])):
        bench.sample(rows, torch.randn(len(rows), V))
        assert add.gathered == expected
        bench.append(0, 3)
    assert [known[0] for _, known, _ in add.seen][-1] == [1, 2, 3, 3, 3, 3]


def test_several_are_applied_in_the_order_of_the_request() -> None:
    bench = bench_of(Add(), Does(lambda logits: logits.mul_(2)))
    bench.install(0, sequence(logits_processors=(call("add"), call("does"))))
    bench.install(1, sequence(logits_processors=(call("does"), call("add"), call("add", by=3))))
    logits = torch.randn(2, V)
    changed, _ = bench.sample([0, 1], logits)
    assert torch.allclose(changed[0], (logits[0] + 1) * 2)
    assert torch.allclose(changed[1], logits[1] * 2 + 4)


def test_they_follow_penalties_and_leave_reported_log_probabilities_alone() -> None:
    seen: list[Tensor] = []
    bench = bench_of(Does(lambda logits: seen.append(logits.clone()) or logits.fill_(0)))
    params = {"logit_bias": {5: 7.0}, "logprobs": 1, "repetition_penalty": 2.0}
    bench.install(0, sequence([5], logits_processors=(call("does"),), **params))
    logits = torch.ones(1, V)
    _, output = bench.sample([0], logits)
    assert seen[0][0, 5] == 4.0
    assert output.logprobs is not None
    scores = output.logprob_lists()[0]
    assert scores is not None
    assert scores.logprob == pytest.approx(-float(torch.tensor(V).log()))


@pytest.mark.parametrize("value", [0.0, 1e38, -1e38, float("-inf")])
def test_what_was_ruled_out_is_never_brought_back(value: float) -> None:
    bench = bench_of(Does(lambda logits: logits[:, :20].fill_(value)))
    asks = {"logits_processors": (call("does"),)}
    bench.install(0, sequence(allowed_token_ids=(25, 26), **asks))
    bench.install(1, sequence(bad=[(3,)], **asks))
    logits = torch.zeros(2, V)
    changed, output = bench.sample([0, 1], logits)
    assert changed[0].isinf().sum() == V - 2
    assert changed[1, 3] == BANNED
    assert output.token_ids[0] in (25, 26)
    assert output.token_ids[1] != 3


def test_one_that_leaves_only_banned_tokens_ends_its_request() -> None:
    """No token that ends the text comes before `min_tokens`, whatever a processor rules out."""

    def only_the_end(logits: Tensor) -> None:
        logits[:, 4:] = -torch.inf
        logits[:, :3] = -torch.inf

    bench = bench_of(Does(only_the_end))
    asks = {"logits_processors": (call("does"),)}
    bench.install(0, sequence(end=(3,), min_tokens=5, **asks))
    bench.install(1, sequence(bad=[(3,)], **asks))
    bench.install(2, sequence(**asks))
    # All that is allowed is banned before: the processor is not at fault.
    bench.install(3, sequence(bad=[(3,)], allowed_token_ids=(3,), **asks))
    _, output = bench.sample([0, 1, 2, 3], torch.zeros(4, V))
    assert output.token_ids.tolist() == [NO_TOKEN, NO_TOKEN, 3, 3]


def nan(logits: Tensor) -> None:
    logits[-1, 0] = float("nan")


def infinite(logits: Tensor) -> None:
    logits[-1, 0] = float("inf")


def raises(logits: Tensor) -> None:
    logits.fill_(float("nan"))
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("does", "ended"), [(nan, [False, False, True]), (infinite, [False, False, True]),
                        (raises, [True, False, True])],
)  # fmt: skip
def test_one_that_fails_ends_the_requests_that_asked_for_it_alone(
    does: Callable[[Tensor], object], ended: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_of(Does(does))
    # With a truncation, which hides what is no number.
    for row in range(3):
        asks = {"logits_processors": (call("does"),)} if row != 1 else {}
        bench.install(row, sequence(top_k=3, seed=row, **asks))
    logits = torch.randn(3, V)
    alone = Bench(V)
    for row in range(3):
        alone.install(row, sequence(top_k=3, seed=row))
    expected = alone.sample([0, 1, 2], logits)[1].token_ids
    with caplog.at_level(logging.ERROR):
        token_ids = bench.sample([0, 1, 2], logits)[1].token_ids
    assert [token == NO_TOKEN for token in token_ids.tolist()] == ended
    assert [a == b for a, b in zip(token_ids.tolist(), expected.tolist())] == [
        not each for each in ended
    ]
    assert ("the logits processor does failed" in caplog.text) == (does is raises)


class Picky(LogitsProcessor[Any]):
    """Fails where a row has the token 9; else only the token that follows its last is left."""

    name = "picky"

    def apply(self, logits: Tensor, rows: ProcessedRows[Any]) -> None:
        lengths = rows.lengths.tolist()
        known = [row[:length] for row, length in zip(rows.tokens.tolist(), lengths)]
        if any(9 in tokens for tokens in known):
            raise RuntimeError("no 9")
        for entry, tokens in enumerate(known):
            wanted = logits[entry, tokens[-1] + 1].clone()
            logits[entry] = -torch.inf
            logits[entry, tokens[-1] + 1] = wanted


def test_one_that_fails_behind_a_draft_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bench = bench_of(Picky())
    for row in range(2):
        asks = {"logits_processors": (call("picky"),)}
        bench.install(row, sequence([1, 2, 3], temperature=0, **asks))
    # Row 0 verifies three drafts, of which the second is one that the processor does not bear.
    bench.tokens[0, 3:6] = torch.tensor([4, 9, 5])
    rows, positions = [0, 0, 0, 0, 1], [3, 4, 5, 6, 3]
    for _ in range(2):
        output = bench.sampler.sample(torch.randn(5, V), SampleBatch(rows, positions), bench.tokens)
        assert output.token_ids.tolist() == [4, NO_TOKEN, NO_TOKEN, NO_TOKEN, 4]
    [record] = caplog.records
    assert record.getMessage() == (
        "the logits processor picky failed behind drafts, which are left out"
    )
    # Where it fails at a row's own next token, whoever asked for it ends.
    caplog.clear()
    bench.tokens[1, 2] = 9
    output = bench.sampler.sample(torch.randn(5, V), SampleBatch(rows, positions), bench.tokens)
    assert output.token_ids.tolist() == [NO_TOKEN] * 5
    [record] = caplog.records
    assert record.getMessage().endswith("; 2 completions that asked for it end")


def test_one_that_fails_at_a_guess_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bench = bench_of(Picky())
    bench.install(0, sequence([1, 9], logits_processors=(call("picky"),)))
    batch = SampleBatch([0], [2], guesses=True)
    output = bench.sampler.sample(torch.randn(1, V), batch, bench.tokens)
    assert output.token_ids.tolist() == [NO_TOKEN]
    assert "end" not in caplog.records[0].getMessage().split()


def test_a_row_that_names_one_does_not_only_draw() -> None:
    bench = bench_of(Add())
    bench.install(0, sequence(logits_processors=(call("add"),)))
    bench.install(1, sequence())
    assert [row.only_draws for row in bench.state.params([0, 1])] == [False, True]
