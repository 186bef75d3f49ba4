"""GGUF files whose metadata has odd values: each is served, or refused by its key's name."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from src.core.errors import ModelLoadError
from src.models import load_model
from src.models.loading.loader import outline_model
from src.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import gguf, write_gguf


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


# A type's number and the bytes of a value.
ODD: dict[str, tuple[int, bytes]] = {
    "a text": (8, text("x")),
    "an empty text": (8, text("")),
    "zero": (4, struct.pack("<I", 0)),
    "minus one": (5, struct.pack("<i", -1)),
    "the largest of 32 bits": (4, struct.pack("<I", 2**32 - 1)),
    "the largest of 31 bits": (4, struct.pack("<I", 2**31 - 1)),
    "the largest of 64 bits": (10, struct.pack("<Q", 2**64 - 1)),
    "a fraction": (6, struct.pack("<f", 0.5)),
    "nan": (6, struct.pack("<f", float("nan"))),
    "infinite": (6, struct.pack("<f", float("inf"))),
    "true": (7, b"\x01"),
    "no numbers": (9, struct.pack("<IQ", 4, 0)),
    "a number in a list": (9, struct.pack("<IQI", 4, 1, 7)),
    "no texts": (9, struct.pack("<IQ", 8, 0)),
    "a text in a list": (9, struct.pack("<IQ", 8, 1) + text("x")),
    "booleans": (9, struct.pack("<IQ", 7, 2) + b"\x00\x01"),
    "floats": (9, struct.pack("<IQ2f", 6, 2, float("nan"), 1.0)),
}


def add_more(writer: gguf.GGUFWriter) -> None:
    """Keys that the usual small file does not have."""
    writer.add_eot_token_id(2)
    writer.add_eom_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_rope_dimension_count(16)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_expert_count(0)
    writer.add_name("tiny")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("of")
    checkpoint = make_checkpoint(folder / "tiny", "llama", tokenizer=True, num_hidden_layers=1)
    return write_gguf(folder / "m.gguf", checkpoint, "llama", also=add_more)


class Pieces:
    """A file in pieces, so that one value can be replaced."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        raw = path.read_bytes()
        self.pairs = {
            key: b"".join(part.tobytes() for part in field.parts[2:])
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")
        }
        first = min(field.offset for field in (each.field for each in reader.tensors))
        self.described = raw[first : self._end_of(reader, first)]
        self.count = len(reader.tensors)
        self.data = raw[min(each.data_offset for each in reader.tensors) :]

    @staticmethod
    def _end_of(reader: gguf.GGUFReader, first: int) -> int:
        return first + sum(part.nbytes for each in reader.tensors for part in each.field.parts)

    def write(self, path: Path, changes: Mapping[str, tuple[int, bytes] | None]) -> Path:
        """The file with some values replaced, or left out."""
        pairs: dict[str, bytes] = dict(self.pairs)
        for key, value in changes.items():
            if value is None:
                del pairs[key]
            else:
                pairs[key] = struct.pack("<I", value[0]) + value[1]
        content = b"GGUF" + struct.pack("<IQQ", 3, self.count, len(pairs))
        for key, packed in pairs.items():
            content += text(key) + packed
        content += self.described
        path.write_bytes(content + bytes(-len(content) % 32) + self.data)
        return path


def use(path: Path) -> None:
    """What a start does with a file."""
    outline_model(path)
    load_model(path)
    Tokenizer.from_directory(path).encode("Once upon")


def test_the_pieces_are_the_file(whole: Path, tmp_path: Path) -> None:
    again = Pieces(whole).write(tmp_path / "m.gguf", {})
    assert again.read_bytes() == whole.read_bytes()
    use(again)


KEYS = [
    "general.architecture", "general.name", "general.alignment",
    *(f"llama.{key}" for key in (
        "context_length", "block_count", "embedding_length", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.value_length", "attention.layer_norm_rms_epsilon", "vocab_size",
        "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "expert_count",
    )),
    *(f"tokenizer.ggml.{key}" for key in (
        "model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id",
        "eot_token_id", "eom_token_id", "unknown_token_id", "padding_token_id", "add_bos_token",
        "add_eos_token", "add_space_prefix",
    )),
    "tokenizer.chat_template",
]  # fmt: skip


# Keys that nothing here reads.
UNREAD = ("general.name", "llama.vocab_size", "llama.rope.scaling.original_context_length")
SLOW = 2.0  # seconds of CPU for one file, which usually takes a hundredth


@pytest.mark.parametrize("key", KEYS)
def test_an_odd_value_is_served_or_refused_by_name(key: str, whole: Path, tmp_path: Path) -> None:
    pieces, refusals = Pieces(whole), dict[str, str]()
    for what, value in ODD.items():
        path = pieces.write(tmp_path / f"{what}.gguf", {key: value})
        begun = time.thread_time()
        try:
            use(path)
        except ModelLoadError as error:
            refusals[what] = str(error)
        assert time.thread_time() - begun < SLOW, what
    # A size that is a number is held against the tensors, which are named then.
    tensors = "does not fit its metadata; tensors"
    assert not {w: text for w, text in refusals.items() if key not in text and tensors not in text}
    assert bool(refusals) == (key not in UNREAD)


@pytest.mark.parametrize(
    "keys",
    [
        ("embedding_length", "feed_forward_length"),
        ("attention.head_count", "attention.head_count_kv"),
        ("context_length", "embedding_length"),
    ],
)
def test_sizes_that_no_memory_has_are_held_against_the_tensors(
    keys: tuple[str, str], whole: Path, tmp_path: Path
) -> None:
    most = {"context_length": 2**30 - 1}
    most |= {"attention.head_count": 2**16, "attention.head_count_kv": 2**16}
    sizes = {f"llama.{key}": (4, struct.pack("<I", most.get(key, 2**24))) for key in keys}
    path = Pieces(whole).write(tmp_path / "m.gguf", sizes)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match="does not fit its metadata; tensors"):
            load_model(path)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_layers_that_no_tensor_is_of_are_refused_before_they_are_written(
    whole: Path, tmp_path: Path
) -> None:
    pieces = Pieces(whole)
    for count in (2, 1024):
        path = pieces.write(
            tmp_path / f"{count}.gguf", {"llama.block_count": (4, struct.pack("<I", count))}
        )
        begun = time.thread_time()
        with pytest.raises(ModelLoadError, match=rf"llama\.block_count = {count}, but there is no"):
            load_model(path)
        assert time.thread_time() - begun < SLOW


def test_a_file_without_a_list_of_kinds_or_merges_is_refused_by_its_key(
    whole: Path, tmp_path: Path
) -> None:
    pieces = Pieces(whole)
    path = pieces.write(tmp_path / "m.gguf", {"tokenizer.ggml.model": (8, text("llama"))} | {
        f"tokenizer.ggml.{key}": None for key in ("merges", "token_type")
    })  # fmt: skip
    with pytest.raises(ModelLoadError, match="its tokenizer has neither merges nor scores"):
        Tokenizer.from_directory(path)
