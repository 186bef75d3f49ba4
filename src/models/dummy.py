"""Weights from a seed: for benchmarks at any size, without a checkpoint."""

from __future__ import annotations

import math

import torch

# Values drawn once and repeated. Prime, so that no row of a matrix lines up with another.
_POOL_SIZE = 4_194_301
_STRIDE = 2_654_435_761  # spreads parameters over the pool (Knuth, multiplicative hashing)


def fill_dummy(parameters: dict[str, torch.Tensor], seed: int) -> None:
    """Fill parameters so that activations and logits keep a sane scale at any depth.

    Norms are one, biases zero, matrices [out, in] uniform with variance 1 / in. Random numbers are
    drawn once, and each parameter repeats them from a place of its own: drawing every value takes
    20 times as long, 45 s of one core for 8 billion. The same seed gives the same values on the
    same kind of device.
    """
    first = next(iter(parameters.values()))
    generator = torch.Generator(device=first.device)
    generator.manual_seed(seed)
    pool = torch.empty(_POOL_SIZE, dtype=first.dtype, device=first.device)  # value index -> [-1, 1)
    pool.uniform_(-1, 1, generator=generator)
    for index, (name, parameter) in enumerate(parameters.items()):
        if name.endswith("norm"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            offset = (index + 1) * _STRIDE % _POOL_SIZE
            _repeat(pool, offset, math.sqrt(3 / parameter.shape[-1]), parameter.view(-1))


def _repeat(pool: torch.Tensor, offset: int, scale: float, flat: torch.Tensor) -> None:
    done = 0
    while done < flat.numel():
        count = min(pool.numel() - offset, flat.numel() - done)
        torch.mul(pool[offset : offset + count], scale, out=flat[done : done + count])
        done, offset = done + count, 0
