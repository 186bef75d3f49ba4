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
from src.core.gguf import is_gguf
from src.models.checkpoint import StoredTensor, TensorReader
from src.models.model import Model
from src.models.weights.parameters import (
    NUMBERS,
    WEIGHT,
    Packing,
    Parameter,
    Placement,
    RowPacking,
    StoredForm,
    own_part,
    shape_at,
    stored_forms,
    view_of,
)

# Buffers in older checkpoints that are not needed, because they are computed here.
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
_NAMES_SHOWN = 4
_PIECE_BYTES = 2**24  # that a thread reads at most, if a tensor can be cut by rows


class _Read(NamedTuple):
    """One read: the checkpoint's tensors by role, and the views of a parameter's parts to fill.

    ``rows`` are the first row to read and the one after the last; None: all.
    """

    forms: dict[str, StoredForm]
    views: dict[str, Tensor]
    placement: Placement
    rows: tuple[int, int] | None = None


def stored_names(model: Model, parameter: Parameter) -> Iterator[str]:
    """Names of the checkpoint's tensors for a parameter; of some it may have none."""
    for placement in parameter.placements:
        for form in _forms(model, parameter, placement).values():
            yield form.name


def _forms(model: Model, parameter: Parameter, placement: Placement) -> dict[str, StoredForm]:
    own = shape_at(parameter.shape, placement.index)
    try:
        return stored_forms(own, placement, model.group.size)
    except ValueError as error:
        raise ModelLoadError(f"{model.formats.name}: {placement.tensor}: {error}") from None


def _parts(model: Model, parameter: Parameter) -> dict[str, Tensor]:
    """The tensors to read into: the parameter itself, or the staging of its method."""
    method = model.methods.get(parameter.name)
    if method is None:
        weight = model.weights[parameter.name]
        assert isinstance(weight, Tensor)
        return {WEIGHT: weight}
    return method.staging(parameter.shape, parameter.dtype, model.spec.device)


def _reads(model: Model, parameter: Parameter, parts: dict[str, Tensor]) -> Iterator[_Read]:
    method = model.methods.get(parameter.name)
    for placement in parameter.placements:
        views = {
            kind: view_of(part, placement)
            if method is None
            else method.place(part, kind, placement.index)
            for kind, part in parts.items()
        }
        whole = _Read(_forms(model, parameter, placement), views, placement)
        yield from _pieces(whole, model.group.size)


