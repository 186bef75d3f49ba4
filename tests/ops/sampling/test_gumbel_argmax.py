"""Random bits, exact skipping, corner cases and statistics of Gumbel-max sampling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats

from src.ops import GUMBEL_ARGMAX
from src.ops.runtime.kernel_library import KernelLibrary
from src.ops.sampling.philox import gumbel_from_words, philox4x32, random_words
from tests.ops.conftest import MACHINE_LEVELS, at_level

Sampler = Callable[..., Any]

# Known-answer tests of Random123 (kat_vectors: philox4x32 10): counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.fixture(params=["reference", *MACHINE_LEVELS], scope="session")
def sampler(request: pytest.FixtureRequest, libraries: dict[str, KernelLibrary]) -> Sampler:
    if request.param == "reference":
        return GUMBEL_ARGMAX.reference
    return at_level(libraries, request.param).gumbel_argmax


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(
    libraries: dict[str, KernelLibrary],
    counter: tuple[int, int, int, int],
    key: tuple[int, int],
    expected: tuple[int, int, int, int],
) -> None:
    words = philox4x32(
        tuple(torch.tensor(c) for c in counter),  # type: ignore[arg-type]
        tuple(torch.tensor(k) for k in key),  # type: ignore[arg-type]
    )
    assert tuple(int(word) for word in words) == expected
    for library in libraries.values():
        got = library.philox(
            key[0] | key[1] << 32, counter[0] | counter[1] << 32, counter[2] | counter[3] << 32
        )
        assert got == expected


def test_random_words_follow_the_counter_layout(library: KernelLibrary) -> None:
    seeds, positions = torch.tensor([-3, 2**40 + 7]), torch.tensor([5, 2**33 + 1])
    words = random_words(seeds, positions, 11)
    for row in range(2):
        for token in range(11):
            group = library.philox(int(seeds[row]) % 2**64, int(positions[row]), token // 4)
            assert int(words[row, token]) == group[token % 4]


def test_noise_stays_in_the_range_that_skipping_relies_on() -> None:
    noise = gumbel_from_words(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert noise.isfinite().all()
    assert float(noise.max()) < 22.88
    assert float(noise.min()) > -2.82
    assert torch.equal(noise, noise.sort(descending=True).values)


def sample(
    sampler: Sampler, logits: torch.Tensor, temperature: float, seed: int = 7, position: int = 3
) -> list[int]:
    rows = logits.shape[0]
    result: list[int] = sampler(
        logits,
        torch.full((rows,), seed),
        torch.full((rows,), position),
        torch.full((rows,), temperature),
    ).tolist()
    return result


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_lowest_index_of_ties(sampler: Sampler, temperature: float) -> None:
    logits = torch.zeros(3, 100)
    logits[1, 37] = logits[1, 91] = 2.0
    logits[2, 99] = 1e-6
    assert sample(sampler, logits, temperature) == [0, 37, 99]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1001])
def test_masked_tokens_never_win(sampler: Sampler, temperature: float, vocab_size: int) -> None:
    logits = torch.full((2, vocab_size), -torch.inf)
    logits[0, vocab_size - 1] = -1e30
    logits[1, vocab_size // 2] = 0.0
    assert sample(sampler, logits, temperature) == [vocab_size - 1, vocab_size // 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1001, 5000])
def test_a_row_with_a_bad_logit_has_no_token_wherever_it_is(
    sampler: Sampler, temperature: float, bad: float, vocab_size: int
) -> None:
    """And the rows beside it have theirs, as they would without it."""
    places = sorted({0, vocab_size // 3, vocab_size // 2, vocab_size - 1})
    logits = torch.randn(2 * len(places) + 1, vocab_size)
    logits[0, 0] = -torch.inf if vocab_size > 1 else 0.0
    expected = sample(sampler, logits, temperature)
    for index, place in enumerate(places):
        logits[2 * index + 1, place] = bad
        expected[2 * index + 1] = -1
    assert sample(sampler, logits, temperature) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 64, 1001])
def test_a_row_of_nothing_has_no_token(
    sampler: Sampler, temperature: float, vocab_size: int
) -> None:
    logits = torch.zeros(3, vocab_size)
    logits[1] = -torch.inf
    logits[2] = torch.nan
    tokens = sample(sampler, logits, temperature)
    assert tokens[0] >= 0
    assert tokens[1:] == [-1, -1]


def test_a_row_does_not_depend_on_its_batch(sampler: Sampler) -> None:
    args = GUMBEL_ARGMAX.build("cpu", rows=6, vocab_size=999, temperature=1.0)
    batch = sampler(*args).tolist()
    alone = [int(sampler(*(x[i : i + 1] for x in args))) for i in reversed(range(6))]
    assert batch == alone[::-1]


def test_strided_rows(sampler: Sampler) -> None:
    args = GUMBEL_ARGMAX.build("cpu", rows=6, vocab_size=500, temperature=1.0)
    wide = torch.full((6, 800), torch.nan)
    wide[:, :500] = args[0]
    assert torch.equal(sampler(wide[:, :500], *args[1:]), sampler(*args))


@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("spread", [0.01, 2.0, 20.0])
def test_skipping_never_drops_a_winner(
    libraries: dict[str, KernelLibrary], temperature: float, spread: float
) -> None:
    args = GUMBEL_ARGMAX.build(
        "cpu", rows=64, vocab_size=2003, temperature=temperature, spread=spread
    )
    expected = GUMBEL_ARGMAX.reference(*args)
    for library in libraries.values():
        assert torch.equal(library.gumbel_argmax(*args), expected)


def test_frequencies_follow_the_softmax(sampler: Sampler) -> None:
    draws, temperature = 20_000, 0.8
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -torch.inf, 0.1, -3.0])
    tokens = sampler(
        logits.expand(draws, -1),
        torch.full((draws,), 12345),
        torch.arange(draws),
        torch.full((draws,), temperature),
    )
    counts = tokens.bincount(minlength=len(logits)).double()
    expected = (logits.double() / temperature).softmax(0) * draws
    possible = expected > 0
    assert counts[~possible].sum() == 0
    # The draws are fixed by the seed, so this either always passes or never does.
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-3
