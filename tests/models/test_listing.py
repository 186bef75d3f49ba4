"""A model's program as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from src.cli.main import main
from src.core.settings import CHECKOUT
from src.models import outline_model
from src.models.listing import program_lines
from src.models.loading.options import LoadOptions
from tests.support.checkpoints import make_checkpoint
from tests.support.families import SHORT_SIGHTED


def listed(path: Path, **options: Any) -> list[str]:
    return program_lines(outline_model(path, LoadOptions(**options), outlines_tables=True))


def test_the_demo_model_is_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["program", str(CHECKOUT / "configs" / "demo")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 50
    assert lines[0] == "LlamaForCausalLM, float32"
    assert lines[1] == "inputs: input_ids [T] int64, positions [T] int64"
    assert "[attention] query, key, value -> attended [T, 256] float32" in lines
    assert "    layers.0.qkv_weight [512, 192] float32" in lines
    assert "        [256, 384] model.layers.0.self_attn.k_proj.weight" in lines
    # Layers that differ in their number alone stand once.
    assert "... and 3 more of the same 4 steps" in lines
    assert not any("layers.1." in line for line in lines)


@pytest.mark.parametrize("family", SHORT_SIGHTED)
def test_every_family_names_each_parameter_and_mixer(family: str, tmp_path: Path) -> None:
    model = outline_model(make_checkpoint(tmp_path / "tiny", family), outlines_tables=True)
    lines = program_lines(model)
    text = "\n".join(lines)
    kinds = {mixer.kind for mixer in model.mixers}
    assert all(f"[{kind}] " in text for kind in kinds)
    functions = [each for call in model.program.calls for each in call.chain.functions]
    assert all(f"{function.__name__}  " in text for function in functions)
    # All of a layer that stands there, and what layers share.
    shown = {line.split()[0] for line in lines if line.startswith("    ") and "[" in line}
    apart = [name for name in model.table if not name.startswith("layers.")]
    assert set(apart) <= shown
    first = [name for name in model.table if name.startswith("layers.0.")]
    assert set(first) <= shown


def test_encodings_are_named() -> None:
    lines = listed(CHECKOUT / "configs" / "demo", quantization="int8")
    parts = "(values [512, 192] int8, scales [512] float32)"
    assert f"    layers.0.qkv_weight [512, 192] int8 per row {parts}" in lines
    assert "    layers.0.input_norm [192] float32" in lines
