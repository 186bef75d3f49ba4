"""How far a model's logits may lie from exact ones: a bound from an analysis of rounding.

A number that is right on one machine is none: the order of sums differs between instruction sets,
and models differ in how much of a rounding error arrives at the logits. A random model may turn
1e-7 into 1e-4 for one token of forty (two keys or two experts that are nearly tied, a row that is
nearly cancelled before a norm). So errors of the size that rounding has are put into the reference,
at random, while it runs in float64. What they do to a token's logits is what rounding may do.

The size follows from the number of products, their order and their magnitudes. Let u be half of
the dtype's epsilon. A sum of n products is rounded after each of them, by at most u times what is
summed so far, anywhere in between: a variance of u^2 / 3 times its square (N. Higham and T. Mary,
"A New Approach to Probabilistic Rounding Error Analysis", 2019). Summed one after the other, the
worst order that a kernel has, the square of the first k is k * s^2 + (k * m)^2 on average, of
products with mean m and deviation s. All together: u^2 * (n^2 * s^2 / 6 + n * (n * m)^2 / 9). In
bfloat16 and float16 sums are in float32, and what counts is that each result is rounded once more.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TRIALS = 4
# The largest of some hundred logits and four trials is three standard deviations or more. Twice
# that is not passed by chance. The rest is for what no module of the reference does by itself:
# scores, softmax and RoPE, and in 16 bits the factors between.
MARGIN = 8.0
# In 16 bits every result is rounded, here as there, so that trials are what computing is: for the
# largest error of a token, and for its mean error, which chance hardly moves. Trials put in a
# deviation of u, rounding has one of u / sqrt(3): 0.58 of the mean; twice that and a little.
LARGEST_OF_16_BITS, MEAN_OF_16_BITS = 3.0, 1.25
# Where experts are chosen, rounding may choose another one. That is as large an error here as in a
# trial, so tokens with such a choice have the trials' mean, and twice that is the bound.
MEAN_WITH_EXPERTS = 2.0


class Expected(NamedTuple):
    """What a model should give, and what rounding did to it in trials.

    Attributes
    ----------
    logits
        float64 [T, V].
    largest, mean
        float64 [T, 1]: a token's largest and its mean error.
    """

    logits: Tensor
    largest: Tensor
    mean: Tensor

    def share(self, got: Tensor) -> Tensor:
        """A token's largest error among logits [T, V] as a share of the trials' largest, [T]."""
        return ((got.double() - self.logits).abs() / self.largest).amax(dim=-1)

    def mean_share(self, got: Tensor) -> float:
        """A token's mean error as a share of the trials' mean; of the token in the middle."""
        means = (got.double() - self.logits).abs().mean(dim=-1, keepdim=True)
        return float((means / self.mean).median())


@torch.inference_mode()
def expected_logits(reference: Any, tokens: list[int]) -> Expected:
    """The logits of a model of transformers, and how exact logits in its dtype can be."""
    unit, wide = torch.finfo(reference.dtype).eps / 2, reference.dtype == torch.float32
    exact = copy.deepcopy(reference).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # the others take no float64
    ids = torch.tensor([tokens])
    logits: Tensor = exact(ids).logits[0].double()
    random = torch.Generator().manual_seed(0)

    def hook(module: nn.Module, given: tuple[Any, ...], made: Any) -> Tensor | None:
        if not isinstance(made, Tensor) or made.dtype != torch.float64:
            return None
        error = _error_of_sums(module, given, made) if wide else made.abs()
        if error is None:
            return None
        noise = torch.randn(made.shape, generator=random, dtype=torch.float64)
        return made + unit * error * noise

    for module in exact.modules():
        module.register_forward_hook(hook)
    trials = [exact(ids).logits[0].double() for _ in range(TRIALS)]
    apart = torch.stack([(trial - logits).abs() for trial in trials])  # [trials, T, V]
    largest = apart.amax(dim=(0, 2))[:, None]
    return Expected(logits, largest, apart.mean(dim=(0, 2))[:, None])


def _error_of_sums(module: nn.Module, given: tuple[Any, ...], made: Tensor) -> Tensor | None:
    """The standard deviation, in units of u; None of a module that only calls others."""
    if isinstance(module, nn.Linear):
        squares = given[0].square() @ module.weight.square().T
        return _of_sums(squares, made, module.in_features)
    if any(own.dim() == 3 for own in module.parameters(recurse=False)):  # experts
        terms = max(own.shape[-1] for own in module.parameters(recurse=False))
        return _of_sums(made.square().mean(-1, keepdim=True), made, terms)
    # A norm or an activation: a few operations on each element.
    return 2 * made.abs() if next(module.children(), None) is None else None


def _of_sums(squares: Tensor, sums: Tensor, terms: int) -> Tensor:
    """Of sums of so many products, by their sums and the sums of their squares."""
    deviations = squares - (sums**2 / terms).clamp(max=squares)  # n s^2
    return (terms * (deviations / 6 + sums**2 / 9)).sqrt()


def assert_only_rounded(got: Tensor, expected: Expected) -> None:
    """Assert that float32 logits [T, V] are those that are expected, but for rounding."""
    share = expected.share(got).max()
    assert share < MARGIN, float(share)
