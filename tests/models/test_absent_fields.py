"""A field that `config.json` leaves out means what it means to transformers, for every family.

transformers always writes all fields, so checkpoints that it has made never lack one; files that
people write, or that older versions wrote, do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from src.core.errors import ModelLoadError
from src.models import ModelConfig, load_config
from tests.support.checkpoints import CLASSES, make_checkpoint

# What says which model it is, and how large: there is no model without one of these.
NAMES = ("architectures", "model_type", "transformers_version")
SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types"),
    *("num_attention_heads", "num_key_value_heads", "num_local_experts", "num_experts_per_tok"),
    *("n_group", "topk_group", "mamba_n_heads", "linear_num_key_heads"),
}
Fields = dict[str, Any]


def read(directory: Path, fields: Mapping[str, Any]) -> ModelConfig | str:
    """What the fields describe, or why they describe nothing."""
    (directory / "config.json").write_text(json.dumps(fields, default=str))
    try:
        return load_config(directory)
    except ModelLoadError as error:
        return str(error)


def completed(directory: Path, fields: Mapping[str, Any]) -> Fields | None:
    """The same fields, and those that transformers adds; ``None`` if it refuses them."""
    (directory / "config.json").write_text(json.dumps(fields))
    try:
        known = transformers.AutoConfig.from_pretrained(directory).to_dict()
    except Exception:
        return None
    return known | {"architectures": fields["architectures"]}


def with_less(raw: Fields) -> Iterator[tuple[str, Fields]]:
    """Each field left out, also without the lists of layers that transformers makes of others."""
    lists = {name for name, value in raw.items() if isinstance(value, list) and name not in NAMES}
    for without in ({}, lists):
        for name in raw:
            if name not in NAMES:
                yield name, {k: v for k, v in raw.items() if k != name and k not in without}


@pytest.mark.parametrize("family", CLASSES)
def test_a_field_that_is_left_out_is_as_transformers_has_it(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, family)
    raw = json.loads((directory / "config.json").read_text())
    compared = 0
    for name, fields in with_less(raw):
        ours, whole = read(directory, fields), completed(directory, fields)
        if isinstance(ours, str):
            # Said and not guessed. So few layers may all be recurrent without the list.
            assert name in SIZES or "layer_types must be" in ours, ours
            continue
        if whole is not None and not isinstance(theirs := read(directory, whole), str):
            assert ours == theirs, f"without {name}"
            compared += 1
    assert compared > len(raw) // 2
