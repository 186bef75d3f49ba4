"""Weights from a seed: for benchmarks at any size, without a checkpoint."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import torch


def fill_dummy(parameters: dict[str, torch.Tensor], seed: int) -> None:
    """Fill parameters so that activations and logits keep a sane scale at any depth.

    Norms are one, biases zero, matrices [out, in] uniform with variance 1 / in. Each parameter has
    a generator of its own, seeded by `seed` and its index, so values do not depend on the order in
    which threads run. The same seed gives the same values on the same kind of device.
    """

    def fill(index: int, name: str, parameter: torch.Tensor) -> None:
        if name.endswith("norm"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed((seed * 1_000_003 + index) % 2**63)
            bound = math.sqrt(3 / parameter.shape[-1])
            parameter.uniform_(-bound, bound, generator=generator)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="dummy") as pool:
        list(pool.map(lambda item: fill(item[0], *item[1]), enumerate(parameters.items())))
