"""Builds an engine's parts from a configuration. Blocks, so it runs in a worker thread."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from src.compile import use_artifact_cache
from src.compile.graphs import CaptureBackend
from src.compile.graphs.cuda import CudaCapture
from src.core.config import GIB, Config
from src.core.cpus import usable_cpus
from src.core.embedding import EmbeddingRecipe
from src.core.errors import ConfigError
from src.core.memory_report import MemoryReport
from src.core.sampler_parameters import SAMPLER_PARAMETERS
from src.core.start_timeline import StartTimeline
from src.core.status import STARTUP_PHASES, ModelInfo, StepInputShape, served_names
from src.engine.devices import give_back_memory, open_device
from src.engine.drafters.loading import load_drafts, taps_for, tell_left_out
from src.engine.drafters.source import NO_MEMORY, DraftMemory, DraftPlace, DraftSource
from src.engine.execution.attention_choice import choose_attention, require_attention
from src.engine.execution.cache_dtype import set_cache_dtype
from src.engine.execution.compilation import HEAD_START, ProgramCompilation
from src.engine.execution.forward_pass import Code, WorkerClosedError
from src.engine.execution.graphs import DraftsNotCapturedError, GraphPlan, bounds_of
from src.engine.execution.kv_cache import (
    KVCachePlan,
    allocate_kv_cache,
    block_size_of,
    free_memory,
)
from src.engine.execution.memory_profile import most_tokens
from src.engine.execution.profiler import StepProfiler
from src.engine.execution.row_state import RowState
from src.engine.execution.warm_up import warm_up_tokens
from src.engine.execution.worker import Worker
from src.engine.grammar.compiler import GrammarCompiler
from src.engine.plugins import use_plugins
from src.engine.requests.adapter_loading import load_adapters, room_for_adapters
from src.engine.requests.adapters import Adapters
from src.engine.requests.embedder import Embedder
from src.engine.requests.pairs import PairBuilder
from src.engine.requests.prompts import RequestBuilder
from src.engine.sampling import Sampler, SamplingState
from src.engine.sampling.processors import Processors
from src.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from src.engine.sizing.start import (
    MemoryPlan,
    measure_memory,
    refuse_for_device,
    why_left_out,
)
from src.engine.speculation.choice import Traits, choose_speculation
from src.engine.speculation.device_check import why_not
from src.engine.telemetry.plan_log import PlanLog, RecordingScheduler
from src.models import (
    Implementation,
    Model,
    ServedModel,
    choose_implementation,
    outline_model,
    resolve_model,
)
from src.models.adapters.memory import AdapterRoom
from src.models.generic.model import TransformersModel
from src.models.loading.options import LoadHooks, LoadOptions
from src.models.tasks import ModelTasks, describe_scoring, find_tasks
from src.ops.build.cache_root import cache_root
from src.ops.build.kernels import (
    ensure_built,
    is_compiling,
    kernel_library,
    kernel_status,
    multiplies_bytes,
    takes_strips,
)
from src.ops.declaration import Backend
from src.ops.matrix import Tiling
from src.ops.projections.projection import Projection
from src.text import Tokenizer
from src.text.template_pool import TemplatePools

logger = logging.getLogger(__name__)

# (phase, progress of the whole start from 0 to 1, one readable line); called from any thread
Report = Callable[[str, float, str], None]


@dataclass(frozen=True)
class EngineParts:
    """Everything that the event loop drives."""

    tokenizer: Tokenizer
    info: ModelInfo
    builder: RequestBuilder
    embedder: Embedder | None
    # Tokenizes the texts whose labels or scores the model gives.
    labeller: Embedder | None
    pairs: PairBuilder | None
    grammars: GrammarCompiler
    scheduler: Scheduler
    worker: Worker
    adapters: Adapters
    kv_plan: KVCachePlan
    memory: MemoryReport
    # Name of the attention backend.
    attention: str
    plan_log: PlanLog | None
    profiler: StepProfiler
    compilation: ProgramCompilation | None
    # Closes the parts, the last one first.
    ends: contextlib.ExitStack

    def close(self) -> None:
        """Stop compilers and the device's threads, end the plan log, free all memory. Blocks."""
        self.ends.close()
        give_back_memory(self.info.device_type)


