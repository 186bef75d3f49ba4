"""From a model directory to a model that transformers computes, or to the reason against it."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from src.core.errors import ModelLoadError
from src.models.checkpoint import INDEX_FILE, SINGLE_FILE, first_dtype, open_checkpoint
from src.models.config import DTYPE_NAMES, ClassifierConfig
from src.models.fields import Fields, read_json
from src.models.generation import parse_generation
from src.models.generic.body import Body
from src.models.generic.classifiers import (
    ClassifierBody,
    has_head,
    headed_class,
    pooling_of_head,
)
from src.models.generic.encoders import (
    EncoderBody,
    encoder_class,
    is_pretrained,
    is_without_head,
    refuse_biases,
    trial_texts,
    try_out_encoder,
    without_pooler,
)
from src.models.generic.model import TransformersModel
from src.models.generic.passes import IMPLEMENTATION, register
from src.models.generic.pooled import use_pool
from src.models.generic.positions import leave_out_temperature, position_limit
from src.models.generic.trial import try_out
from src.models.heads.head import classifier as classifier_of
from src.models.loading.options import LoadHooks, LoadOptions, Progress
from src.models.model import ModelSpec
from src.models.program import StepInput
from src.models.weights.parameters import allocate
from src.models.weights.quantization_config import method_of, section_of

logger = logging.getLogger(__name__)

# Endings of classes with a head for text; that of a model without a head is its embedding.
_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Decoder")
# Some class's name says for what its head is.
_HAS_PURPOSE = re.compile(r"For[A-Z]")
# What is made of hidden states, and tables that old checkpoints have stored.
_NOT_READ = re.compile(r"(^|\.)(pooler\.|embeddings\.(position_ids|token_type_ids)$)")
# Kinds of layers that keep a state instead of keys and values.
_STATES = ("linear", "mamba", "conv", "recurrent", "ssm", "rwkv", "delta")
_NAMES_SHOWN = 5
# The dtype of which torch has grouped products on CUDA.
_GROUPED = torch.bfloat16
_DEFAULT, _NO_HOOKS = LoadOptions(), LoadHooks()


def load_by_transformers(
    path: Path, options: LoadOptions = _DEFAULT, hooks: LoadHooks = _NO_HOOKS
) -> TransformersModel:
    """Load a checkpoint of a causal language model or an encoder of transformers, and try it out.

    transformers itself fills it: so renamed, fused, split and tied tensors are its business. It
    maps safetensors, and tensor by tensor they are copied to where they stay.

    Parameters
    ----------
    path
        a local directory.
    options
        Those about quantization, and ``deterministic``, are refused unless they ask for nothing.
    hooks
        Of these ``progress`` is called.

    Raises
    ------
    ModelLoadError
        Anything that keeps the checkpoint from being served, naming what.
    """
    raw = read_json(path / "config.json")
    name, device = _name(raw), options.device or torch.device("cpu")
    dtype, max_model_len = options.dtype, options.max_model_len
    refused = {"quantization": options.quantization, "deterministic": options.deterministic}
    for setting, is_asked in refused.items():
        if is_asked:
            raise ModelLoadError(
                f"model.{setting} is for native families; {name} is served by transformers"
            )
    register()
    with _refusals(name):
        kind, config, is_encoder = _described(path, raw)
        longest, bound = position_limit(config.get_text_config())
        _require_length(max_model_len, longest, bound)
        if options.load_format == "dummy":
            module = _drawn(
                kind, config, _dtype(dtype, config, path), options.seed, is_encoder=is_encoder
            )
        else:
            module = _filled(path, kind, config, _dtype(dtype, config, path), is_encoder=is_encoder)
        module = module.to(device).eval().requires_grad_(False)
        leave_out_temperature(module)
        _leave_out_warning(module)
        if device.type != "cpu":
            _warn_of_waiting_experts(name, module)
        if device.type == "cpu":
            _take_in(module, hooks.progress)
            use_pool(module)
        classifier: ClassifierConfig | None = None
        own_inputs: tuple[StepInput, ...] = ()
        body: Body
        with _masks_are_left_alone():
            if is_encoder:
                encoder = ClassifierBody(module) if has_head(kind) else EncoderBody(module)
                body, findings = encoder, try_out_encoder(encoder, device)
                own_inputs = encoder.own_inputs
            else:
                body, findings = try_out(module, device)
        if isinstance(body, ClassifierBody):
            classifier = _classifier(body, raw, path)
        longest -= body.first_position
        _require_length(max_model_len, longest, bound)
    spec = ModelSpec(
        vocab_size=findings.vocab_size,
        hidden_size=findings.hidden_size,
        max_positions=min(longest, max_model_len or longest),
        dtype=module.dtype,
        device=device,
        uncounted_id=body.first_position - 1 if is_encoder and body.first_position else None,
    )
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    told = type(module).__name__, len(findings.calls)
    logger.info("%s is served by transformers (%s, %d calls of attention)", name, *told)
    defaults = parse_generation(raw, generation)
    return TransformersModel(body, findings.calls, spec, defaults, classifier, own_inputs)


def _classifier(body: ClassifierBody, raw: Mapping[str, Any], path: Path) -> ClassifierConfig:
    """What an encoder's head for labels is; its layers are transformers' business."""
    pooling = pooling_of_head(body, trial_texts(body.module, body.module.device))
    fields = Fields(raw, str(path / "config.json"), {})
    found = classifier_of(fields, lambda labels: (), pooling=pooling)
    if len(found.labels) != body.module.config.num_labels:
        raise ModelLoadError(
            f"it has {body.module.config.num_labels} labels, and names for {len(found.labels)}"
        )
    return found


@contextlib.contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Whatever goes wrong within it is a refusal that names the architecture."""
    try:
        yield
    except Exception as error:
        # Most of it is code that is not ours, on a checkpoint that is not either.
        if isinstance(error, ModelLoadError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {str(error).strip()[:500]}"
        raise ModelLoadError(f"transformers cannot serve {name}: {reason}") from error


@contextlib.contextmanager
def _masks_are_left_alone() -> Iterator[None]:
    """Within it, a model that computes with our masks, which have no memory, is refused."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if re.search(r"\bmeta\b", str(error), re.IGNORECASE):
            raise ModelLoadError("it computes with masks itself") from error
        raise


def _require_length(wanted: int | None, longest: int, bound: str) -> None:
    if wanted is not None and wanted > longest:
        raise ModelLoadError(f"max_model_len = {wanted} exceeds {bound}: {longest} tokens")


def _described(path: Path, raw: Mapping[str, Any]) -> tuple[Any, Any, bool]:
    """The class that transformers has for a checkpoint, its configuration; whether it encodes."""
    config = _read_config(path, raw)
    if _name(raw).endswith("EncoderModel") and not is_without_head(_name(raw)):
        # The file may call it an encoder-decoder all the same (sentence-t5's does).
        refuse_biases(config)
        raise ModelLoadError("it is the encoder of an encoder-decoder, which is not served")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError("it is an encoder-decoder")
    headed = headed_class(config, _name(raw))
    encoder = encoder_class(config, raw, _name(raw), headed)
    kind, text = encoder or _class_of(config, raw), config.get_text_config()
    _refuse_states(kind, text)
    if kind.config_class is type(text):
        # Of a model that has images too, the text alone.
        config = text
    config.return_dict = True
    config.output_hidden_states = config.output_attentions = False
    return kind, config, encoder is not None


def _warn_of_waiting_experts(name: str, module: Any) -> None:
    """Say so if torch computes this model's experts one by one, and the host waits for each layer.

    On CUDA torch has grouped products for bfloat16 alone. In other dtypes it reads on the host how
    many tokens each expert has, which also keeps steps from being captured.
    """
    grouped = getattr(module.config, "_experts_implementation", None) == "grouped_mm"
    if grouped and type(module)._can_set_experts_implementation() and module.dtype != _GROUPED:
        logger.warning(
            "%s has experts and is served by transformers in %s: every layer waits for the device, "
            "and no step becomes a CUDA graph; model.dtype = bfloat16 avoids both",
            *(name, str(module.dtype).removeprefix("torch.")),
        )


def _name(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else f"{raw.get('model_type')}"


def _read_config(path: Path, raw: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if raw.get("model_type") not in CONFIG_MAPPING:
        unknown = f"model_type {raw.get('model_type')!r} is not known"
        if raw.get("auto_map"):
            unknown += ", and code from the checkpoint (auto_map) is refused"
        raise ModelLoadError(unknown)
    if raw.get("transformers_weights"):
        raise ModelLoadError("transformers_weights is not supported")
    if found := section_of(raw, path):
        raise ModelLoadError(
            f"{found[0]} ({method_of(found[1])}) is for native families; use the unquantized "
            "checkpoint"
        )
    return AutoConfig.from_pretrained(
        str(path),
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation=IMPLEMENTATION,
    )


def _class_of(config: Any, raw: Mapping[str, Any]) -> Any:
    """The class that transformers has for the checkpoint."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"model_type {config.model_type!r} is not among its causal language models"
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind, name = kind[0] if isinstance(kind, tuple) else kind, _name(raw)
    if raw.get("architectures") and not name.endswith(_DECODERS) and not is_without_head(name):
        if _HAS_PURPOSE.search(name):
            raise ModelLoadError(f"its head is not served; {kind.__name__} is")
        raise ModelLoadError(f"{name} is not a causal language model")
    return kind


def _refuse_states(kind: Any, text: Any) -> None:
    if not text.sub_configs and not kind._can_set_attn_implementation():
        raise ModelLoadError(f"{kind.__name__} does not use the attention interface")
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    if states := {one for one in kinds if any(state in str(one) for state in _STATES)}:
        raise ModelLoadError(f"layers of the kind {', '.join(sorted(states))} keep a state")
    if kind._is_stateful and not kinds:
        raise ModelLoadError("its layers keep a recurrent state")


def _dtype(name: str, config: Any, path: Path) -> torch.dtype:
    own = getattr(config.get_text_config(), "dtype", None) or first_dtype(path) or torch.float32
    chosen = str(own).removeprefix("torch.") if name == "auto" else name
    if chosen not in DTYPE_NAMES:
        raise ModelLoadError(f"dtype must be auto or one of {', '.join(DTYPE_NAMES)}, got {chosen}")
    dtype: torch.dtype = getattr(torch, chosen)
    return dtype


def _drawn(kind: Any, config: Any, dtype: torch.dtype, seed: int, *, is_encoder: bool) -> Any:
    """With weights as transformers draws them for training."""
    options = without_pooler(kind) if is_encoder else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind._from_config(config, dtype=dtype, **options)


def _filled(path: Path, kind: Any, config: Any, dtype: torch.dtype, *, is_encoder: bool) -> Any:
    """With the checkpoint's weights.

    Raises
    ------
    ModelLoadError
        It has pickles alone, a damaged file, or not every tensor.
    """
    from safetensors import SafetensorError  # native families need no such library

    _check_files(path)
    try:
        with _without_progress():
            module, told = kind.from_pretrained(
                str(path),
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **(without_pooler(kind) if is_encoder else {}),
            )
    except SafetensorError as error:
        raise ModelLoadError(f"{path}: its weights cannot be read: {error}") from error
    # What a class of encoders makes of hidden states is not used.
    unused = "pooler." if is_encoder else ()
    if missing := sorted(name for name in told["missing_keys"] if not name.startswith(unused)):
        raise ModelLoadError(f"{path} lacks tensors: {_listed(missing)}")
    unexpected = sorted(told["unexpected_keys"])
    if is_encoder:
        # A head for masked tokens is not read.
        names = getattr(config, "architectures", None) or [""]
        has_head_for_text = is_pretrained(str(names[0]))
        unexpected = [n for n in unexpected if not (has_head_for_text or _NOT_READ.search(n))]
    if unexpected:
        logger.warning("%s has tensors that nothing reads: %s", path, _listed(unexpected))
    return module


def _check_files(path: Path) -> None:
    """Refuse whatever else than safetensors of this directory would be read."""
    if (path / "adapter_config.json").exists():
        raise ModelLoadError("adapter_config.json: adapters are not supported")
    index = path / INDEX_FILE
    if (path / SINGLE_FILE).exists():
        return
    if not index.exists():
        open_checkpoint(path)
    for file in set(map(str, dict(read_json(index).get("weight_map") or {}).values())):
        if Path(file).name != file:
            raise ModelLoadError(f"{index}: {file!r} is not the name of a file next to the index")


def _leave_out_warning(module: Any) -> None:
    """Switch off a warning about padding, for which some models read a token in every pass.

    The device would be waited for, and the step could not be captured.
    """
    for part in module.modules():
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            part.warn_if_padding_and_no_attention_mask = lambda *_: None


def _take_in(module: Any, progress: Progress | None) -> None:
    """Move weights to memory of their own, tensor by tensor: here is where files are read.

    transformers leaves them in mapped files, where whoever writes over a file changes them.
    """
    for table in module.buffers():
        table.data = table.data.clone()
    parameters = list(module.parameters())
    total, done = sum(one.nbytes for one in parameters), 0
    for one in parameters:
        own = allocate(one.shape, one.dtype, one.device)
        own.copy_(one.data)
        one.data = own
        done += one.nbytes
        if progress is not None:
            progress(done, total)


@contextlib.contextmanager
def _without_progress() -> Iterator[None]:
    """Bars are not for a server's log."""
    from transformers.utils import logging as told

    was_enabled = told.is_progress_bar_enabled()
    told.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            told.enable_progress_bar()


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
