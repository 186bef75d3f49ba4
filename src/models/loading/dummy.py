"""Weights from a seed: for benchmarks at any size, without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from src.models.loading.filling import make, make_aliases
from src.models.model import Model
from src.models.weights.parameters import allocate

# Number of values that are drawn once and repeated. Prime, so that rows of a matrix differ.
_POOL_SIZE = 4_194_301
_STRIDE = 2_654_435_761  # spreads parameters over the pool (Knuth, multiplicative hashing)


def fill_dummy(model: Model, seed: int, before_each: Callable[[], None] = lambda: None) -> None:
    """Fill parameters so that activations and logits keep a reasonable scale at any depth.

    Norms are neutral, biases zero, matrices [out, in] uniform with variance 1 / in. Random numbers
    are drawn once, and each parameter repeats them from its own offset. Drawing every value takes
    20 times as long: 45 s of one core for 8 billion. The same seed gives the same values on the
    same kind of device.
    """
    device = model.spec.device
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    pool = torch.empty(_POOL_SIZE, dtype=model.spec.dtype, device=device)  # index -> [-1, 1)
    pool.uniform_(-1, 1, generator=generator)
    for index, parameter in enumerate(model.table.values()):
        if not parameter.placements:
            continue
        method = model.methods.get(parameter.name)
        values = (
            model.weights[parameter.name]
            if method is None
            else allocate(parameter.shape, parameter.dtype, device)
        )
        assert isinstance(values, torch.Tensor)
        if parameter.fill is not None:
            values.fill_(parameter.fill)
        else:
            offset = (index + 1) * _STRIDE % _POOL_SIZE
            _repeat(pool, offset, math.sqrt(3 / parameter.shape[-1]), values.view(-1))
        if method is not None:
            before_each()
            make(model, parameter, method.encode(values))
    make_aliases(model, before_each)


def _repeat(pool: torch.Tensor, offset: int, scale: float, flat: torch.Tensor) -> None:
    done = 0
    while done < flat.numel():
        count = min(pool.numel() - offset, flat.numel() - done)
        torch.mul(pool[offset : offset + count], scale, out=flat[done : done + count])
        done, offset = done + count, 0
