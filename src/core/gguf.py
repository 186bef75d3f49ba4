"""Reads the container of GGUF files: metadata and the places of tensors, without their values.

A file is a header (magic, version, counts), key-value pairs, tensor descriptions, and the tensors'
data, all little-endian (the specification is a page of https://github.com/ggml-org/ggml). The
published reader of the format takes seconds for a vocabulary and trusts the counts in a file. This
one takes a fraction of a second and bounds whatever a file can ask for.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from src.core.errors import ModelLoadError

SUFFIX: Final = ".gguf"
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SPLIT: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_DEFAULT_ALIGNMENT: Final = 32

# Files that lie beside models, by their names and by their metadata.
_NO_MODELS: Final = {
    "a projector of images": re.compile(r"(?<![a-z])mmproj(?![a-z])"),
    "an importance matrix": re.compile(r"(?<![a-z])imatrix(?![a-z])"),
    "a draft for speculation": re.compile(r"(?<![a-z])draft(?:er)?(?![a-z])"),
}
_NO_ARCHITECTURES: Final = {"clip": "a projector of images", "imatrix": "an importance matrix"}
_FIRST_PAIRS: Final = 16

# Far more than any model has. Each bounds the memory and the time that a hostile file can take.
_MOST_PAIRS: Final = 65_536
_MOST_TENSORS: Final = 262_144
_MOST_ELEMENTS: Final = 8_388_608  # of all arrays together: vocabulary, scores, types, merges
_MOST_STRING_BYTES: Final = 16_777_216
_MOST_HEADER_BYTES: Final = 268_435_456
_MOST_DIMENSIONS: Final = 4
_MOST_FILES: Final = 1024
_MOST_ALIGNMENT: Final = 1_048_576

_NUMBERS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensor: ``block`` values of a row take ``size`` bytes."""

    name: str
    block: int
    size: int


TYPES: Final = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""The types that are read, by their number in a file."""

TYPES_BY_NAME: Final = {each.name: each for each in TYPES.values()}

_OTHER_TYPES: Final = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place in a file.

    Attributes
    ----------
    shape
        The slowest dimension first, as torch has it. The file has the fastest first.
    offset, size
        Bytes from the start of the file, and bytes.
    """

    name: str
    file: Path
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """The metadata of a file, and the tensors of all files that it is split into.

    ``metadata`` maps keys to numbers, booleans, strings, or tuples of one of them.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def is_gguf(path: Path) -> bool:
    """Whether a model's path is that of a GGUF file, by its name or its first bytes.

    Stores that name files by their contents (Ollama's, and the hub's cache) leave the suffix out.
    """
    if path.suffix == SUFFIX:
        return True
    try:
        return path.is_file() and first_bytes(path) == _MAGIC
    except OSError:
        return False


def first_bytes(path: Path) -> bytes:
    """The first four bytes of a file, or fewer."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC))


def is_first(path: Path) -> bool:
    """Whether a file is a model by itself or the first of its files, by its name."""
    split = _SPLIT.fullmatch(path.name)
    return split is None or int(split[2]) == 1


def files_of(path: Path) -> list[Path]:
    """The files that a model consists of, the first one first, by the name of any of them.

    Raises
    ------
    ModelLoadError
        The name announces too many, or none.
    """
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split[3])
    if not 1 <= count <= _MOST_FILES:
        raise ModelLoadError(f"{path} must be one of 1 to {_MOST_FILES} files, got {count}")
    # Made of the name that the user has given. Names within files are never followed.
    names = (f"{split[1]}-{i:05}-of-{split[3]}{SUFFIX}" for i in range(1, count + 1))
    return [path.with_name(name) for name in names]


def named_kind(path: Path) -> str | None:
    """What a file is by its name if that says that it is no model."""
    name = path.name.lower()
    return next((kind for kind, pattern in _NO_MODELS.items() if pattern.search(name)), None)


def read_kind(path: Path, *, by_name: bool = True) -> str | None:
    """What a GGUF file is if it is no model: a projector, a draft, ...; None: perhaps a model.

    Only the first few values of the metadata are read, and with ``by_name`` the name before them.
    """
    if by_name and (named := named_kind(path)) is not None:
        return named
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            first = _Parser(path, data).first_values(_FIRST_PAIRS)
    except (OSError, ValueError, ModelLoadError):
        return None  # Whoever opens it says what is wrong.
    if first.get("general.architecture") in _NO_ARCHITECTURES:
        return _NO_ARCHITECTURES[first["general.architecture"]]
    kind = first.get("general.type", "model")
    return None if kind == "model" else f"of the type {kind!r}"[:40]