def _pieces(whole: _Read, world_size: int) -> Iterator[_Read]:
    """Cut a long read by rows, so that no thread is left alone with it."""
    placement, views = whole.placement, whole.views
    (rows, *_), size = next(iter(views.values())).shape, sum(v.nbytes for v in views.values())
    packing = placement.packing
    is_of_rows = packing is None or (isinstance(packing, RowPacking) and packing.is_of_rows)
    is_whole = placement.part is None and (placement.shard is None or world_size == 1)
    count = min(rows, -(-size // _PIECE_BYTES))
    if count < 2 or not (is_of_rows and is_whole) or placement.transform is not None:
        yield whole
        return
    step = -(-rows // count)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        some = {kind: view[start:stop] for kind, view in views.items()}
        yield whole._replace(views=some, rows=(start, stop))


def check_tensors(
    path: Path, stored: dict[str, StoredTensor], model: Model, passed_over: set[str]
) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's.

    Parameters
    ----------
    path
        The checkpoint's, for messages.
    stored
        The checkpoint's tensors.
    model
        The model to fill.
    passed_over
        Names that may be present and are not read.

    Raises
    ------
    ModelLoadError
        Tensors are missing, unexpected, mis-shaped or mis-typed; the message names them.
    """
    forms = {
        form.name: form
        for parameter in model.table.values()
        for placement in parameter.placements
        for form in _forms(model, parameter, placement).values()
    }
    faults = []
    if missing := [n for n, form in forms.items() if n not in stored and not form.is_optional]:
        faults.append("missing: " + _listed(missing))
    harmless = {name for name in stored if _HARMLESS.search(name)} | passed_over
    if unexpected := [name for name in stored if name not in forms and name not in harmless]:
        faults.append("unexpected: " + _listed(unexpected))
    given = [(form, stored[name]) for name, form in forms.items() if name in stored]
    if mis_shaped := [_expected(*pair) for pair in given if pair[1].shape not in pair[0].shapes]:
        faults.append("mis-shaped: " + _listed(mis_shaped))
    if mis_typed := [_typed(*pair) for pair in given if pair[1].dtype not in pair[0].dtypes]:
        faults.append("mis-typed: " + _listed(mis_typed))
    if faults:
        what = "metadata" if is_gguf(path) else "config.json"
        raise ModelLoadError(f"{path} does not fit its {what}; tensors {'; '.join(faults)}")


def _expected(form: StoredForm, got: StoredTensor) -> str:
    wanted = " or ".join(str(list(shape)) for shape in form.shapes)
    return f"{form.name} (expected {wanted}, got {list(got.shape)})"


def _typed(form: StoredForm, got: StoredTensor) -> str:
    known = {NUMBERS: "numbers", (torch.uint8,): "bytes"}
    names = known.get(form.dtypes) or " or ".join(map(str, form.dtypes))
    return f"{form.name} (expected {names}, got {got.dtype})"


def fill(
    model: Model,
    stored: dict[str, StoredTensor],
    on_bytes: Callable[[int], None],
    before_each: Callable[[], None],
) -> None:
    """Read every parameter on a few threads, roughly in the files' order.

    For parameters with a method the stored tensors are staged until the weight is made. Only a few
    are staged at a time.

    Parameters
    ----------
    model
        The model to fill.
    stored
        The checkpoint's tensors.
    on_bytes
        Called with the number of bytes after each piece, from any thread.
    before_each
        Called before a method makes a weight, in this thread.

    Raises
    ------
    ModelLoadError
        The first failure; other reads stop at their next piece.
    """
    reader = _Reader(stored, on_bytes, model.group.rank, model.group.size)
    threads = reader_threads()
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
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
            if parameter.name not in model.methods:
                direct += reads
            else:
                staged.append((parameter, parts, reads))
            del parts, reads
            if len(staged) > threads:
                make_next()
        while staged:
            make_next()
        reader.finish(direct, pool)
    make_aliases(model, before_each)


def make_aliases(model: Model, before_each: Callable[[], None]) -> None:
    """Make the weights that share another parameter's values but have another format."""
    for name, of in model.aliases.items():
        if name in model.table and not model.table[name].placements:
            before_each()
            source = model.weights[of]
            assert isinstance(source, Tensor)
            make(model, model.table[name], model.methods[name].encode(source))


def make(model: Model, parameter: Parameter, parts: dict[str, Tensor]) -> None:
    """Make a parameter's weight by its method, and put it into the model.

    Raises
    ------
    ModelLoadError
        The method cannot hold this matrix.
    """
    method = model.methods[parameter.name]
    try:
        weight = method.make(parts)
    except ValueError as error:
        raise ModelLoadError(f"{method.name}: {parameter.name}: {error}") from None
    keep = model.pages.keep
    model.replace(parameter.name, keep(weight) if isinstance(weight, Tensor) else weight.map(keep))


def _in_file_order(model: Model, stored: dict[str, StoredTensor]) -> list[Parameter]:
    def place(parameter: Parameter) -> tuple[Path, int]:
        first = stored[next(name for name in stored_names(model, parameter) if name in stored)]
        return first.file, first.offset

    return sorted((each for each in model.table.values() if each.placements), key=place)


def _unpacked(
    stored: dict[str, Tensor], packing: Packing | None, is_decoded: bool
) -> dict[str, Tensor]:
    """The values of a checkpoint's tensors, or the parts that a method keeps."""
    if packing is None:
        return stored
    if is_decoded:
        return {WEIGHT: packing.unpack(stored)}
    assert isinstance(packing, RowPacking)
    return packing.rows(stored)


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
        placement, packing = read.placement, read.placement.packing
        stored = {r: self._stored[f.name] for r, f in read.forms.items() if f.name in self._stored}
        if placement.part is not None:
            stored = {role: each.part(placement.part.index) for role, each in stored.items()}
        if read.rows is not None:
            stored = {role: each.rows(*read.rows) for role, each in stored.items()}
        is_cut = placement.shard is not None and self._world_size > 1
        if packing is None and placement.transform is None and not is_cut:
            view = read.views[WEIGHT]
            if view.is_contiguous():
                reader.read(stored[WEIGHT], view)
                return
        wholes = {}
        for role, each in stored.items():
            dtype = read.views[WEIGHT].dtype if packing is None else each.dtype
            wholes[role] = torch.empty(each.shape, dtype=dtype)
            reader.read(each, wholes[role])
        try:
            parts = _unpacked(wholes, packing, WEIGHT in read.views)
        except ValueError as error:
            raise ModelLoadError(f"{placement.tensor}: {error}") from None
        for kind, view in read.views.items():
            own = own_part(parts[kind], placement, self._rank, self._world_size)
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
