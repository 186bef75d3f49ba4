"""The bytes of a step whose tensors have shapes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.core.config import MIB
from src.engine.execution.memory_profile import compute_largest_step
from src.engine.sampling import truncation
from src.engine.sampling.truncation import (
    Truncation,
    farthest_by_mass,
    kth_by_mass,
    lowest_by_mass,
)
from src.engine.sizing.shape_gauge import ShapeGauge
from src.engine.sizing.start import _shortened
from src.models import Model, load_model, outline_model
from src.models.loading.options import LoadOptions
from src.models.weights.methods import plain
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import small_config
from tests.support.families import SHORT_SIGHTED

pytestmark = pytest.mark.timeout(120)

META = torch.device("meta")
FOUR = 4 * MIB


def empty() -> Tensor:
    """4 MiB."""
    return torch.empty(MIB, dtype=torch.float32, device=META)


def test_it_counts_what_lives_at_the_same_time() -> None:
    before = empty()
    gauge = ShapeGauge(META)
    with gauge:
        first = empty()
        assert gauge.peak == FOUR
        second = first + before
        assert gauge.peak == 2 * FOUR
        del first
        third = second * 2
        assert gauge.peak == 2 * FOUR
        fourth = third - 1
    assert gauge.peak == 3 * FOUR
    assert fourth.shape == before.shape


def test_views_and_writes_take_nothing() -> None:
    before = empty()
    gauge = ShapeGauge(META)
    with gauge:
        before.view(1024, -1).t()[3:].add_(1)
        assert gauge.peak == 0
        made = empty()
        parts = made.split(1000)
        parts[0].zero_()
        made.view(2, -1)[1].mul_(2)
    assert gauge.peak == FOUR


def test_small_tensors_take_a_whole_granule_and_other_devices_nothing() -> None:
    gauge = ShapeGauge(META)
    with gauge:
        kept = [torch.empty(1, device=META) for _ in range(3)]
        torch.zeros(MIB)
    assert gauge.peak == len(kept) * 512


CASES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "gemma2": SHORT_SIGHTED["gemma2"],
    "mixtral": {},
}


def truncate_by_mass(logits: Tensor, rows: Truncation) -> None:
    ways = (kth_by_mass, lowest_by_mass, farthest_by_mass)
    truncation._truncate_long(logits, rows, *ways)


def peak_of(model: Model, directory: Path) -> int:
    config = small_config(
        directory,
        scheduler__max_num_seqs=16,
        scheduler__max_num_batched_tokens=512,
        model__max_model_len=128,
    )
    gauge = ShapeGauge(model.spec.device)
    with torch.inference_mode(), gauge:
        compute_largest_step(config, model)
    return gauge.peak


@pytest.mark.parametrize("architecture", CASES)
def test_a_step_of_shapes_takes_what_a_step_takes(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host tensors have values, and other functions make some of them."""
    # The host has a way to truncate of its own, a row at a time.
    monkeypatch.setattr(truncation, "truncate_long", truncate_by_mass)
    directory = make_checkpoint(tmp_path / "model", architecture, **CASES[architecture])
    outline = outline_model(directory, LoadOptions(max_model_len=128), outlines_tables=True)
    real = load_model(directory, LoadOptions(load_format="dummy", max_model_len=128))
    shapes = peak_of(outline, directory)
    assert shapes == pytest.approx(peak_of(real, directory), rel=0.1)
    # More layers of a kind do not raise it.
    short = _shortened(outline)
    assert len(short.config.layers) <= len(outline.config.layers)
    assert peak_of(short, directory) == pytest.approx(shapes, rel=0.01)


def test_tables_on_the_meta_device_have_the_shape_of_computed_ones(tmp_path: Path) -> None:
    for rope in ("default", "llama3", "yarn", "longrope"):
        directory = make_checkpoint(tmp_path / rope, rope=rope)
        outlined = outline_model(directory, outlines_tables=True).buffers()
        computed = outline_model(directory).buffers()
        assert outlined
        assert {name: (one.shape, one.dtype, one.device) for name, one in outlined.items()} == {
            name: (one.shape, one.dtype, one.device) for name, one in computed.items()
        }
        assert all(plain(one).is_meta for one in outlined.values())