def open_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file, with the files that it is split into.

    Of split files any may be given. The last opened file is remembered until it changes.

    Raises
    ------
    ModelLoadError
        a file is missing, truncated, damaged, too large in some way, or has tensors of a type that
        is not read; the message says which and where.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return _open(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _open(path: Path, _size: int, _modified: int) -> GGUFFile:
    files = files_of(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for index, file in enumerate(files):
        one = _read(file)
        said = one.metadata.get("split.count", 1), one.metadata.get("split.no", index)
        if said != (len(files), index):
            raise ModelLoadError(
                f"{file} says that it is file {said[1]} (from 0) of {said[0]}; "
                f"its name says {index} of {len(files)}"
            )
        metadata = metadata or one.metadata
        if twice := tensors.keys() & one.tensors.keys():
            raise ModelLoadError(f"{min(twice)} is both in {file} and in another of its files")
        tensors |= one.tensors
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelLoadError(f"{path} has {len(tensors)} tensors in all files, expected {expected}")
    return GGUFFile(files[0], metadata, tensors)


def _read(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).file()
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # of `mmap`: an empty file
        raise ModelLoadError(f"{path} cannot be read as a GGUF file: {error}") from error


class _Parser:
    """Reads the header of one file, from its start to the tensors' data."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._at, self._end = 0, min(len(data), _MOST_HEADER_BYTES)
        self._elements = 0

    def first_values(self, most: int) -> dict[str, Any]:
        """At most so many of the first values that are no lists.

        Raises
        ------
        ModelLoadError
            See `open_gguf`.
        """
        _, pairs = self._counts()
        values: dict[str, Any] = {}
        for _ in range(min(pairs, most)):
            key = self._string("a key")
            (kind,) = self._unpack("<I")
            if kind == _ARRAY:
                break
            values[key] = self._value(key, kind)
        return values

    def file(self) -> GGUFFile:
        """The parsed file.

        Raises
        ------
        ModelLoadError
            See `open_gguf`.
        """
        tensors, pairs = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string("a key")
            if key in metadata:
                raise self._error(f"the key {key!r} occurs twice")
            (kind,) = self._unpack("<I")
            metadata[key] = self._value(key, kind)
        described = [self._tensor() for _ in range(tensors)]
        return GGUFFile(self._path, metadata, self._placed(described, metadata))

    def _counts(self) -> tuple[int, int]:
        """How many tensors and values the file has."""
        magic, version, tensors, pairs = self._unpack("<4sIQQ")
        if magic != _MAGIC:
            raise self._error("it does not begin with GGUF's magic bytes")
        if version not in _VERSIONS:
            order = " (it may be of a big-endian machine)" if version > 0xFFFF else ""
            raise self._error(f"version {version} is not one of {_VERSIONS}{order}")
        if pairs > _MOST_PAIRS or tensors > _MOST_TENSORS:
            raise self._error(
                f"it announces {pairs} values and {tensors} tensors; "
                f"at most {_MOST_PAIRS} and {_MOST_TENSORS} are read"
            )
        return tensors, pairs

    def _placed(
        self,
        described: list[tuple[str, tuple[int, ...], TensorType, int]],
        metadata: dict[str, Any],
    ) -> dict[str, GGUFTensor]:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MOST_ALIGNMENT:
            raise self._error(f"general.alignment must be from 1 to {_MOST_ALIGNMENT} bytes")
        start = -(-self._at // alignment) * alignment
        placed: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in described:
            size = math.prod(shape) // kind.block * kind.size
            end = start + offset + size
            if end > len(self._data):
                raise self._error(f"{name} ends at byte {end} of a file of {len(self._data)} bytes")
            if name in placed:
                raise self._error(f"the tensor {name} occurs twice")
            placed[name] = GGUFTensor(name, self._path, kind, shape, start + offset, size)
        return placed

    def _tensor(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string("a tensor's name")
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._error(f"{name} has {dimensions} dimensions, from 1 to {_MOST_DIMENSIONS}")
        shape = tuple(reversed(self._unpack(f"<{dimensions}Q")))
        number, offset = self._unpack("<IQ")
        kind = TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TYPES.values())
            named = _OTHER_TYPES.get(number, f"number {number}")
            raise self._error(f"{name} is of type {named}, which is not read (of {known})")
        if min(shape) < 1 or math.prod(shape) >= 2**62:
            raise self._error(f"{name} has the impossible shape {list(shape)}")
        if shape[-1] % kind.block:
            raise self._error(f"rows of {name} ({shape[-1]} values) must be blocks of {kind.block}")
        return name, shape, kind, offset

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            of, count = self._unpack("<IQ")
            return self._array(key, of, count)
        if kind not in _NUMBERS:
            raise self._error(f"{key} has the unknown type {kind}")
        (value,) = self._unpack("<" + _NUMBERS[kind])
        return bool(value) if kind == _BOOL else value

    def _array(self, key: str, kind: int, count: int) -> tuple[Any, ...]:
        self._elements += count
        if self._elements > _MOST_ELEMENTS:
            raise self._error(
                f"{key} has {count} elements; at most {_MOST_ELEMENTS} in all are read"
            )
        if kind == _STRING:
            return self._strings(key, count)
        if kind not in _NUMBERS:
            what = "arrays" if kind == _ARRAY else f"the unknown type {kind}"
            raise self._error(f"{key} is an array of {what}")
        values = self._unpack(f"<{count}{_NUMBERS[kind]}")
        return tuple(map(bool, values)) if kind == _BOOL else values

    def _strings(self, key: str, count: int) -> tuple[str, ...]:
        # Tens of thousands at every start: no call per string but those that cannot be avoided.
        data, at, end, length_of = self._data, self._at, self._end, struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + length_of(data, at)[0]
                if at > end:
                    raise self._truncated()
                strings.append(data[begin:at].decode())
        except struct.error:
            raise self._truncated() from None
        except UnicodeDecodeError as error:
            raise self._error(f"{key} has text that is not UTF-8: {error}") from None
        self._at = at
        return tuple(strings)

    def _string(self, what: str) -> str:
        (length,) = self._unpack("<Q")
        if length > _MOST_STRING_BYTES:
            raise self._error(f"{what} takes {length} bytes; at most {_MOST_STRING_BYTES} are read")
        if self._at + length > self._end:
            raise self._truncated()
        begin, self._at = self._at, self._at + length
        try:
            return self._data[begin : self._at].decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {error}") from None

    def _unpack(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        if self._at + size > self._end:
            raise self._truncated()
        values = struct.unpack_from(form, self._data, self._at)
        self._at += size
        return values

    def _truncated(self) -> ModelLoadError:
        if self._end < len(self._data):
            return self._error(f"its header takes more than {_MOST_HEADER_BYTES} bytes")
        return self._error("it is truncated within its header")

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {what}")