def build_engine(config: Config, report: Report, timeline: StartTimeline) -> EngineParts:
    """Load the checkpoint, size KV memory, compile.

    Parameters
    ----------
    timeline
        Records work that runs beside the phases of ``report``, and after the start has ended.

    Raises
    ------
    ModelLoadError, ConfigError
        With one readable reason.
    """
    report("configuration", STARTUP_PHASES["configuration"], f"reading {config.model.path}")
    device = resolve_device(config.device.type)
    require_attention(config.device, device)
    processors = use_plugins(config, device.type)
    use_artifact_cache(cache_root())
    keeping: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if config.model.deterministic:
        timeline.begin("kernels")
        keeping = _require_deterministic(device)
        timeline.end("kernels")
    else:
        # Until the kernels are built, references are used. On a GPU the library is needed as well:
        # the HTTP server sends with it.
        ensure_built(wait=False, head_start=0.0 if _awaits_code(config) else HEAD_START)
    path = resolve_model(
        config.model.path, config.model.revision, weights=config.model.load_format != "dummy"
    )
    refuse_for_device(config.model, path, device.type)
    implementation = choose_implementation(path, config.model.implementation)
    taps = taps_for(config, path)
    # Read only once, because the kernels in use may change during the start.
    in_strips = takes_strips()
    # The default is to round where that makes kernels faster and the model is bfloat16.
    rounds_inputs = config.model.quantize_activations
    if device.type != "cpu" or (rounds_inputs is None and not multiplies_bytes()):
        rounds_inputs = False
    # A failed start must leave no thread, no process and no open file behind.
    with contextlib.ExitStack() as ends:
        # The last to end: every step before has the same bits.
        ends.enter_context(keeping)
        templates = ends.enter_context(TemplatePools())
        compilation = None
        if config.compile.is_on and implementation.is_program:
            compilation = _begin_compilation(
                config, path, device, timeline, rounds_inputs, taps, in_strips=in_strips
            )
            ends.callback(compilation.close)
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as beside:
            reading = beside.submit(Tokenizer.from_directory, path, config.chat.template)

            def report_both(phase: str, progress: float, line: str) -> None:
                if reading.done():
                    reading.result()  # Weights need not be read if there is no tokenizer.
                report(phase, progress, line)

            model = _load_model(
                config, report_both, path, implementation, device, rounds_inputs, taps, compilation
            )
        tokenizer = reading.result()
        set_cache_dtype(config.cache, model)
        if unknown := tokenizer.fit_model(model.spec.vocab_size):
            logger.warning(
                "the tokenizer has tokens that the model does not have, %d to %d: requests whose "
                "text has one are refused",
                unknown[0],
                unknown[-1],
            )
        tokenizer.render_in(templates)
        return _build_parts(
            config, report, timeline, path, tokenizer, model, compilation, processors, ends
        )


def _begin_compilation(
    config: Config,
    path: Path,
    device: torch.device,
    timeline: StartTimeline,
    rounds_inputs: bool | None,
    taps: tuple[int, ...],
    *,
    in_strips: bool,
) -> ProgramCompilation:
    """Begin compiling from the weights' shapes, while the weights are read."""
    scheduler, graphs = config.scheduler, config.compile.cuda_graph_max_tokens
    most = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, graphs)
    if device.type != "cpu":
        return ProgramCompilation(
            None, 1, cache_root(), timeline, awaited=_awaits_code(config), most_tokens=most
        )
    options = LoadOptions.of(config, rounds_inputs, AdapterRoom.of(config.lora))
    outline = outline_model(path, replace(options, taps=taps))
    num_threads = config.device.num_threads or usable_cpus()
    return ProgramCompilation(
        outline,
        num_threads,
        cache_root(),
        timeline,
        awaited=_awaits_code(config),
        most_tokens=max(most, most_tokens(config, outline)),
        in_strips=in_strips and config.model.quantization is None,
    )


