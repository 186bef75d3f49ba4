"""GGUF files whose header can be read, but whose names and values are hostile."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from src.core.errors import ModelLoadError
from src.core.gguf import open_gguf
from src.models import load_config
from src.models.gguf.checkpoint import block_types, open_checkpoint


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def write(path: Path, pairs: dict[str, tuple[int, bytes]], tensors: dict[str, list[int]]) -> Path:
    """A file of Q8_0 tensors, shapes in the file's order, that lie on each other."""
    pairs = {"general.architecture": (8, text("llama"))} | pairs
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, (kind, value) in pairs.items():
        content += text(key) + struct.pack("<I", kind) + value
    for name, shape in tensors.items():
        content += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 8, 0)
    path.write_bytes(content + bytes(8192))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "{:>200000000}{}",
        "{}{0}",
        "{}{",
        "token_embd.{:>200000000}{}",
        "blk.0.{}{0.__class__}.weight",
    ],
)
def test_a_tensors_name_is_no_pattern(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {}, {name: [32, 2, 3]})
    tracemalloc.start()
    try:
        (found,) = open_checkpoint(file)
        assert block_types(file) == {found: "Q8_0"}
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert found == name.replace("token_embd", "model.embed_tokens")


BOMBS: dict[str, dict[str, list[int]]] = {
    # Tensors may lie on each other, so few bytes hold any number of them.
    "one stack": {"blk.0.ffn_gate_exps.weight": [32, 1, 100_000]},
    "many stacks": {f"blk.{i}.ffn_gate_exps.weight": [32, 1, 1024] for i in range(300)},
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("read", [open_checkpoint, block_types])
def test_a_bomb_of_experts_is_refused_before_one_is_named(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    pairs = {"llama.expert_count": (4, struct.pack("<I", 9))}
    file = write(tmp_path / "m.gguf", pairs, BOMBS[name])
    with file.open("ab") as content:
        content.truncate(5_000_000)
    open_gguf(file)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=r"ffn_gate_exps\.weight has \d+ experts; at most"):
            read(file)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_as_many_experts_as_a_model_may_have_are_named(tmp_path: Path) -> None:
    pairs = {"llama.expert_count": (4, struct.pack("<I", 9))}
    file = write(tmp_path / "m.gguf", pairs, {"blk.0.ffn_gate_exps.weight": [32, 1, 1024]})
    with file.open("ab") as content:
        content.truncate(100_000)
    assert len(open_checkpoint(file)) == len(block_types(file)) == 1024
    file = write(tmp_path / "n.gguf", pairs, {"blk.0.ffn_gate_exps.weight": [32, 1, 1025]})
    with file.open("ab") as content:
        content.truncate(100_000)
    with pytest.raises(ModelLoadError, match="has 1025 experts"):
        open_checkpoint(file)


@pytest.mark.parametrize(
    "value",
    [
        (8, text("x")),
        (9, struct.pack("<IQI", 4, 1, 16)),
        (4, struct.pack("<I", 0)),
        (4, struct.pack("<I", 33)),
        (6, struct.pack("<f", float("nan"))),
        (7, b"\x01"),
    ],
    ids=["text", "list", "zero", "larger than a head", "nan", "boolean"],
)
def test_rotated_dimensions_that_are_none_are_refused(
    value: tuple[int, bytes], tmp_path: Path
) -> None:
    sizes = {"block_count": 1, "embedding_length": 64, "attention.head_count": 2}
    pairs = {f"llama.{key}": (4, struct.pack("<I", size)) for key, size in sizes.items()}
    pairs["llama.rope.dimension_count"] = value
    file = write(tmp_path / "m.gguf", pairs, {"token_embd.weight": [64, 4]})
    with pytest.raises(ModelLoadError, match=r"rope\.dimension_count must be from 1 to 32"):
        load_config(file)
