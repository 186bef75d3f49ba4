"""Adapters' files that were made to hurt: one clear error each, at once."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import ModelLoadError
from src.models.adapters.peft_config import PeftConfig, read_peft_config
from src.models.checkpoint import read_header
from tests.support.slowness import own_time, slowness

MODULE = "model.layers.12.self_attn.q_proj"


def configured(directory: Path, **fields: Any) -> PeftConfig:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return read_peft_config(directory, 16)


# The last field says whether PEFT's `get_pattern_key` matches MODULE.
@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", True),
        ("q.proj", True),
        (r"q\.proj", False),
        (r"layers\.\d\d\.self_attn\.q_proj", True),
        (r"layers\.\d\.self_attn\.q_proj", False),
        (r"layers.\w\w.self_attn.q_proj", True),
        ("^q_proj", False),
        (f"^{MODULE}$", True),
        ("proj", False),
        ("q_proj$", True),
    ],
)
def test_patterns_match_as_in_peft(tmp_path: Path, pattern: str, matches: bool) -> None:
    config = configured(tmp_path, alpha_pattern={pattern: 32}, rank_pattern={pattern: 4})
    assert config.rank_of(MODULE) == (4 if matches else 8)
    assert config.scale_of(MODULE) == (8 if matches else 1)


@pytest.mark.parametrize("pattern", [r"\bq_proj", r"q_proj\Z", "q_proj|k_proj", "q_(proj)", "\\"])
def test_a_pattern_that_would_be_read_otherwise_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ModelLoadError, match="alpha_pattern must give numbers for names"):
        configured(tmp_path, alpha_pattern={pattern: 32})


def test_patterns_are_bounded(tmp_path: Path) -> None:
    assert configured(tmp_path, alpha_pattern={f"m{i}": 1 for i in range(4096)}).rank == 8
    with pytest.raises(ModelLoadError, match="alpha_pattern has 4097 patterns, at most 4096"):
        configured(tmp_path, alpha_pattern={f"m{i}": 1 for i in range(4097)})


def entry(shape: str, offsets: str = "[0, 4]", dtype: str = '"F32"') -> str:
    return f'{{"a": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}}}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entry("[1e999]"), "header of a is malformed"),
        (entry("[1]", "[0, 1e999]"), "header of a is malformed"),
        (entry("[1]", "[4, 0]"), "header of a is malformed"),
        (entry("[1]", "[0]"), "header of a is malformed"),
        (entry('"1"'), "header of a is malformed"),
        (entry("[true]"), "header of a is malformed"),
        (entry("[-1]"), "header of a is malformed"),
        (entry(f"[{2**63}]"), "header of a is malformed"),
        (entry(str([2**62] * 16)), "takes .* bytes, the header says 4"),
        (entry(str([1] * 17)), "header of a is malformed"),
        (entry("[1]", dtype='"' + "X" * 10**6 + '"'), "a has dtype XXX"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ("[]", "not an object"),
    ],
)
def test_headers_that_are_none(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(64))
    with pytest.raises(ModelLoadError, match=message) as refusal:
        read_header(path)
    assert len(str(refusal.value)) < 1000


def test_a_product_of_large_sizes_is_never_computed(tmp_path: Path) -> None:
    # It took a quarter of a minute with these 1.6 MB, during which no other thread ran.
    header = entry("[" + ",".join(["9" * 4000] * 400) + "]").encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with own_time() as spent:
        with pytest.raises(ModelLoadError, match="header of a is malformed"):
            read_header(path)
        assert spent() < 3 * slowness()
