"""Sizes an engine's memory: measured on a device that is here, or reckoned from a description."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch

from src.compile.graphs import CaptureBackend
from src.core.blocks import most_seen
from src.core.config import MIB, Config, ModelSection, SpeculationSection
from src.core.errors import ConfigError
from src.core.gguf import is_gguf
from src.core.memory_report import KVGroupReport, KVReport, MemoryReport
from src.engine.devices import Device
from src.engine.drafters.source import NO_MEMORY, DraftMemory
from src.engine.execution.cache_dtype import cache_dtype_of, log_cache_dtype
from src.engine.execution.graphs import GraphPlan, ladder_of, plan_graphs
from src.engine.execution.kv_cache import KVCachePlan, block_size_of, free_memory, plan_kv_cache
from src.engine.execution.kv_groups import KVLayout, lay_out
from src.engine.execution.memory_profile import compute_largest_step, memory_gauge, step_bytes
from src.engine.sizing.device_table import DeviceDescription
from src.engine.sizing.shape_gauge import ShapeGauge
from src.engine.sizing.weight_parts import weight_parts
from src.engine.speculation.choice import (
    Choice,
    Traits,
    choose_sources,
    history_bytes,
    state_backups,
)
from src.engine.speculation.drafter import SOURCES
from src.models import LayerKVSpec, Model, ServedModel
from src.models.config import LayerConfig
from src.models.registry import family_of
from src.ops.declaration import Backend

# Bytes of the libraries that multiply matrices on a GPU: two workspaces of cuBLAS.
_WORKSPACES: Final = 64 * MIB
# Bytes that the driver keeps for each captured step, an estimate.
_PER_GRAPH: Final = 4 * MIB
_LAYERS_OF_A_KIND: Final = 2


@dataclass(frozen=True)
class MemoryPlan:
    """What a start takes of its device's memory.

    Attributes
    ----------
    kv
        The number and the size of KV blocks.
    max_model_len
        The context length in tokens.
    graphs
        Which steps are captured; ``None``: none.
    report
        All of it, for readers.
    choice
        Who drafts.
    """

    kv: KVCachePlan
    max_model_len: int
    graphs: GraphPlan | None
    report: MemoryReport
    choice: Choice


def refuse_for_device(section: ModelSection, path: Path, device_type: str) -> None:
    """Refuse formats of weights and inputs that a kind of device does not have.

    ``path`` is that of the model, as `resolve_model` returns it.

    Raises
    ------
    ConfigError
        The message names the setting.
    """
    if section.quantize_activations and device_type != "cpu":
        raise ConfigError(
            f"model.quantize_activations = true is for the CPU, the device is {device_type}"
        )
    is_quantized = section.quantization is not None or is_gguf(path)
    if section.quantize_activations and not is_quantized:
        raise ConfigError(
            "model.quantize_activations = true goes with model.quantization or a GGUF file"
        )


def measure_memory(
    config: Config,
    device: Device,
    model: ServedModel,
    backend: CaptureBackend | None,
    attention: Backend | None,
    drafts: DraftMemory = NO_MEMORY,
) -> MemoryPlan:
    """Size the memory of a loaded model's engine, on the device where it is. Blocks.

    Parameters
    ----------
    backend
        ``None`` if the device cannot capture.
    attention
        See `ForwardPass`.
    drafts
        What a drafter takes beside the model; its weights are loaded already.

    Raises
    ------
    ConfigError
        The largest step, or KV memory, does not fit.
    """
    place = model.spec.device
    # Measured before the pool and the graphs exist, so a failure here means that the step is too
    # large.
    step = step_bytes(config, device, model, memory_gauge(place), attention, drafts.largest)
    graphs = plan_graphs(config, device, model, backend, attention)
    kv, max_model_len, report, choice = _size(
        config,
        model,
        place,
        step=step,
        graphs=0 if graphs is None else graphs.bytes,
        free=free_memory(place),
        drafts=drafts,
        name=torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
    )
    if graphs is not None:
        # There may be memory for the states of fewer rows.
        rows = kv.num_rows(config.scheduler.max_num_seqs)
        graphs = replace(graphs, ladder=ladder_of(config, model, rows))
    return MemoryPlan(kv, max_model_len, graphs, report, choice)


@dataclass(frozen=True)
class Reckoned:
    """What an engine takes beside KV memory on a described device, and the model's outline.

    Attributes
    ----------
    outline
        On the meta device.
    step, graphs
        In bytes; see `MemoryReport`.
    drafts
        What a drafter takes beside the model.
    """

    config: Config
    device: DeviceDescription
    outline: ServedModel
    step: int
    graphs: int
    drafts: DraftMemory = NO_MEMORY

    @property
    def choice(self) -> Choice:
        """Who drafts, as long as KV memory is not sized."""
        section = self.config.speculation
        traits = Traits.of(self.config, self.outline, self.drafts.layers)
        return choose_sources(section, traits, brought=brought_by(section, self.drafts))

    @property
    def taken(self) -> int:
        """Bytes of weights and tables."""
        return weight_bytes(self.outline) + table_bytes(self.outline) + self.drafts.nbytes

    @property
    def layers(self) -> tuple[LayerKVSpec, ...]:
        """What all layers keep of a sequence, those of a drafter last."""
        return (*self.outline.kv_cache_spec(), *self.drafts.layers)

    @property
    def free(self) -> int:
        """Bytes that are free when the model is loaded; below 0 if it does not fit."""
        return self.device.free - self.taken

    def plan(self) -> MemoryPlan:
        """Size KV memory as a start does.

        Raises
        ------
        ConfigError
            It does not fit.
        """
        kv, max_model_len, report, choice = _size(
            self.config,
            self.outline,
            self.device.torch_device,
            step=self.step,
            graphs=self.graphs,
            free=max(0, self.free),
            drafts=self.drafts,
            name=self.device.name,
        )
        return MemoryPlan(kv, max_model_len, None, report, choice)

    def report_without_kv(self) -> MemoryReport:
        """The report where KV memory does not fit."""
        history = history_bytes(self.config.speculation, self.choice)
        return MemoryReport(
            self.device.name,
            (*weight_parts(self.outline), *self.drafts.parts),
            table_bytes(self.outline),
            self.step,
            self.graphs,
            None,
            self.free - self.step - self.graphs - history,
            history,
        )


def reckon_memory(
    config: Config,
    device: DeviceDescription,
    outline: ServedModel,
    drafts: DraftMemory = NO_MEMORY,
) -> Reckoned:
    """Reckon what a model takes on a device that need not be here, from its shapes alone.

    ``outline`` is on the meta device. The largest step is the one that a start on a GPU measures.
    It is not reckoned if not even weights fit.
    """
    weights = Reckoned(config, device, outline, 0, 0, drafts)
    step = graphs = 0
    if device.kind == "cuda" and weights.free > 0:
        block_size = block_size_of(config.cache, device.torch_device)
        sized = _with(config, "cache", block_size=block_size)
        step = _WORKSPACES + _step_of_shapes(sized, outline, drafts)
        if config.compile.captures and not outline.own_inputs:
            ladder = ladder_of(config, outline, config.scheduler.max_num_seqs)
            largest = max((shape.num_tokens for shape in ladder.shapes), default=0)
            if largest:
                captured = _with(sized, "scheduler", max_num_batched_tokens=largest)
                graphs = _step_of_shapes(captured, outline, is_captured=True)
                graphs += _PER_GRAPH * len(ladder.shapes)
    return replace(weights, step=step, graphs=graphs)


def weight_bytes(model: ServedModel) -> int:
    """Bytes of all parameters, and of slots for adapters; those that share values count once."""
    if isinstance(model, Model):
        adapters = 0 if model.adapters is None else model.adapters.nbytes
        return adapters + sum(model.weights[name].nbytes for name in model.table)
    return sum(tensor.nbytes for tensor in model.parameters().values())


def table_bytes(model: ServedModel) -> int:
    """Bytes of the tables that are computed for a model."""
    return sum(table.nbytes for table in model.buffers().values())


def _size(
    config: Config,
    model: ServedModel,
    place: torch.device,
    *,
    step: int,
    graphs: int,
    free: int,
    drafts: DraftMemory,
    name: str,
) -> tuple[KVCachePlan, int, MemoryReport, Choice]:
    """KV memory, the context length, the report, and who drafts.

    ``free`` is beside weights and tables.
    """
    section, layers = config.speculation, (*model.kv_cache_spec(), *drafts.layers)
    log_cache_dtype(model)
    traits = Traits.of(config, model, drafts.layers)
    choose = partial(choose_sources, section, traits, brought=brought_by(section, drafts))

    def plan(choice: Choice, history: int) -> tuple[KVCachePlan, int]:
        return plan_kv_cache(
            layers,
            config.cache,
            device=place,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=model.spec.max_positions,
            max_model_len_is_fixed=config.model.max_model_len is not None,
            # A drafter that nobody asked for is rather left out.
            may_shorten=section.method != "auto" or not drafts.parts,
            reserved_bytes=step + graphs + history,
            free_bytes=free,
            state_backups=state_backups(choice, traits),
            backups_are_spare=section.method == "auto",
        )

    choice = choose()
    history = history_bytes(section, choice)
    kv, max_model_len = plan(choice, history)
    if choice.sources and kv.states is not None:
        choice = choose(num_backups=kv.states.num_backups)
        if not choice.sources and history:
            history = 0
            kv, max_model_len = plan(choice, history)
    report = MemoryReport(
        name,
        (*weight_parts(model), *drafts.parts),
        table_bytes(model),
        step,
        graphs,
        _kv_report(layers, kv, max_model_len, cache_dtype_of(model)),
        free - step - graphs - history - kv.total_bytes,
        history,
    )
    return kv, max_model_len, report, choice


def brought_by(section: SpeculationSection, drafts: DraftMemory) -> Sequence[str]:
    """Sources for which a drafter with weights is there, as `choose_sources` takes them."""
    return SOURCES[section.method] if drafts.parts else ()


def why_left_out(section: SpeculationSection, found: MemoryPlan | str) -> str | None:
    """Why a drafter with weights is left out that nobody has asked for by name.

    Parameters
    ----------
    found
        Memory with what the drafter takes, or why it does not hold the engine then.

    Returns
    -------
    None: it is not left out.
    """
    if section.method != "auto":
        return None
    return found if isinstance(found, str) else found.choice.reason or None


def _kv_report(
    layers: Sequence[LayerKVSpec], plan: KVCachePlan, max_model_len: int, dtype: str
) -> KVReport:
    at_once = plan.num_blocks / plan.blocks_held(max_model_len)
    return KVReport(
        dtype=dtype,
        groups=_group_reports(lay_out(layers, plan.block_size), layers),
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        bytes=plan.total_bytes,
        max_model_len=max_model_len,
        requests_at_once=round(
            at_once if plan.states is None else min(at_once, plan.states.num_rows), 1
        ),
        lasts="step" if any(layer.lasts == "step" for layer in layers) else "sequence",
    )


def _group_reports(layout: KVLayout, layers: Sequence[LayerKVSpec]) -> tuple[KVGroupReport, ...]:
    """One report for all groups that are alike."""
    counts: Counter[tuple[int, str, int | None, int]] = Counter()
    for group, taken in zip(layout.groups, layout.token_bytes, strict=True):
        kinds = " and ".join(sorted({layers[number].kind for number in group.layers}))
        window = None if group.window is None else most_seen(group.window)
        counts[len(group.layers), kinds, window, taken] += 1
    return tuple(KVGroupReport(count, *key) for key, count in counts.items())


def _step_of_shapes(
    config: Config,
    outline: ServedModel,
    drafts: DraftMemory = NO_MEMORY,
    *,
    is_captured: bool = False,
) -> int:
    short = _shortened(outline) if isinstance(outline, Model) else outline
    gauge = ShapeGauge(outline.spec.device)
    with torch.inference_mode(), gauge:
        compute_largest_step(config, short, None, drafts.largest, is_captured=is_captured)
    # A step that is measured has a pool of one block beside it, of all layers.
    block_size = block_size_of(config.cache, outline.spec.device)
    pools = [lay_out(one.kv_cache_spec(), block_size).bytes_per_block for one in (outline, short)]
    return gauge.peak + pools[0] - pools[1]


def _shortened(outline: Model) -> Model:
    """The outline with at most two layers of each kind.

    What a layer takes is given back before the next one of its kind begins, so more layers do not
    raise the peak of a step. They would take seconds.
    """
    kept: list[LayerConfig] = []
    for layer in outline.config.layers:
        if kept.count(layer) < _LAYERS_OF_A_KIND:
            kept.append(layer)
    config = replace(outline.config, layers=tuple(kept))
    options = replace(outline.options, adapters=None, deterministic=False, outlines_tables=True)
    short = Model(config, family_of(config.architecture).write, options)
    short.cache_dtype = outline.cache_dtype
    return short


def _with(config: Config, section: str, **values: object) -> Config:
    changed = msgspec.structs.replace(getattr(config, section), **values)
    return msgspec.structs.replace(config, **{section: changed})
