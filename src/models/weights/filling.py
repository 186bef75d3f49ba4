"""Fills a model's parameters from a checkpoint's tensors."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from src.core.cpus import usable_cpus
from src.core.errors import ModelLoadError
from src.models.model import Model
from src.models.weights.checkpoint import StoredTensor, TensorReader
from src.models.weights.parameters import Parameter, Placement, own_part, stored_tensors, view_of

# Buffers in older checkpoints that are not needed, because they are computed here.
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
_NAMES_SHOWN = 4
_WEIGHT = "weight"


class _Read(NamedTuple):
    """One read: the checkpoint's tensors, and the view of a parameter (or its staging) to fill.

    ``stored`` maps names to shapes. There is one tensor, unless its values are packed.
    """

    stored: dict[str, tuple[int, ...]]
    view: Tensor
    placement: Placement


def stored_names(model: Model, parameter: Parameter) -> Iterator[str]:
    """Names of the checkpoint's tensors for a parameter."""
    method = model.formats.of(parameter.kind)
    for placement in parameter.placements:
        endings = ("",) if placement.packing is None else placement.packing.endings
        for kind in (_WEIGHT,) if method is None else method.stored:
            for ending in endings:
                yield _name(placement, kind) + ending


def _name(placement: Placement, kind: str) -> str:
    """Name of a stored part of matrix ``....weight``, for example ``....qweight``."""
    name = placement.tensor
    return name if kind == _WEIGHT else name.removesuffix(_WEIGHT) + kind


def _parts(model: Model, parameter: Parameter) -> dict[str, Tensor]:
    """The tensors to read into: the parameter itself, or the staging of its linear method."""
    method = model.formats.of(parameter.kind)
    if method is None:
        weight = model.weights[parameter.name]
        assert isinstance(weight, Tensor)
        return {_WEIGHT: weight}
    return method.staging(parameter.shape, parameter.dtype, model.spec.device)


def _reads(model: Model, parameter: Parameter, parts: dict[str, Tensor]) -> Iterator[_Read]:
    method = model.formats.of(parameter.kind)
    for placement in parameter.placements:
        for kind, part in parts.items():
            if method is None:
                view = view_of(part, placement)
            else:
                view = method.place(part, kind, placement.index)
            name = _name(placement, kind)
            yield _Read(stored_tensors(name, view, placement, model.group.size), view, placement)


def check_tensors(
    path: Path, stored: dict[str, StoredTensor], model: Model, passed_over: set[str]
) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's.

    Args:
        path: the checkpoint's, for messages.
        stored: the checkpoint's tensors.
        model: the model to fill.
        passed_over: names that may be present and are not read.

    Raises:
        ModelLoadError: tensors are missing, unexpected, mis-shaped or mis-typed; the message names
            them.
    """
    meta = torch.device("meta")
    reads: list[_Read] = []
    for parameter in model.table.values():
        method = model.formats.of(parameter.kind)
        parts = (
            {_WEIGHT: torch.empty(parameter.shape, dtype=parameter.dtype, device=meta)}
            if method is None
            else method.staging(parameter.shape, parameter.dtype, meta)
        )
        reads += _reads(model, parameter, parts)
    wanted = dict.fromkeys(name for read in reads for name in read.stored)
    faults = []
    if missing := [name for name in wanted if name not in stored]:
        faults.append("missing: " + _listed(missing))
    harmless = {name for name in stored if _HARMLESS.search(name)} | passed_over
    if unexpected := [name for name in stored if name not in wanted and name not in harmless]:
        faults.append("unexpected: " + _listed(unexpected))
    if mis_shaped := _mis_shaped(reads, stored):
        faults.append("mis-shaped: " + _listed(mis_shaped))
    if mis_typed := _mis_typed(reads, stored):
        faults.append("mis-typed: " + _listed(mis_typed))
    if faults:
        raise ModelLoadError(f"{path} does not fit its config.json; tensors {'; '.join(faults)}")


def _mis_shaped(reads: list[_Read], stored: dict[str, StoredTensor]) -> list[str]:
    shapes = {name: shape for read in reads for name, shape in read.stored.items()}
    return [
        f"{name} (expected {list(shape)}, got {list(stored[name].shape)})"
        for name, shape in shapes.items()
        if name in stored and stored[name].shape != shape
    ]


def _mis_typed(reads: list[_Read], stored: dict[str, StoredTensor]) -> list[str]:
    packed = {name: read.placement.packing is not None for read in reads for name in read.stored}
    return [
        f"{name} (expected {'bytes' if is_packed else 'numbers'}, got {stored[name].dtype})"
        for name, is_packed in packed.items()
        if name in stored and (stored[name].dtype == torch.uint8) != is_packed
    ]


def fill(
    model: Model,
    stored: dict[str, StoredTensor],
    on_bytes: Callable[[int], None],
    before_each: Callable[[], None],
) -> None:
    """Read every parameter on a few threads, roughly in the files' order.

    For parameters with a linear method the stored tensors are staged until the weight is made. Only
    a few are staged at a time.

    Args:
        model: the model to fill.
        stored: the checkpoint's tensors.
        on_bytes: called with the number of bytes after each piece, from any thread.
        before_each: called before a method makes a weight, in this thread.

    Raises:
        ModelLoadError: the first failure; other reads stop at their next piece.
    """
    reader = _Reader(stored, on_bytes, model.group.rank, model.group.size)
    with ThreadPoolExecutor(reader_threads(), thread_name_prefix="load") as pool:
        staged: deque[tuple[Parameter, dict[str, Tensor], list[Future[None]]]] = deque()
        direct: list[Future[None]] = []

        def make_next() -> None:
            parameter, parts, reads = staged.popleft()
            reader.finish(reads, pool)
            before_each()
            make(model, parameter, parts)

        for parameter in _in_file_order(model, stored):
            parts = _parts(model, parameter)
            reads = [pool.submit(reader.read, read) for read in _reads(model, parameter, parts)]
            if model.formats.of(parameter.kind) is None:
                direct += reads
            else:
                staged.append((parameter, parts, reads))
            del parts, reads
            if len(staged) > reader_threads():
                make_next()
        while staged:
            make_next()
        reader.finish(direct, pool)
    make_aliases(model, before_each)


def make_aliases(model: Model, before_each: Callable[[], None]) -> None:
    """Make the weights that share another parameter's values but have another format."""
    for name, of in model.aliases.items():
        if name in model.table:
            before_each()
            source = model.weights[of]
            assert isinstance(source, Tensor)
            make(model, model.table[name], {_WEIGHT: source})


