"""Finds the tensors of a directory of safetensors files, and reads them into place.

The format is an 8-byte little-endian header length, a JSON header of names to dtype, shape and byte
range, and the raw bytes (https://huggingface.co/docs/safetensors). Tensors are read by positioned
reads directly into the destination's memory, or, if dtype or device differ, through one small
staging buffer per thread. So no tensor exists twice. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from src.core.errors import ModelLoadError
from src.models.fields import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 16
_MAX_SIZE = 2**63 - 1
_CHUNK_BYTES = 8 * 1024 * 1024
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    # Of packed weights, see `weights.packing` and `weights.schemes`.
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    # Which tokens a head knows.
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor's place in a file. `offset` and `size` are bytes from the file's start."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int

    def part(self, index: int) -> StoredTensor:
        """One of the parts along the first dimension."""
        size = self.size // self.shape[0]
        offset = self.offset + index * size
        return StoredTensor(self.name, self.file, self.dtype, self.shape[1:], offset, size)

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Some rows: a range of the first dimension."""
        size = self.size // self.shape[0]
        shape, offset = (stop - start, *self.shape[1:]), self.offset + start * size
        return StoredTensor(self.name, self.file, self.dtype, shape, offset, (stop - start) * size)


def open_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name; only headers are read.

    A single file is preferred to an index, as in transformers: an index beside it is stale. Of an
    index only the files count, as there: a tensor may lie in another of them than it says, or in
    several if all hold the same bytes. Whether one is missing shows when the model is known.

    Raises
    ------
    ModelLoadError
        No safetensors (pickles are refused), a missing shard, a damaged or truncated file, or two
        shards that hold one tensor with other bytes.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists():
        return read_header(single)
    if index.exists():
        return _open_shards(directory, index)
    pickles = sorted(p.name for p in directory.glob("*") if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelLoadError(
            f"{directory} has only pickle checkpoints ({', '.join(pickles[:3])}), which can run "
            "code when they are read and are refused; convert them to safetensors"
        )
    raise ModelLoadError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def tensor_names(directory: Path) -> frozenset[str]:
    """Names of a checkpoint's tensors, as far as its files tell: empty without any.

    Of a checkpoint of several files the index says them, whether the files are there or not.

    Raises
    ------
    ModelLoadError
        The file, or the index, is damaged.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists():
        return frozenset(read_header(single))
    weight_map = read_json(index).get("weight_map") if index.exists() else None
    return frozenset(weight_map) if isinstance(weight_map, Mapping) else frozenset()


def _open_shards(directory: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map must be an object of tensor names to files")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted({str(file) for file in weight_map.values()}):
        path = directory / file
        if Path(file).name != file:
            raise ModelLoadError(f"{index}: {file!r} is not the name of a file next to the index")
        if not path.exists():
            raise ModelLoadError(f"{index} names the shard {file}, which is missing")
        for name, stored in read_header(path).items():
            known = tensors.setdefault(name, stored)
            if known is not stored and not equal_contents(known, stored):
                raise ModelLoadError(
                    f"{name} is both in {known.file.name} and in {file}, with other values or "
                    "another type"
                )
    return tensors


def first_dtype(directory: Path) -> torch.dtype | None:
    """The dtype of the first tensor of numbers, by name, of a checkpoint's first file.

    transformers takes it where `config.json` names none. If all are packed bytes, it is theirs.
    None: there are no safetensors.

    Raises
    ------
    ModelLoadError
        The file, or the index that names it, is damaged.
    """
    file, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if not file.exists():
        weight_map = read_json(index).get("weight_map") if index.exists() else None
        if not isinstance(weight_map, Mapping) or not weight_map:
            return None
        file = directory / Path(min(str(each) for each in weight_map.values())).name
    tensors = read_header(file)
    numbers = [
        name
        for name, stored in tensors.items()
        if stored.dtype.is_floating_point and stored.dtype.itemsize > 1
    ]
    return tensors[min(numbers or tensors)].dtype if tensors else None


def read_header(path: Path, most: int = _MAX_HEADER_BYTES) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, whose header has at most this many bytes.

    Raises
    ------
    ModelLoadError
        The file is unreadable, not safetensors, truncated, or holds a dtype that no format has.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ModelLoadError(f"{path} is truncated or not a safetensors file")
            if length > most:
                raise ModelLoadError(f"{path}: its header has {length} bytes, at most {most}")
            header = json.loads(file.read(length))
    except RecursionError:
        raise ModelLoadError(f"{path}: its header is nested too deeply") from None
    except (OSError, ValueError, struct.error) as error:
        raise ModelLoadError(f"{path} is truncated or not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path} is not a safetensors file: its header is not an object")
    data_start = 8 + length
    return {
        name: _stored(path, name, entry, data_start, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _stored(path: Path, name: str, entry: object, data_start: int, size: int) -> StoredTensor:
    try:
        if not isinstance(entry, dict):
            raise TypeError("its entry is not an object")
        kind, shape = str(entry["dtype"]), _sizes(entry["shape"])
        begin, end = _sizes(entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: the header of {name} is malformed: {error!r}") from error
    if kind not in _DTYPES:
        raise ModelLoadError(
            f"{path}: {name} has dtype {kind[:100]}, expected one of {list(_DTYPES)}"
        )
    dtype = _DTYPES[kind]
    if begin > end:
        raise ModelLoadError(f"{path}: the header of {name} is malformed: {begin} to {end}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ModelLoadError(
            f"{path}: {name} of shape {list(shape)} and dtype {kind} takes "
            f"{math.prod(shape) * dtype.itemsize} bytes, the header says {end - begin}"
        )
    if data_start + end > size:
        raise ModelLoadError(
            f"{path} is truncated: {name} ends at byte {data_start + end} of a file of {size}"
        )
    return StoredTensor(name, path, dtype, shape, data_start + begin, end - begin)


def _sizes(given: object) -> tuple[int, ...]:
    """Sizes of a tensor, or its byte range.

    They are bounded before anything is computed with them: a product of large integers takes
    hours, and no other thread runs meanwhile.
    """
    if not isinstance(given, list) or len(given) > _MAX_DIMENSIONS:
        raise TypeError(f"expected a list of at most {_MAX_DIMENSIONS} sizes")
    for size in given:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_SIZE:
            raise ValueError(f"a size is no integer from 0 to {_MAX_SIZE}")
    return tuple(given)


class TensorReader:
    """Reads stored tensors into preallocated tensors. Each thread needs its own, for its buffer.

    Parameters
    ----------
    on_bytes
        Called after each piece with the number of bytes read; may raise to stop.
    """

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes
        self._staging: torch.Tensor | None = None  # uint8 [_CHUNK_BYTES]

    def read(self, stored: StoredTensor, destination: torch.Tensor) -> None:
        """Fill a contiguous tensor of the same shape, casting to its dtype.

        Raises
        ------
        ModelLoadError
            The file cannot be read to the tensor's end.
        """
        try:
            descriptor = os.open(stored.file, os.O_RDONLY)
        except OSError as error:
            raise ModelLoadError(f"{stored.file} cannot be read: {error}") from error
        try:
            if destination.device.type == "cpu" and destination.dtype == stored.dtype:
                self._read_in_place(descriptor, stored, destination)
            else:
                self._read_staged(descriptor, stored, destination)
        finally:
            os.close(descriptor)

    def _read_in_place(self, fd: int, stored: StoredTensor, destination: torch.Tensor) -> None:
        memory = destination.view(-1).view(torch.uint8).numpy().data
        for start in range(0, stored.size, _CHUNK_BYTES):
            self._fill(fd, stored, start, memory[start : start + _CHUNK_BYTES])

    def _read_staged(self, fd: int, stored: StoredTensor, destination: torch.Tensor) -> None:
        if self._staging is None:
            self._staging = torch.empty(
                _CHUNK_BYTES, dtype=torch.uint8, pin_memory=destination.device.type == "cuda"
            )
        flat, itemsize = destination.view(-1), stored.dtype.itemsize
        for start in range(0, stored.size, _CHUNK_BYTES):
            piece = self._staging[: min(_CHUNK_BYTES, stored.size - start)]
            self._fill(fd, stored, start, piece.numpy().data)
            values = piece.view(stored.dtype)
            flat[start // itemsize :][: values.numel()].copy_(values)

    def _fill(self, fd: int, stored: StoredTensor, start: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(fd, [memory[done:]], stored.offset + start + done)
            except OSError as error:
                raise ModelLoadError(f"{stored.file}: {stored.name}: {error}") from error
            if count == 0:
                raise ModelLoadError(f"{stored.file} is truncated within {stored.name}")
            done += count
        self._on_bytes(len(memory))


def equal_contents(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors hold the same bytes, read piece by piece."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.offset)
        right.seek(other.offset)
        for start in range(0, one.size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, one.size - start)
            if left.read(length) != right.read(length):
                return False
    return True
