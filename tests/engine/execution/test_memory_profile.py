"""The largest step is computed before KV memory is taken, and what it takes is left for steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from src.core.config import SpeculationSection
from src.core.errors import ConfigError
from src.core.start_timeline import StartTimeline
from src.engine import startup
from src.engine.devices import open_device
from src.engine.drafters.loading import load_drafts, taps_for
from src.engine.execution import memory_profile
from src.engine.execution.forward_pass import ForwardPass
from src.engine.execution.kv_cache import plan_kv_cache
from src.engine.execution.kv_groups import lay_out
from src.engine.execution.memory_profile import compute_largest_step, step_bytes
from src.engine.execution.pooling import RowPooling
from src.engine.sampling import SampleBatch, Sampler
from src.engine.sampling.truncation import truncate_long, truncate_short
from src.engine.sizing import start
from src.engine.sizing.shape_gauge import ShapeGauge
from src.models import Model, load_model
from src.models.loading.options import LoadOptions
from tests.support.checkpoints import make_checkpoint
from tests.support.classifiers import SEQUENCE, TOKEN, make_classifier
from tests.support.drafts import make_eagle3, make_mtp
from tests.support.engines import small_config
from tests.support.families import SHORT_SIGHTED

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")


class Gauge:
    """Says what it is told to, and notes what it is asked."""

    def __init__(self, says: int = 0) -> None:
        self.says = says
        self.asked: list[str] = []

    def begin(self) -> None:
        self.asked.append("begin")

    def peak(self) -> int:
        self.asked.append("peak")
        return self.says


@pytest.fixture
def model(checkpoint: Path) -> Model:
    return load_model(checkpoint, LoadOptions(dtype="float32", device=CPU, load_format="dummy"))


def config(checkpoint: Path, **changes: Any) -> Any:
    return small_config(
        checkpoint,
        **{"scheduler__max_num_seqs": 5, "scheduler__max_num_batched_tokens": 96, **changes},
    )


def test_it_has_as_many_tokens_and_rows_as_there_may_be(
    checkpoint: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    batches: list[tuple[torch.Size, SampleBatch]] = []
    paths: list[object] = []
    forward, sample = ForwardPass.__call__, Sampler.sample

    def noted_forward(self: ForwardPass, inputs: Any, functions: Any) -> Any:
        tokens.append(len(inputs.input_ids_t))
        return forward(self, inputs, functions)

    def noted_sample(self: Sampler, logits: Any, batch: Any, rows: Any) -> Any:
        batches.append((logits.shape, batch))
        output = sample(self, logits, batch, rows)
        # It goes the longest way: nothing is left out that takes memory.
        selection = self._select(batch.rows)
        assert selection.penalties
        assert selection.truncated
        paths.extend(part.apply for part in selection.truncated)
        assert selection.scored
        return output

    monkeypatch.setattr(ForwardPass, "__call__", noted_forward)
    monkeypatch.setattr(Sampler, "sample", noted_sample)
    with torch.inference_mode():
        compute_largest_step(config(checkpoint, model__tasks=("generate",)), model)
    assert tokens == [96]
    # Neither way to truncate takes as much as the other for every model.
    assert paths == [truncate_short, truncate_long]
    assert len(batches) == 2
    for shape, batch in batches:
        assert shape == (5, model.spec.vocab_size)
        assert batch.mask is not None
        assert batch.mask.shape == shape
        assert max(batch.positions) == model.spec.max_positions - 1


@pytest.mark.parametrize(("method", "positions"), [("off", 5), ("suffix", 64)])
def test_logits_of_drafts_are_counted(
    method: str, positions: int, checkpoint: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    sample = Sampler.sample

    def noted(self: Sampler, logits: Any, batch: Any, rows: Any) -> Any:
        shapes.append((len(logits), len(batch.rows), max(batch.rows)))
        return sample(self, logits, batch, rows)

    monkeypatch.setattr(Sampler, "sample", noted)
    section = SpeculationSection(method=method)  # type: ignore[arg-type]
    asked = msgspec.structs.replace(config(checkpoint), speculation=section)
    with torch.inference_mode():
        compute_largest_step(asked, model)
    assert shapes == [(positions, positions, 4)] * 2


def pooled_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is pooled from now on: tasks, poolings, tokens of the rows, and how they are added."""
    seen: list[tuple[Any, ...]] = []
    pool = RowPooling.pool

    def noted(self: RowPooling, plan: Any, hidden: torch.Tensor) -> Any:
        asked = {(each.task, each.pooling) for each in self._of_rows if each is not None}
        seen.append((asked, sum(row.num_tokens for row in plan.rows), self._deterministic))
        return pool(self, plan, hidden)

    monkeypatch.setattr(RowPooling, "pool", noted)
    return seen


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("tasks", "asked"),
    [
        ("auto", [("embed", "mean"), ("token_embed", "all")]),
        (("generate", "embed"), [("embed", "mean")]),
        (("generate",), []),
    ],
)
def test_a_model_that_gives_vectors_pools_as_many_tokens_as_there_may_be(
    tasks: Any,
    asked: list[tuple[str, str]],
    deterministic: bool,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = LoadOptions(
        dtype="float32",
        device=CPU,
        load_format="dummy",
        deterministic=deterministic,
        # So that several rows have them.
        max_model_len=40,
    )
    seen = pooled_steps(monkeypatch)
    with torch.inference_mode():
        compute_largest_step(
            config(checkpoint, model__tasks=tasks), load_model(checkpoint, options)
        )
    assert seen == [({each}, 96, deterministic) for each in asked]


@pytest.mark.parametrize("ending", [SEQUENCE, TOKEN])
def test_a_classifier_pools_what_its_head_reads(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_classifier(tmp_path, "bert", ending, labels=5)
    model = load_model(directory, LoadOptions(dtype="float32", device=CPU, load_format="dummy"))
    seen, heads = pooled_steps(monkeypatch), []
    logits = type(model).logits

    def noted(self: Any, functions: Any, hidden: torch.Tensor) -> torch.Tensor:
        made = logits(self, functions, hidden)
        heads.append(tuple(made.shape))
        return made

    monkeypatch.setattr(type(model), "logits", noted)
    with torch.inference_mode():
        compute_largest_step(config(directory), model)
    if ending == TOKEN:
        assert seen == [({("token_classify", "all")}, 96, False)]
        assert heads[0] == (96, 5)
    else:
        assert [tokens for _, tokens, _ in seen] == [96]
        assert {task for task, _ in seen[0][0]} == {"classify"}
        assert heads[0] == (1, 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tasks", ["auto", ("generate", "token_embed")])
def test_results_of_all_tokens_are_counted_until_they_are_copied(
    dtype: Any, tasks: Any, checkpoint: Path
) -> None:
    """They are there while the next step is computed, and so is their copy for the host before."""
    tokens, dummy = 2048, LoadOptions(dtype=dtype, load_format="dummy", max_model_len=128)
    model = load_model(checkpoint, dummy)

    def peak(tasks: Any) -> int:
        gauge = ShapeGauge(CPU)
        asked = config(
            checkpoint,
            scheduler__max_num_batched_tokens=tokens,
            model__max_model_len=128,
            model__tasks=tasks,
        )
        with torch.inference_mode(), gauge:
            compute_largest_step(asked, model)
        return gauge.peak

    hidden = tokens * model.spec.hidden_size * model.spec.dtype.itemsize
    assert peak(tasks) - peak(("generate",)) >= hidden


def test_layers_may_have_block_tables_of_several_groups(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gemma2", **SHORT_SIGHTED["gemma2"])
    model = load_model(directory, LoadOptions(dtype="float32", device=CPU, load_format="dummy"))
    assert len(lay_out(model.kv_cache_spec(), 16).groups) > 1
    with torch.inference_mode():
        compute_largest_step(config(directory), model)


def test_what_it_takes_is_the_peak_of_the_step(
    checkpoint: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge = Gauge(12345)
    real = compute_largest_step

    def noted(*arguments: Any) -> None:
        gauge.asked.append("step")
        real(*arguments)

    monkeypatch.setattr(memory_profile, "compute_largest_step", noted)
    device = open_device(CPU)
    assert step_bytes(config(checkpoint), device, model, gauge) == 12345
    assert gauge.asked == ["begin", "step", "peak"]
    # The host's memory is given as it is touched: there is nothing to see.
    assert step_bytes(config(checkpoint), device, model, None) == 0
    assert memory_profile.memory_gauge(CPU) is None


def test_a_step_that_never_fits_is_refused_by_its_settings(
    checkpoint: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ForwardPass, "__call__", fail)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens = 96 .*: lower them"):
        step_bytes(config(checkpoint), open_device(CPU), model, Gauge())


def test_an_engine_leaves_it_beside_kv_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge, reserved = Gauge(7_000_000), []

    def planned(*arguments: Any, **options: Any) -> Any:
        # By then it has been measured.
        assert gauge.asked == ["begin", "peak"]
        reserved.append(options["reserved_bytes"])
        return plan_kv_cache(*arguments, **options)

    monkeypatch.setattr(start, "memory_gauge", lambda _: gauge)
    monkeypatch.setattr(start, "plan_kv_cache", planned)
    timeline = StartTimeline()
    startup.build_engine(config(checkpoint), lambda *_: None, timeline).close()
    assert reserved == [7_000_000]


@pytest.mark.parametrize("source", ["eagle3", "mtp", "draft"])
def test_what_a_drafter_computes_is_part_of_the_largest_step(source: str, tmp_path: Path) -> None:
    """Its own pass of as many tokens, with those that were put off; and what it keeps meanwhile."""
    changes: dict[str, Any] = {"speculation__method": source}
    if source == "mtp":
        path = make_mtp(tmp_path / "model", "glm4_moe").path
    else:
        path = make_checkpoint(tmp_path / "model", num_hidden_layers=2)
        changes["speculation__model"] = str(tmp_path / "drafts")
        if source == "eagle3":
            make_eagle3(tmp_path / "drafts", taps=[0, 1, 2])
        else:
            # Wider than the model is.
            make_checkpoint(tmp_path / "drafts", intermediate_size=4096)
    asked = config(path, **changes)
    model = load_model(path, LoadOptions(dtype="float32", taps=taps_for(asked, path)))
    drafts = load_drafts(asked, model, None)
    assert drafts is not None
    passes: list[int] = []
    peaks = []
    run = ForwardPass.__call__

    def noted(self: ForwardPass, inputs: Any, *more: Any) -> Any:
        if self.model is not model:
            passes.append(len(inputs.input_ids_t))
        return run(self, inputs, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ForwardPass, "__call__", noted)
        for largest in (None, drafts.memory.largest):
            gauge = ShapeGauge(CPU)
            with torch.inference_mode(), gauge:
                compute_largest_step(asked, model, None, largest)
            peaks.append(gauge.peak)
    # Of 5 rows, tokens of 15 steps each may wait for a head.
    assert passes == [96 + 512 + 64 if source == "draft" else 96 + 5 * 15]
    if source == "draft":
        assert peaks[1] >= peaks[0] + (512 + 64) * 4096 * 4
    else:
        assert peaks[1] >= peaks[0] + 5 * 15 * model.spec.hidden_size * 4
