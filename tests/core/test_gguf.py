"""The container of GGUF files, against the format's own package; and files that are hostile."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src.core.errors import ModelLoadError
from src.core.gguf import open_gguf
from src.models.gguf.files import find_gguf
from tests.support.gguf_files import gguf

ROWS = np.arange(64, dtype=np.float32).reshape(2, 32)


def write(path: Path, **settings: Any) -> Path:
    """A small file with one value of each kind."""
    writer = gguf.GGUFWriter(path, "llama", **settings)
    writer.add_uint32("a.u32", 7)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "Größe 漢字")
    writer.add_array("a.texts", ["x", "", "漢"])
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("one", ROWS)
    writer.add_tensor("two", ROWS[0].astype(np.float16))
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("three", gguf.quants.quantize(ROWS, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_places_are_those_that_the_formats_own_package_reads(tmp_path: Path) -> None:
    file = open_gguf(write(tmp_path / "m.gguf"))
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    own = {k: list(v) if isinstance(v, tuple) else v for k, v in file.metadata.items()}
    assert own == {
        key: field.contents() for key, field in theirs.fields.items() if "GGUF." not in key
    }
    assert own["a.text"] == "Größe 漢字"
    assert own["a.bool"] is True
    for tensor in theirs.tensors:
        ours = file.tensors[tensor.name]
        assert ours.offset == tensor.data_offset
        assert ours.size == tensor.n_bytes
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.type.name == tensor.tensor_type.name


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    assert open_gguf(path) is open_gguf(path)
    before = open_gguf(path)
    path.write_bytes(path.read_bytes() + bytes(32))
    assert open_gguf(path) is not before


def split(folder: Path, count: int = 3) -> Path:
    """Files of one tensor each; the first."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    for index in range(count):
        writer.add_tensor(f"t{index}", ROWS + index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / f"m-00001-of-{count:05}.gguf"


def test_split_files_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    first = split(tmp_path)
    for path in (first, tmp_path / "m-00003-of-00003.gguf"):
        file = open_gguf(path)
        assert file.path == first
        assert file.metadata["general.architecture"] == "llama"
        assert {each.file.name for each in file.tensors.values()} == {
            f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)
        }
    assert find_gguf(tmp_path) == first


