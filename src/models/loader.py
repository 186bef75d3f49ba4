"""From a model directory to a `Decoder` whose parameters are filled."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from src.core.cpus import usable_cpus
from src.core.errors import ModelLoadError
from src.models.checkpoint import StoredTensor, TensorReader, equal_contents, open_checkpoint
from src.models.config import DTYPE_NAMES, ModelConfig
from src.models.decoder import Decoder
from src.models.dummy import fill_dummy
from src.models.quantization import Method
from src.models.registry import family_of, load_config

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[int, int], None]  # (bytes done, bytes in all), from any thread, one at a time

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Buffers that older checkpoints saved and that are computed here.
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
_NAMES_SHOWN = 4


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    device: torch.device | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    max_model_len: int | None = None,
    quantization: Method | None = None,
    group_size: int = 32,
    rounds_inputs: bool | None = False,
    deterministic: bool = False,
    before_each_matrix: Callable[[], None] = lambda: None,
    when_allocated: Callable[[Decoder], None] = lambda decoder: None,
) -> Decoder:
    """Build the model of a directory and fill its parameters.

    Args:
        path: a local directory in Hugging Face layout (see `hub.resolve_model`).
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the checkpoint's own.
        device: where parameters live; the CPU if None.
        load_format: `dummy` fills parameters from `seed` and reads nothing but `config.json`.
        seed: of dummy weights.
        progress: told the bytes read and the bytes in all; without it, a bar is shown if standard
            error is a terminal.
        max_model_len: longest sequence in tokens; None is what the model is made for.
        quantization: of the projections' weights once they are read, see `Decoder.quantize`.
        group_size: of `int4`.
        rounds_inputs: whether quantized projections round their inputs too, see the same; None:
            if the model is bfloat16.
        deterministic: whether a token's bits may depend on nothing but its sequence.
        before_each_matrix: called before each is quantized.
        when_allocated: called once there is room for all parameters, and none has a value.

    Raises:
        ModelLoadError: anything that keeps the checkpoint from being served, naming what.
    """
    config = load_config(path)
    device = device or torch.device("cpu")
    family, torch_dtype = family_of(config.architecture), resolve_dtype(dtype, config)
    stored = open_checkpoint(path) if load_format != "dummy" else {}
    if config.tie_word_embeddings and _head_differs(stored):
        # As the reference does: a head that was trained apart is not tied, whatever the flag says.
        config = replace(config, tie_word_embeddings=False)
    elif config.tie_word_embeddings and _EMBEDDING not in stored and _HEAD in stored:
        # Who stores what is shared once may have kept the other name.
        stored[_EMBEDDING] = stored[_HEAD]
    positions = resolve_max_positions(max_model_len, config)
    decoder = family(
        config,
        dtype=torch_dtype,
        device=device,
        max_positions=positions,
        deterministic=deterministic,
    )
    when_allocated(decoder)
    if load_format == "dummy":
        fill_dummy(decoder.parameters(), seed)
    else:
        destinations = decoder.checkpoint_tensors()
        check_tensors(path, stored, destinations, tied=config.tie_word_embeddings)
        with _Reporter(sum(stored[name].size for name in destinations), progress) as report:
            read_all([(stored[name], view) for name, view in destinations.items()], report)
        # The views keep the originals alive.
        del destinations
    if quantization is not None:
        decoder.quantize(
            quantization,
            group_size,
            before_each_matrix,
            rounds_inputs=_rounds_inputs(rounds_inputs, torch_dtype),
        )
    return decoder


def outline_model(
    path: Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    quantization: Method | None = None,
    group_size: int = 32,
    rounds_inputs: bool | None = False,
    deterministic: bool = False,
) -> Decoder:
    """The model that `load_model` gives, on the meta device: every shape and no value.

    Reads nothing but `config.json`. Arguments are those of `load_model`.

    Raises:
        ModelLoadError: as `load_model` does of a configuration.
    """
    config = load_config(path)
    torch_dtype = resolve_dtype(dtype, config)
    decoder = family_of(config.architecture)(
        config,
        dtype=torch_dtype,
        device=torch.device("meta"),
        max_positions=resolve_max_positions(max_model_len, config),
        deterministic=deterministic,
    )
    if quantization is not None:
        decoder.quantize(
            quantization, group_size, rounds_inputs=_rounds_inputs(rounds_inputs, torch_dtype)
        )
    return decoder


def _rounds_inputs(wish: bool | None, dtype: torch.dtype) -> bool:
    # Who asks for float32 wants more digits than these.
    return dtype == torch.bfloat16 if wish is None else wish


def resolve_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """The torch dtype of `auto` (the checkpoint's own) or of a name.

    Raises:
        ModelLoadError: the name, or the checkpoint's own dtype, is not supported.
    """
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPE_NAMES:
        raise ModelLoadError(f"dtype must be auto or one of {', '.join(DTYPE_NAMES)}, got {name!r}")
    resolved: torch.dtype = getattr(torch, name)
    return resolved


def resolve_max_positions(max_model_len: int | None, config: ModelConfig) -> int:
    """The longest sequence, in tokens, that the model will see.

    Raises:
        ModelLoadError: more than its position encoding allows.
    """
    if max_model_len is None:
        return config.max_positions
    limit = config.rope.limit(config.max_position_embeddings)
    if not 1 <= max_model_len <= limit:
        raise ModelLoadError(
            f"max_model_len must be from 1 to {limit} for this model "
            f"(max_position_embeddings={config.max_position_embeddings}, "
            f"rope type {config.rope.rope_type}), got {max_model_len}"
        )
    return max_model_len


def check_tensors(
    path: Path,
    stored: dict[str, StoredTensor],
    destinations: dict[str, torch.Tensor],
    *,
    tied: bool,
) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's.

    Raises:
        ModelLoadError: naming the missing, unexpected or mis-shaped tensors.
    """
    passed_over = {name for name in stored if _HARMLESS.search(name)} | ({_HEAD} if tied else set())
    faults = []
    if missing := [name for name in destinations if name not in stored]:
        faults.append("missing: " + _listed(missing))
    if unexpected := [n for n in stored if n not in destinations and n not in passed_over]:
        faults.append("unexpected: " + _listed(unexpected))
    mis_shaped = [
        f"{name} (expected {list(view.shape)}, got {list(stored[name].shape)})"
        for name, view in destinations.items()
        if name in stored and stored[name].shape != tuple(view.shape)
    ]
    if mis_shaped:
        faults.append("mis-shaped: " + _listed(mis_shaped))
    if faults:
        raise ModelLoadError(f"{path} does not fit its config.json; tensors {'; '.join(faults)}")


def read_all(
    pairs: Iterable[tuple[StoredTensor, torch.Tensor]], on_bytes: Callable[[int], None]
) -> None:
    """Read tensors into place on a few threads, in the order in which the files hold them.

    Raises:
        ModelLoadError: the first failure; the other threads stop at their next piece.
    """
    stop, local = threading.Event(), threading.local()

    def checked(count: int) -> None:
        if stop.is_set():
            raise ModelLoadError("stopped, since another tensor could not be read")
        on_bytes(count)

    def read(stored: StoredTensor, destination: torch.Tensor) -> None:
        if not hasattr(local, "reader"):
            local.reader = TensorReader(checked)
        local.reader.read(stored, destination)

    ordered = sorted(pairs, key=lambda pair: (pair[0].file, pair[0].offset))
    with ThreadPoolExecutor(reader_threads(), thread_name_prefix="load") as pool:
        futures = [pool.submit(read, *pair) for pair in ordered]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((f for f in done if f.exception() is not None), None)
        if failed is not None:
            stop.set()
            pool.shutdown(cancel_futures=True)
            failed.result()


def reader_threads() -> int:
    """Threads that read and cast: enough to keep a disk busy, 2 to 8."""
    return min(8, max(2, usable_cpus()))


def _head_differs(stored: dict[str, StoredTensor]) -> bool:
    if _HEAD not in stored or _EMBEDDING not in stored:
        return False
    return not equal_contents(stored[_HEAD], stored[_EMBEDDING])


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class _Reporter:
    """Adds up bytes from several threads and tells the caller, or a bar on a terminal."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock = threading.Lock()
        self._done, self._total, self._progress = 0, total, progress
        self._bar = None
        if progress is None and sys.stderr.isatty():
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="weights", leave=False)

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)
            if self._bar is not None:
                self._bar.update(count)

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