def _awaits_code(config: Config) -> bool:
    # Eager and compiled code round differently, so a deterministic engine must not switch.
    return config.compile.startup == "wait" or config.model.deterministic


def _require_deterministic(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Returns the context within which kernels keep one way."""
    if device.type != "cpu":
        raise ConfigError(
            f"model.deterministic = true is for the CPU, the device is {device.type}: the order in "
            "which its matrix products are summed depends on the size of the batch"
        )
    if ensure_built(wait=True) == "reference":
        raise ConfigError(
            "model.deterministic = true needs the compiled CPU kernels, which could not be built "
            "(see the log)"
        )
    library = kernel_library()
    assert library is not None
    return library.ways.keeping_one()


@contextlib.contextmanager
def _room_for_compilers() -> Iterator[Callable[[], None]]:
    """Yields a function that limits torch to one thread here while compilers use the CPUs.

    Otherwise all threads of a team would wait for the one that has lost its CPU: rounding 0.35
    billion weights to int8 took 21 s on two CPUs instead of 4.
    """
    threads = torch.get_num_threads()

    def make_room() -> None:
        wanted = 1 if is_compiling() else threads
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

    try:
        yield make_room
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _load_model(
    config: Config,
    report: Report,
    path: Path,
    implementation: Implementation,
    device: torch.device,
    rounds_inputs: bool | None,
    taps: tuple[int, ...],
    compilation: ProgramCompilation | None,
) -> ServedModel:
    def when_allocated(model: Model) -> None:
        # Only if nobody is served before: this compiler and Triton's share the interpreter, so
        # the first requests would take three times as long while the cache is empty.
        if compilation is not None and device.type != "cpu" and _awaits_code(config):
            compilation.begin_just_in_time(model)

    report("weights", STARTUP_PHASES["weights"], f"loading {config.model.path}")
    room = room_for_adapters(config.lora, implementation)
    with _room_for_compilers() as make_room:
        hooks = LoadHooks(
            progress=_weights_progress(report),
            before_each_matrix=make_room,
            when_allocated=when_allocated,
        )
        options = replace(LoadOptions.of(config, rounds_inputs, room), device=device, taps=taps)
        model = implementation.load(path, options, hooks)
    if isinstance(model, TransformersModel) and device.type != "cpu" and config.compile.is_on:
        model.compile_layers()
    if compilation is not None:
        # Memory must not be measured while it compiles.
        compilation.wait_just_in_time(model if isinstance(model, Model) else None)
    if config.model.quantization is not None and isinstance(model, Model):
        experts = [model.weights[name] for name in model.names_of("experts")]
        matrices = [w.matrix for w in model.weights.values() if isinstance(w, Projection)]
        logger.info(
            "weights rounded to %s, inputs to 8 bits in %d of %d projections",
            config.model.quantization,
            sum(matrix.tiling is Tiling.TILES for matrix in matrices),
            len(matrices),
        )
        if left := sum(each.nbytes for each in experts if isinstance(each, torch.Tensor)):
            logger.warning(
                "weights of experts are not rounded: %.2f GiB stay in %s",
                left / GIB,
                str(model.spec.dtype).removeprefix("torch."),
            )
    return model


def _build_parts(
    config: Config,
    report: Report,
    timeline: StartTimeline,
    path: Path,
    tokenizer: Tokenizer,
    model: ServedModel,
    compilation: ProgramCompilation | None,
    processors: Processors,
    ends: contextlib.ExitStack,
) -> EngineParts:
    device = model.spec.device
    # Chosen before anything is measured or captured, because both use it.
    attention, described = None, None
    if device.type == "cuda":
        block_size = block_size_of(config.cache, device)
        attention, described = choose_attention(config.device, model, block_size)
    plan_log = None
    if config.observability.plan_log is not None:
        plan_log = PlanLog(config.observability.plan_log)
        ends.callback(plan_log.close)
    tasks = _tasks(config, path, model, tokenizer)
    report("kv_cache", STARTUP_PHASES["kv_cache"], "allocating KV memory")
    worker, memory = _build_runner(config, model, tokenizer, attention, processors, tasks, ends)
    tasks = tasks.within(memory.max_model_len)
    if compilation is not None:
        # Registered again, so that it is closed before the worker that it swaps code into.
        ends.callback(compilation.close)
    if device.type != "cpu":
        report("kernels", STARTUP_PHASES["kernels"], "compiling kernels")
        worker.code.warm_up(warm_up_tokens(model, config.scheduler.max_num_batched_tokens))
    _settle_code(config, report, timeline, worker, model, compilation, memory.graphs)
    worker.idle.begin()
    info = _model_info(config, model, device, memory.max_model_len, tasks)
    end_ids = _end_token_ids(model, tokenizer)
    grammars = GrammarCompiler(tokenizer, info.vocab_size, end_ids, config.structured_output)
    ends.callback(grammars.close)
    builder = RequestBuilder(
        tokenizer,
        info,
        end_ids,
        grammars,
        config.limits,
        processors,
        uses_predictions=worker.uses_predictions,
    )
    ends.callback(builder.close)
    return EngineParts(
        tokenizer=tokenizer,
        info=info,
        builder=builder,
        embedder=None if info.embedding is None else Embedder(info.embedding, tokenizer, builder),
        labeller=_labeller(info, tokenizer, builder),
        pairs=None if info.scoring is None else PairBuilder(info.scoring, tokenizer, builder),
        grammars=grammars,
        scheduler=_scheduler(_limits(config, model, worker, memory), plan_log),
        worker=worker,
        adapters=load_adapters(config.lora, model, worker, info.served_names),
        kv_plan=memory.kv,
        memory=memory.report,
        attention=described or kernel_status(),
        plan_log=plan_log,
        profiler=StepProfiler(worker.call),
        compilation=compilation,
        ends=ends.pop_all(),
    )


def _scheduler(limits: SchedulerLimits, plan_log: PlanLog | None) -> Scheduler:
    return Scheduler(limits) if plan_log is None else RecordingScheduler(limits, plan_log)


def _limits(
    config: Config, model: ServedModel, worker: Worker, memory: MemoryPlan
) -> SchedulerLimits:
    drafts = config.speculation.num_speculative_tokens if worker.draft_counts is not None else 0
    return SchedulerLimits.of(
        config,
        device_type=model.spec.device.type,
        block_size=memory.kv.block_size,
        num_blocks=memory.kv.num_blocks,
        windows=memory.kv.windows,
        max_num_seqs=memory.kv.num_rows(config.scheduler.max_num_seqs),
        num_snapshots=None if memory.kv.states is None else memory.kv.states.num_snapshots,
        num_adapter_slots=config.lora.num_slots,
        content_key=_content_key(config, model),
        max_model_len=memory.max_model_len,
        whole_prompts=_is_encoder(model),
        max_drafts=drafts,
        looks_first=worker.looks_first,
    )


def _build_runner(
    config: Config,
    model: ServedModel,
    tokenizer: Tokenizer,
    attention: Backend | None,
    processors: Processors,
    tasks: ModelTasks,
    ends: contextlib.ExitStack,
) -> tuple[Worker, MemoryPlan]:
    """The worker, and how its memory is shared out."""
    device = model.spec.device
    max_num_seqs = config.scheduler.max_num_seqs
    step_device = open_device(device)
    ends.callback(step_device.close)
    bounds = bounds_of(config, model)
    reason = None if bounds is None else why_not(bounds, device)

    def measured(config: Config, drafts: DraftMemory) -> MemoryPlan:
        backend = capture_backend(device)
        return measure_memory(config, step_device, model, backend, attention, drafts)

    if reason is None:
        try:
            memory, drafts = _with_drafts(config, model, tokenizer, partial(measured, config))
        except DraftsNotCapturedError as error:
            reason = str(error)
    if reason is not None:
        config = _without_drafts(config, reason)
        memory, drafts = measured(config, NO_MEMORY), None
    own = model.kv_cache_spec()
    further = () if drafts is None else drafts.memory.layers
    kv_cache = allocate_kv_cache((*own, *further), memory.kv, device)
    max_num_seqs = memory.kv.num_rows(max_num_seqs)
    rows = RowState(
        max_num_seqs=max_num_seqs,
        max_model_len=memory.max_model_len,
        block_size=memory.kv.block_size,
        device=device,
        page_blocks=kv_cache.layout.page_blocks,
        own_inputs=model.own_inputs,
    )
    sampler = Sampler(SamplingState(max_num_seqs, model.spec.vocab_size, device, processors))
    drafter = None
    if drafts is not None:
        its_layers = kv_cache.part(len(own), len(further))
        drafter = drafts.drafter(DraftPlace(rows, sampler, its_layers))
    speculation = choose_speculation(
        config.speculation,
        Traits.of(config, model, further),
        num_backups=0 if memory.kv.states is None else memory.kv.states.num_backups,
        drafter=drafter,
    )
    worker = Worker(
        step_device,
        model,
        Code.eager(model),
        kv_cache.part(0, len(own)),
        rows,
        sampler,
        num_threads=config.device.num_threads or usable_cpus(),
        attention=attention,
        speculation=speculation,
        score_tokens=None if tasks.scoring is None else tasks.scoring.tokens,
        vector_modules=tasks.modules,
    )
    ends.callback(worker.close)
    return worker, memory


def _with_drafts(
    config: Config,
    model: ServedModel,
    tokenizer: Tokenizer,
    measured: Callable[[DraftMemory], MemoryPlan],
) -> tuple[MemoryPlan, DraftSource | None]:
    """Memory, and the drafter that has weights, unless nobody asked for it and it does not fit."""
    section, free = config.speculation, free_memory(model.spec.device)
    drafts = load_drafts(config, model, tokenizer, free=free)
    if drafts is None:
        return measured(NO_MEMORY), None
    try:
        memory = measured(drafts.memory)
        reason = why_left_out(section, memory)
        if reason is None:
            return memory, drafts
    except ConfigError as error:
        reason = why_left_out(section, str(error))
        if reason is None:
            raise
    tell_left_out("mtp", reason)
    # Memory is measured without its weights.
    drafts = None
    gc.collect()
    return measured(NO_MEMORY), None


def _without_drafts(config: Config, reason: str) -> Config:
    """The configuration of an engine whose device cannot make drafts after all."""
    logger.warning("speculation is off: %s", reason)
    return msgspec.structs.replace(
        config, speculation=msgspec.structs.replace(config.speculation, method="off")
    )


def _settle_code(
    config: Config,
    report: Report,
    timeline: StartTimeline,
    worker: Worker,
    model: ServedModel,
    compilation: ProgramCompilation | None,
    graph_plan: GraphPlan | None,
) -> None:
    """Compile and capture, either now or in the background, as the configuration says."""

    def capture() -> None:
        if graph_plan is not None:
            everything = config.compile.cuda_graphs == "wait"
            timeline.begin("capture")
            with contextlib.suppress(WorkerClosedError):
                worker.code.capture_graphs(
                    graph_plan.backend, graph_plan.ladder, everything=everything
                )
                timeline.end("capture")

    if compilation is not None:
        assert isinstance(model, Model), "only a program is compiled"
        if not _awaits_code(config):
            # Graphs are captured after the swap: graphs of replaced code would be useless.
            compilation.finish_in_background(worker, model, capture)
            return
        report("compile", STARTUP_PHASES["compile"], "compiling")
        compilation.finish(worker, model)
    if graph_plan is not None:
        report("capture", STARTUP_PHASES["capture"], "capturing steps")
    capture()


def capture_backend(device: torch.device) -> CaptureBackend | None:
    """The capture backend of ``device``; ``None`` if it cannot capture."""
    return CudaCapture(device) if device.type == "cuda" else None


def resolve_device(name: str) -> torch.device:
    """The device of ``auto``, ``cpu`` or ``cuda``.

    Raises
    ------
    ConfigError
        CUDA was asked for and is not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device.type = cuda, but torch sees no CUDA device")
    return torch.device(name)


def _weights_progress(report: Report) -> Callable[[int, int], None]:
    start, end = STARTUP_PHASES["weights"], STARTUP_PHASES["kv_cache"]

    def progress(done: int, total: int) -> None:
        fraction = done / total if total else 1.0
        report("weights", start + (end - start) * fraction, f"weights {100 * fraction:.0f} %")

    return progress


def _content_key(config: Config, model: ServedModel) -> str:
    """Identifies everything that the KV of equal tokens depends on: weights and rounding."""
    section = config.model
    weights = (section.path, section.revision, section.load_format, section.seed)
    rounding = (model.spec.dtype, section.quantization, section.quantization_group_size)
    return repr(
        (*weights, *rounding, section.quantize_activations, model.implementation, model.cache_dtype)
    )


def _tasks(config: Config, path: Path, model: ServedModel, tokenizer: Tokenizer) -> ModelTasks:
    """What the model does; the log says how two texts get a score."""
    tasks = find_tasks(
        path,
        model,
        tokenizer,
        config.model.tasks,
        context=model.spec.max_positions,
        is_encoder=_is_encoder(model),
        cut_vectors=config.model.cut_vectors,
        is_dummy=config.model.load_format == "dummy",
    )
    if tasks.scoring is not None and "score" in tasks.tasks:
        logger.info("%s", describe_scoring(tasks.scoring, tasks.embedding))
        if tasks.scoring.joins in ("template", "built_in"):
            # Not at the first request that needs it: all others would stand still.
            tokenizer.prepare_quoting()
    return tasks


def _labeller(info: ModelInfo, tokenizer: Tokenizer, builder: RequestBuilder) -> Embedder | None:
    """What tokenizes the texts whose labels or scores the model gives."""
    recipe = info.labels or info.scoring
    if recipe is None:
        return None
    plain = EmbeddingRecipe(
        pooling=recipe.pooling, size=1, token_size=1, max_tokens=recipe.max_tokens
    )
    return Embedder(plain, tokenizer, builder)


def _is_encoder(model: ServedModel) -> bool:
    """Whether tokens see later ones, so that texts are computed as a whole."""
    return any(layer.lasts == "step" for layer in model.kv_cache_spec())


def _model_info(
    config: Config,
    model: ServedModel,
    device: torch.device,
    max_model_len: int,
    tasks: ModelTasks,
) -> ModelInfo:
    names = served_names(config.model)
    return ModelInfo(
        name=names[0],
        served_names=names,
        max_model_len=max_model_len,
        vocab_size=model.spec.vocab_size,
        dtype=str(model.spec.dtype).removeprefix("torch."),
        implementation=model.implementation,
        device_type=device.type,
        created=int(time.time()),
        default_sampling=_default_sampling(model),
        default_max_tokens=model.generation.max_new_tokens,
        step_inputs=tuple(
            StepInputShape(
                each.tensor.name, each.tensor.shape, each.is_integer, each.beyond, each.below
            )
            for each in model.own_inputs
        ),
        tasks=tasks.tasks,
        embedding=tasks.embedding,
        labels=tasks.labels,
        scoring=tasks.scoring,
        uncounted_id=model.spec.uncounted_id,
    )


def _default_sampling(model: ServedModel) -> dict[str, Any]:
    generation = model.generation
    if generation.do_sample is not False:
        return dict(generation.sampling)
    # What also changes a greedy choice is heeded.
    greedy = {each.name for each in SAMPLER_PARAMETERS if each.changes_greedy}
    heeded = {name: value for name, value in generation.sampling.items() if name in greedy}
    return {"temperature": 0.0, **heeded}


def _end_token_ids(model: ServedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = model.generation.eos_token_ids
    if ids:
        return ids
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
