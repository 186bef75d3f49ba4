"""One attempt to fit a model on a device; advice is found by further attempts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from src.core.config import Config
from src.core.errors import ConfigError, ModelLoadError
from src.core.memory_report import MemoryReport, size
from src.distributed import Group
from src.engine.drafters.loading import load_drafts, taps_for
from src.engine.drafters.source import NO_MEMORY, DraftMemory
from src.engine.execution.cache_dtype import set_cache_dtype
from src.engine.execution.kv_cache import KVCachePlan, block_size_of
from src.engine.execution.kv_groups import lay_out
from src.engine.sizing.device_table import DeviceDescription
from src.engine.sizing.start import (
    MemoryPlan,
    Reckoned,
    reckon_memory,
    table_bytes,
    weight_bytes,
    why_left_out,
)
from src.engine.speculation.choice import Choice, choice_of
from src.models import Implementation, ModelConfig, ServedModel, load_config, outline_model
from src.models.adapters.memory import AdapterRoom
from src.models.loading.options import LoadOptions
from src.ops.build.levels import cpu_flags, fastest_level
from src.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutlineGroup(Group):
    """A group of several ranks of which one is outlined: its collectives change no shape."""

    def all_reduce(self, tensor: Any) -> Any:
        """See `Group`: the shape is that of `tensor`."""
        return tensor


@dataclass(frozen=True)
class Attempt:
    """What came of one setup on one device.

    Attributes
    ----------
    plan
        ``None`` if KV memory does not fit.
    reason
        Why it does not fit; ``None`` if it does.
    left_out
        Why a drafter that the checkpoint brings is not used; empty: it is, or there is none.
    """

    reckoned: Reckoned
    plan: MemoryPlan | None
    reason: str | None
    left_out: str = ""

    @property
    def report(self) -> MemoryReport:
        """Where memory goes."""
        return self.reckoned.report_without_kv() if self.plan is None else self.plan.report

    @property
    def choice(self) -> Choice:
        """Who drafts: as a start says, or as far as it is known without KV memory."""
        return self.reckoned.choice if self.plan is None else self.plan.choice


@dataclass(frozen=True)
class Setup:
    """What is to be fitted.

    Attributes
    ----------
    path
        The model's directory.
    concurrency
        Requests of the whole context at once; ``None``: any number.
    tokenizer
        The model's, if a drafter's tokens are compared with it; see `tokenizer_for`.
    """

    config: Config
    path: Path
    implementation: Implementation
    tensor_parallel: int = 1
    concurrency: int | None = None
    tokenizer: Tokenizer | None = None

    def changed(self, section: str, **values: object) -> Setup:
        """The same with other settings of one section."""
        part = msgspec.structs.replace(getattr(self.config, section), **values)
        return replace(self, config=msgspec.structs.replace(self.config, **{section: part}))

    def outline(self, *, on_cpu: bool = True) -> ServedModel:
        """The model on the meta device, as a CPU holds its weights or another device.

        Raises
        ------
        ModelLoadError
            Its configuration cannot be served.
        ConfigError
            It cannot be divided among so many ranks, or its KV be kept as ``cache.dtype`` says.
        """
        model = self.config.model
        if not self.implementation.is_program:
            raise ModelLoadError(
                "plan knows native families only; transformers would serve this one, and what its "
                "attention keeps is seen when it is loaded (docs/models.md)"
            )
        rounds_inputs = model.quantize_activations
        # As a start decides once its kernels are built.
        if rounds_inputs is None and not fastest_level(cpu_flags()).multiplies_bytes:
            rounds_inputs = False
        rounds_inputs = rounds_inputs if on_cpu else False
        group = OutlineGroup(0, self.tensor_parallel)
        try:
            options = replace(
                LoadOptions.of(self.config, rounds_inputs, AdapterRoom.of(self.config.lora)),
                taps=taps_for(self.config, self.path),
            )
            outline = outline_model(
                self.path,
                options if on_cpu else replace(options, device=torch.device("cuda")),
                group=group if self.tensor_parallel > 1 else None,
                outlines_tables=True,
            )
        except ValueError as error:
            if self.tensor_parallel == 1:
                raise
            possible = ", ".join(map(str, dividing_ranks(load_config(self.path)))) or "none"
            raise ConfigError(
                f"--tensor-parallel {self.tensor_parallel}: {error}; this model can be divided "
                f"among {possible}"
            ) from None
        set_cache_dtype(self.config.cache, outline)
        return outline

    def attempt(self, device: DeviceDescription) -> Attempt:
        """Try to fit it.

        Raises
        ------
        ConfigError, ModelLoadError
            It cannot be served whatever the device's size.
        """
        outline = self.outline(on_cpu=device.kind == "cpu")
        # A method that cannot be served is no question of size.
        choice_of(self.config, outline)
        free = device.free - weight_bytes(outline) - table_bytes(outline)
        drafts = load_drafts(self.config, outline, self.tokenizer, outlines=True, free=free)
        if drafts is None:
            return self._with(device, outline, NO_MEMORY)
        attempt = self._with(device, outline, drafts.memory)
        found = attempt.plan or str(attempt.reason)
        left_out = why_left_out(self.config.speculation, found)
        if left_out is None:
            return attempt
        return replace(self._with(device, outline, NO_MEMORY), left_out=left_out)

    def _with(self, device: DeviceDescription, outline: ServedModel, taken: DraftMemory) -> Attempt:
        """The attempt with a drafter that takes so much."""
        reckoned = reckon_memory(self.config, device, outline, taken)
        if reckoned.free <= 0:
            reason = (
                f"its weights take {size(reckoned.taken)}, and {device.name} has "
                f"{size(device.free)} free"
            )
            return Attempt(reckoned, None, reason)
        try:
            plan = reckoned.plan()
        except ConfigError as error:
            return Attempt(reckoned, None, str(error))
        return Attempt(reckoned, plan, self._lack(plan))

    def _lack(self, plan: MemoryPlan) -> str | None:
        """Why KV memory does not hold the requests that are asked for; ``None`` if it does.

        Or why a step does not hold the longest text of a model that computes it as a whole.
        """
        budget, kept = self.config.scheduler.max_num_batched_tokens, plan.report.kv
        if kept is not None and kept.lasts == "step":
            if budget < plan.max_model_len:
                return (
                    f"a text of {plan.max_model_len} tokens is computed in one step, as a whole, "
                    f"and scheduler.max_num_batched_tokens is {budget}"
                )
            return None
        if self.concurrency is None:
            return None
        asked = self.config.model.max_model_len or plan.max_model_len
        if plan.kv.num_rows(self.concurrency) < self.concurrency:
            return (
                f"there is room for the recurrent states of {plan.kv.num_rows(self.concurrency)} "
                f"requests at once, not of {self.concurrency}"
            )
        needed = self.concurrency * plan.kv.blocks_held(asked)
        if needed <= plan.kv.num_blocks:
            return None
        return (
            f"{self.concurrency} requests of {asked} tokens take "
            f"{size(needed * plan.kv.bytes_per_block)} of KV memory, which has "
            f"{size(plan.kv.total_bytes)}"
        )


def dividing_ranks(config: ModelConfig) -> list[int]:
    """Numbers of ranks, up to 64, among which a model's heads and inner sizes can be divided."""
    if config.encoder is not None:
        return []
    sizes = []
    for layer in config.layers:
        # A family may have others; 0 has every divisor.
        sizes += [getattr(layer.attention, name, 0) for name in ("num_heads", "num_kv_heads")]
        sizes.append(getattr(layer.mlp, "intermediate_size", 0))
    common = math.gcd(*sizes)
    return [ranks for ranks in range(2, 65) if common % ranks == 0]


def kv_shape(reckoned: Reckoned, num_blocks: int = 0) -> KVCachePlan:
    """The shape of a model's KV memory on a device, with so many blocks."""
    config, device = reckoned.config, reckoned.device
    block_size = block_size_of(config.cache, device.torch_device)
    layout = lay_out(reckoned.layers, block_size)
    return KVCachePlan(block_size, num_blocks, layout.bytes_per_block, layout.windows)
