"""Plans a checkpoint from its configuration alone: does it fit a device, and how fast can it be?"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from src.core.config import Config
from src.core.errors import ConfigError, ModelLoadError, SlipstreamError
from src.engine.drafters.loading import tokenizer_for
from src.engine.plugins import use_plugins
from src.engine.sizing.advice import advise
from src.engine.sizing.answer import DeviceFacts, ModelPlan
from src.engine.sizing.attempt import Attempt, Setup
from src.engine.sizing.device_table import DeviceDescription, describe_device, kind_of
from src.engine.sizing.speed import Work, decode_speed, prefill_speed, text_speed
from src.engine.sizing.start import refuse_for_device
from src.models import Model, ServedModel, choose_implementation, resolve_model
from src.models.config_file import read_config_file
from src.models.cross_encoders import has_modules
from src.models.sentence_transformers import read_recipe
from src.models.tasks import ModelTasks, find_tasks
from src.text.tokenizer import Tokenizer

# Tokens behind a decoding request, and of a prompt, if no context is asked for.
_USUAL_CONTEXT = 2048
# Tokens of a text that becomes a vector, beside the longest one.
_USUAL_TEXT = 128


@dataclass(frozen=True)
class Question:
    """What is asked beside the settings.

    Attributes
    ----------
    device
        A name of `device_table`; ``None``: as ``device.type`` says.
    context
        Tokens of a request; ``None``: as many as the model is made for, or as fit.
    concurrency
        Requests of so many tokens at once; ``None``: as many as fit.
    tensor_parallel
        Number of ranks.
    """

    device: str | None = None
    context: int | None = None
    concurrency: int | None = None
    tensor_parallel: int = 1


def plan_model(config: Config, question: Question) -> ModelPlan:
    """Plan the model of a configuration. Reads no weights; may measure this machine for a second.

    Raises
    ------
    ConfigError
        The device is not known, or does not have what is asked for.
    ModelLoadError
        There is no such model, or its configuration cannot be served; the message says why.
    """
    config = _asked(config, question)
    # As at a start there, which refuses some kernels.
    use_plugins(config, kind_of(question.device or config.device.type))
    path = resolve_model(config.model.path, config.model.revision, weights=False)
    with _one_error(path):
        implementation = choose_implementation(path, config.model.implementation)
        setup = Setup(
            config,
            path,
            implementation,
            question.tensor_parallel,
            question.concurrency,
            tokenizer_for(config, path),
        )
        outline = setup.outline()
        device = describe_device(
            question.device or config.device.type, outline.spec.dtype, config.device.num_threads
        )
        refuse_for_device(config.model, path, device.kind)
        if question.tensor_parallel > 1 and device.kind == "cpu":
            raise ConfigError("--tensor-parallel is for several GPUs: name one with --device")
        attempt = setup.attempt(device)
        return _answer(setup, attempt, device)


def outline_of(config: Config) -> ServedModel:
    """The configured model on the meta device: a native family's program, without weights.

    Raises
    ------
    ModelLoadError
        There is no such model, its configuration cannot be served, or no native family serves it.
    """
    use_plugins(config, "meta")
    path = resolve_model(config.model.path, config.model.revision, weights=False)
    with _one_error(path):
        return Setup(
            config, path, choose_implementation(path, config.model.implementation)
        ).outline()


def tasks_of(config: Config) -> tuple[Path, ModelTasks]:
    """Where the configured model is, and what it does by its files. Reads no weights.

    Raises
    ------
    ModelLoadError
        As of `outline_of`; or a file asks for what is not supported.
    ConfigError
        ``model.tasks`` names a task that it cannot do.
    """
    outline = outline_of(config)
    path = resolve_model(config.model.path, config.model.revision, weights=False)
    found = find_tasks(
        path,
        outline,
        Tokenizer.from_directory(path, config.chat.template),
        config.model.tasks,
        context=outline.spec.max_positions,
        is_encoder=any(layer.lasts == "step" for layer in outline.kv_cache_spec()),
        cut_vectors=config.model.cut_vectors,
        is_dummy=True,
    )
    return path, found


def _answer(setup: Setup, attempt: Attempt, device: DeviceDescription) -> ModelPlan:
    config, outline = setup.config, attempt.reckoned.outline
    dtype = str(outline.spec.dtype).removeprefix("torch.")
    architecture = _architecture(setup.path)
    plan = ModelPlan(
        model=config.model.path,
        architecture=architecture,
        implementation=outline.implementation,
        dtype=dtype,
        quantization=_format(config, outline),
        tensor_parallel=setup.tensor_parallel,
        device=DeviceFacts(
            device.name, device.kind, device.free, device.bandwidth, dict(device.flops)
        ),
        memory=attempt.report,
        fits=attempt.reason is None,
        concurrency=setup.concurrency,
        reason=attempt.reason,
        advice=() if attempt.reason is None else tuple(advise(setup, attempt, device)),
        decode=(),
        prefill=None,
        notes=tuple(_notes(setup, attempt, device)),
        command=_command(setup, attempt, device),
    )
    return _with_speed(plan, setup, attempt, device)


def _format(config: Config, outline: ServedModel) -> str | None:
    """What weights are rounded to, or how the checkpoint is quantized."""
    own = outline.config.formats if isinstance(outline, Model) else None
    return config.model.quantization if own is None else own.name


def _with_speed(
    plan: ModelPlan, setup: Setup, attempt: Attempt, device: DeviceDescription
) -> ModelPlan:
    """With limits of time; of what fits, or else of what was asked for."""
    plan = _with_texts(plan, setup, attempt, device)
    if plan.reads_only:
        return plan
    config, outline = setup.config, attempt.reckoned.outline
    longest = outline.spec.max_positions if attempt.plan is None else attempt.plan.max_model_len
    context = config.model.max_model_len or min(longest, _USUAL_CONTEXT)
    rows = setup.concurrency
    if rows is None:
        rows = config.scheduler.max_num_seqs
        if attempt.plan is not None:
            kv = attempt.plan.kv
            rows = max(1, min(rows, kv.num_blocks // kv.blocks_held(context)))
    weights = config.model.quantization or plan.dtype
    work = Work(outline)
    speeds = (
        decode_speed(work, device, plan.dtype, weights, count, context)
        for count in sorted({1, rows})
    )
    prefill = prefill_speed(
        work, device, plan.dtype, weights, context, config.scheduler.max_num_batched_tokens
    )
    return msgspec.structs.replace(
        plan, decode=tuple(speed for speed in speeds if speed is not None), prefill=prefill
    )


def _with_texts(
    plan: ModelPlan, setup: Setup, attempt: Attempt, device: DeviceDescription
) -> ModelPlan:
    """With the longest text and limits of time of texts that become vectors, labels or scores."""
    config, outline = setup.config, attempt.reckoned.outline
    reads_only = any(layer.lasts == "step" for layer in outline.kv_cache_spec())
    context = outline.spec.max_positions if attempt.plan is None else attempt.plan.max_model_len
    longest: int | None = context
    if outline.classifier is None:
        try:
            recipe = read_recipe(
                setup.path, size=outline.spec.hidden_size, context=context, is_encoder=reads_only
            )
            longest = recipe.max_tokens
        except ModelLoadError:
            # As at a start: a model that generates is served without vectors.
            if reads_only:
                raise
            longest = None
    if longest is None:
        return plan
    lengths = {min(_USUAL_TEXT, longest), longest if reads_only else min(longest, _USUAL_CONTEXT)}
    work = Work(outline)
    speeds = (
        text_speed(
            work,
            device,
            plan.dtype,
            tokens,
            budget=config.scheduler.max_num_batched_tokens,
            most_rows=config.scheduler.max_num_seqs,
            sees_all=reads_only,
        )
        for tokens in sorted(lengths)
    )
    wish = config.model.tasks
    return msgspec.structs.replace(
        plan,
        texts=tuple(speed for speed in speeds if speed is not None),
        longest_text=longest,
        reads_only=reads_only,
        is_for_texts=reads_only
        or outline.classifier is not None
        or has_modules(setup.path)
        or (wish != "auto" and set(wish) != {"generate"}),
    )


def _asked(config: Config, question: Question) -> Config:
    """The configuration with which a server would do what is asked for."""
    model, scheduler = config.model, config.scheduler
    if question.context is not None:
        model = msgspec.structs.replace(model, max_model_len=question.context)
    if question.concurrency is not None:
        scheduler = msgspec.structs.replace(scheduler, max_num_seqs=question.concurrency)
    return msgspec.structs.replace(config, model=model, scheduler=scheduler)


def _notes(setup: Setup, attempt: Attempt, device: DeviceDescription) -> Iterator[str]:
    if setup.tensor_parallel > 1:
        yield (
            f"a rank of {setup.tensor_parallel} would hold this; serving on several devices is "
            "not available yet"
        )
    if device.kind == "cuda":
        yield "on a GPU the step is reckoned from shapes, and graphs are an estimate"
    section = setup.config.speculation
    if section.method != "off":
        drafts = attempt.choice
        has_weights = bool(attempt.reckoned.drafts.parts)
        takes = "their weights and KV are counted above" if has_weights else "they take logits only"
        if drafts.sources and attempt.report.step:
            takes += ", and the step above has their logits"
        yield f"drafts ({section.method}): {drafts}" + (f"; {takes}" if drafts.sources else "")
        if attempt.left_out:
            yield f"the drafter that the checkpoint brings is not used: {attempt.left_out}"
    plan = attempt.plan
    if plan is not None and plan.max_model_len < attempt.reckoned.outline.spec.max_positions:
        yield (
            f"the context is lowered from {attempt.reckoned.outline.spec.max_positions} to "
            f"{plan.max_model_len} tokens, what KV memory holds"
        )
    outline = attempt.reckoned.outline
    if (
        setup.config.model.quantization
        and isinstance(outline, Model)
        and any(isinstance(outline.weights[n], Tensor) for n in outline.names_of("experts"))
    ):
        yield "weights of experts are not rounded"


def _command(setup: Setup, attempt: Attempt, device: DeviceDescription) -> str | None:
    if attempt.reason is not None or setup.tensor_parallel > 1:
        return None
    model, settings = setup.config.model, []
    if model.max_model_len is not None:
        settings.append(f"model.max_model_len={model.max_model_len}")
    if model.quantization is not None:
        settings.append(f"model.quantization={model.quantization}")
    if setup.concurrency is not None:
        settings.append(f"scheduler.max_num_seqs={setup.concurrency}")
    usual = Config()
    if setup.config.cache.dtype != usual.cache.dtype:
        settings.append(f"cache.dtype={setup.config.cache.dtype}")
    for name in usual.speculation.__struct_fields__:
        value = getattr(setup.config.speculation, name)
        if value != getattr(usual.speculation, name):
            settings.append(f"speculation.{name}={value}")
    sets = "".join(f" --set {shlex.quote(setting)}" for setting in settings)
    return f"python -m src serve --model {shlex.quote(model.path)}{sets}"


def _architecture(path: Path) -> str:
    raw = read_config_file(path)
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(raw.get("model_type"))


@contextlib.contextmanager
def _one_error(path: Path) -> Iterator[None]:
    """Whatever a configuration provokes is one readable error.

    Sizes that no machine has make torch and Python fail in many ways.
    """
    try:
        yield
    except SlipstreamError:
        raise
    except (
        ArithmeticError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ModelLoadError(
            f"{path}: its configuration cannot be planned: {type(error).__name__}: {first}"
        ) from error