def make(model: Model, parameter: Parameter, parts: dict[str, Tensor]) -> None:
    """Make a parameter's weight by its linear method, and put it into the model.

    Raises:
        ModelLoadError: the method cannot hold this matrix.
    """
    method = model.formats.of(parameter.kind)
    assert method is not None
    try:
        weight = method.make(parts)
    except ValueError as error:
        raise ModelLoadError(f"{method.name}: {parameter.name}: {error}") from None
    model.replace(parameter.name, weight)


def _in_file_order(model: Model, stored: dict[str, StoredTensor]) -> list[Parameter]:
    def place(parameter: Parameter) -> tuple[Path, int]:
        first = stored[next(stored_names(model, parameter))]
        return first.file, first.offset

    return sorted((each for each in model.table.values() if each.placements), key=place)


class _Reader:
    """Reads tensors on any thread, until one fails."""

    def __init__(
        self,
        stored: dict[str, StoredTensor],
        on_bytes: Callable[[int], None],
        rank: int,
        world_size: int,
    ) -> None:
        self._stored = stored
        self._on_bytes = on_bytes
        self._rank, self._world_size = rank, world_size
        self._stop, self._local = threading.Event(), threading.local()

    def read(self, read: _Read) -> None:
        """Fill a view. What has to be sharded, transformed or unpacked is read whole first."""
        if not hasattr(self._local, "reader"):
            self._local.reader = TensorReader(self._checked)
        reader: TensorReader = self._local.reader
        placement, view, packing = read.placement, read.view, read.placement.packing
        stored = [self._stored[name] for name in read.stored]
        if placement.part is not None:
            stored = [each.part(placement.part.index) for each in stored]
        is_cut = placement.shard is not None and self._world_size > 1
        is_as_stored = packing is None and placement.transform is None and not is_cut
        if is_as_stored and view.is_contiguous():
            reader.read(stored[0], view)
            return
        wholes = []
        for each in stored:
            dtype = view.dtype if packing is None else each.dtype
            wholes.append(torch.empty(each.shape, dtype=dtype))
            reader.read(each, wholes[-1])
        values = wholes[0] if packing is None else packing.unpack(wholes)
        own = own_part(values, placement, self._rank, self._world_size)
        view.copy_(own if placement.transform is None else placement.transform(own))

    def finish(self, reads: list[Future[None]], pool: ThreadPoolExecutor) -> None:
        """Wait for some reads. If one fails, stop the others and raise its error."""
        done, _ = wait(reads, return_when=FIRST_EXCEPTION)
        failed = next((f for f in done if f.exception() is not None), None)
        if failed is not None:
            self._stop.set()
            pool.shutdown(cancel_futures=True)
            failed.result()

    def _checked(self, count: int) -> None:
        if self._stop.is_set():
            raise ModelLoadError("stopped, since another tensor could not be read")
        self._on_bytes(count)


def reader_threads() -> int:
    """Threads that read and cast: enough to keep a disk busy, 2 to 8."""
    return min(8, max(2, usable_cpus()))


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