def test_a_directory_with_several_models_asks_for_one(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    write(tmp_path / "a.gguf")
    assert find_gguf(tmp_path) == tmp_path / "a.gguf"
    split(tmp_path)
    with pytest.raises(ModelLoadError, match=r"several GGUF models \(a.gguf, m-00001-of-00003"):
        find_gguf(tmp_path)


def test_split_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first = split(tmp_path)
    second = tmp_path / "m-00002-of-00003.gguf"
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003.gguf is missing"):
        open_gguf(first)
    second.write_bytes((tmp_path / "m-00003-of-00003.gguf").read_bytes())
    with pytest.raises(ModelLoadError, match=r"says that it is file 2 \(from 0\) of 3"):
        open_gguf(first)
    second.write_bytes(whole)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(whole)
    with pytest.raises(ModelLoadError, match="its name says 0 of 1"):
        open_gguf(alone)
    many = tmp_path / "m-00001-of-99999.gguf"
    many.write_bytes(first.read_bytes())
    with pytest.raises(ModelLoadError, match="one of 1 to 1024 files"):
        open_gguf(many)


# Pieces of files, by hand.


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def header(pairs: int, tensors: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read as a GGUF file"),
    "short": (b"GGUF", "truncated within its header"),
    "other": (header(0, 0, magic=b"GGML") + bytes(64), "magic bytes"),
    "version 1": (header(0, 0, 1) + bytes(64), "version 1 is not one of"),
    "big-endian": (header(0, 0, 0x03000000) + bytes(64), "big-endian"),
    "a bomb of values": (header(2**62, 0), "announces 4611686018427387904 values"),
    "a bomb of tensors": (header(0, 2**62), "and 4611686018427387904 tensors"),
    "values that are not there": (header(60_000, 0), "truncated within its header"),
    "tensors that are not there": (header(0, 200_000), "truncated within its header"),
    "a long key": (header(1, 0) + struct.pack("<Q", 2**63), "a key takes 9223372036854775808"),
    "a long text": (
        header(1, 0) + pair("k", 8, struct.pack("<Q", 2**24)),
        "truncated within its header",
    ),
    "a long array": (
        header(1, 0) + pair("k", 9, struct.pack("<IQ", 4, 2**61)),
        "k has 2305843009213693952 elements",
    ),
    "a long array of texts": (
        header(1, 0) + pair("k", 9, struct.pack("<IQ", 8, 8_000_000)),
        "truncated within its header",
    ),
    "many long arrays": (
        header(3, 0) + pair("a", 9, struct.pack("<IQ", 0, 6_000_000) + bytes(6_000_000)) * 3,
        "occurs twice|at most 8388608 in all are read",
    ),
    "arrays of arrays": (
        header(1, 0) + pair("k", 9, struct.pack("<IQ", 9, 1) * 1000),
        "k is an array of arrays",
    ),
    "an unknown kind": (header(1, 0) + pair("k", 77, bytes(8)), "k has the unknown type 77"),
    "a key twice": (header(2, 0) + pair("k", 4, bytes(4)) * 2, "the key 'k' occurs twice"),
    "a key that is no text": (header(1, 0) + pair(b"\xff\xfe", 4, bytes(4)), "a key is not UTF-8"),
    "a text that is none": (header(1, 0) + pair("k", 8, text(b"\xff")), "k is not UTF-8"),
    "texts that are none": (
        header(1, 0) + pair("k", 9, struct.pack("<IQ", 8, 1) + text(b"\xff")),
        "k has text that is not UTF-8",
    ),
    "an alignment of 0": (
        header(1, 1) + pair("general.alignment", 4, bytes(4)) + tensor("t", (32,)) + bytes(512),
        "general.alignment must be",
    ),
    "an alignment of text": (
        header(1, 1) + pair("general.alignment", 8, text("x")) + tensor("t", (32,)) + bytes(512),
        "general.alignment must be",
    ),
    "no dimension": (header(0, 1) + tensor("t", ()) + bytes(64), "t has 0 dimensions"),
    "many dimensions": (
        header(0, 1) + text("t") + struct.pack("<I", 2**31),
        "t has 2147483648 dimensions",
    ),
    "a dimension of 0": (header(0, 1) + tensor("t", (0, 32)) + bytes(64), "impossible shape"),
    "a huge shape": (header(0, 1) + tensor("t", (2**63, 2**63)) + bytes(64), "impossible shape"),
    "a shape behind the end": (
        header(0, 1) + tensor("t", (2**40,)) + bytes(64),
        "ends at byte 4398046511",
    ),
    "an offset behind the end": (
        header(0, 1) + tensor("t", (32,), offset=2**63) + bytes(512),
        "t ends at byte",
    ),
    "a type that is not read": (
        header(0, 1) + tensor("t", (256,), kind=10) + bytes(512),
        "t is of type Q2_K, which is not read",
    ),
    "an unknown type": (header(0, 1) + tensor("t", (32,), kind=999) + bytes(512), "number 999"),
    "parts of a block": (
        header(0, 1) + tensor("t", (33, 2), kind=8) + bytes(512),
        r"rows of t \(33 values\) must be blocks of 32",
    ),
    "a tensor twice": (header(0, 2) + tensor("t", (8,)) * 2 + bytes(512), "t occurs twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_clear_error_and_costs_little(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    began = time.monotonic()
    try:
        with pytest.raises(ModelLoadError, match=message) as caught:
            open_gguf(path)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert time.monotonic() - began < 5
    assert peak < 200e6


def test_a_sparse_file_is_not_read_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(1, 0) + pair("k", 9, struct.pack("<IQ", 8, 500_000)))
    with path.open("r+b") as file:
        file.truncate(2**40)
    # Empty texts cost nothing but their number, which is bounded.
    assert len(open_gguf(path).metadata["k"]) == 500_000
    path.write_bytes(header(1, 0) + pair("k", 9, struct.pack("<IQ", 8, 8_388_609)))
    with path.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(ModelLoadError, match="at most 8388608"):
        open_gguf(path)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.95])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ModelLoadError, match=r"truncated within its header|ends at byte"):
        open_gguf(path)


def test_a_file_whose_bytes_are_changed_is_read_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    read: Callable[[Path], object] = open_gguf
    for _ in range(300):
        changed = bytearray(whole)
        for at in rng.integers(0, 700, 4):
            changed[at] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            read(path)
        except ModelLoadError:
            continue
