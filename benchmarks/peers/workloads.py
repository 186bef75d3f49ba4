"""The workloads for all peers, and their figures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.load import MS, Answer, random_prompts

# (repeat, vocabulary size) -> the prompts of one turn
Prompts = Callable[[int, int], list[list[int]]]
# (answers, prompt length) -> value
Measure = Callable[[Sequence[Answer], int], float]

_SHARED_LEN: Final = 1024


@dataclass(frozen=True)
class Measured:
    """A figure: its unit, whether more is better, and its computation from a turn's answers."""

    unit: str
    more_is_better: bool
    measure: Measure

    def ratio(self, reference: float, peer: float) -> float:
        """How many times better the reference is than the peer; above 1 it is ahead."""
        return reference / peer if self.more_is_better else peer / reference


@dataclass(frozen=True)
class Workload:
    """Prompts that are sent all at once, and the output length of each.

    Attributes
    ----------
    about
        One line of explanation for the table.
    prompts
        Of a repeat: the same for every peer, without shared prefixes between repeats.
    input_len, output_len
        Tokens of each prompt and of each answer.
    figures
        Name -> figure.
    needs_prefix_cache
        Whether it is meaningless for an engine without one.
    """

    about: str
    prompts: Prompts
    input_len: int
    output_len: int
    figures: dict[str, Measured]
    needs_prefix_cache: bool = False


def _ttft(answers: Sequence[Answer], _: int) -> float:
    return MS * answers[0].ttft


def _tpot(answers: Sequence[Answer], _: int) -> float:
    return MS * answers[0].tpot


def _output_rate(answers: Sequence[Answer], _: int) -> float:
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    return sum(answer.num_tokens for answer in answers) / seconds


def _prefill_rate(answers: Sequence[Answer], input_len: int) -> float:
    return input_len / answers[0].ttft


def _apart(count: int, length: int, seed: int) -> Prompts:
    return lambda repeat, size: random_prompts(count, length, size, seed=1000 * seed + repeat)


def _sharing(tail_seed: int) -> Prompts:
    def prompts(repeat: int, size: int) -> list[list[int]]:
        source = random.Random(f"shared {repeat}")
        shared = [source.randrange(3, size) for _ in range(_SHARED_LEN)]
        return [shared + tail for tail in random_prompts(16, 64, size, 1000 * tail_seed + repeat)]

    return prompts


_RATE = {"output": Measured("tok/s", True, _output_rate)}

WORKLOADS: Final[dict[str, Workload]] = {
    "one": Workload(
        "one stream, 128 tokens in, 128 out",
        _apart(1, 128, 1),
        128,
        128,
        {"ttft": Measured("ms", False, _ttft), "tpot": Measured("ms", False, _tpot)},
    ),
    "many": Workload("32 at once, 128 in, 64 out", _apart(32, 128, 2), 128, 64, _RATE),
    "prefill": Workload(
        "one prompt of 2,048 tokens",
        _apart(1, 2048, 3),
        2048,
        1,
        {"prefill": Measured("tok/s", True, _prefill_rate)},
    ),
    # The second of these finds the prefix that the first one has cached.
    "shared-cold": Workload(
        "16 at once that share 1,024 tokens, 64 of their own, 32 out, cold",
        _sharing(4),
        _SHARED_LEN + 64,
        32,
        _RATE,
        needs_prefix_cache=True,
    ),
    "shared-warm": Workload(
        "the same prefix again, other ends",
        _sharing(5),
        _SHARED_LEN + 64,
        32,
        _RATE,
        needs_prefix_cache=True,
    ),
}
START: Final = {
    "start-cold": "process start to first token, nothing cached",
    "start-warm": "process start to first token, the second time",
}
_START_FIGURE: Final = Measured("s", False, lambda answers, _: answers[0].first)


def figures_of(workload: str) -> dict[str, Measured]:
    """The figures of a workload or a start."""
    return {"start": _START_FIGURE} if workload in START else WORKLOADS[workload].figures


def about(workload: str) -> str:
    """One line about a workload or a start."""
    return START.get(workload) or WORKLOADS[workload].about
