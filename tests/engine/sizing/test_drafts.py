"""Memory counts drafts where somebody drafts, and a plan says what a start says of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from src import AsyncEngine
from src.core.config import MIB, Config
from src.core.errors import ConfigError, ModelLoadError
from src.core.memory_report import memory_lines
from src.core.task import TASKS
from src.engine.execution import kv_cache
from src.engine.execution.memory_profile import most_tokens
from src.engine.sizing import device_table
from src.engine.sizing.answer import ModelPlan
from src.engine.sizing.planning import Question, outline_of, plan_model
from src.engine.sizing.roofline import Roofline
from src.models import load_model
from src.models.tasks import find_tasks, may_generate
from src.text import Tokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.classifiers import make_classifier
from tests.support.drafts import make_mtp
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules
from tests.support.engines import small_config
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

HISTORY: Final = {"speculation__shared_history_bytes": 50_000}


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory does not change between the plan and the start, and nothing is measured."""
    for module in (kv_cache, device_table):
        monkeypatch.setattr(module, "available_memory", lambda: 512 * MIB)
    limits = Roofline(bandwidth=20e9, flops=2e11)
    monkeypatch.setattr(device_table, "measure", lambda device, dtype: limits)


def config(path: Path, method: str, **changes: Any) -> Config:
    settings = {"compile__enforce_eager": True, "speculation__method": method} | changes
    return small_config(path, **settings)


def encoder(directory: Path) -> Path:
    make_encoder(directory, "bert")
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling={"pooling_mode": "mean"})
    return directory


def classifier(directory: Path) -> Path:
    return make_classifier(directory, "qwen3")


def embedder(directory: Path) -> Path:
    return make_checkpoint(directory, "qwen3", tokenizer=True)


SILENT: Final[dict[str, tuple[Callable[[Path], Path], dict[str, Any]]]] = {
    "an encoder": (encoder, {}),
    "a classifier": (classifier, {}),
    "a decoder that embeds alone": (embedder, {"model__tasks": ("embed",)}),
}


def told(plan: ModelPlan) -> str:
    """What a plan says of drafts."""
    return "; ".join(note for note in plan.notes if "draft" in note)


@pytest.mark.parametrize("kind", SILENT)
async def test_a_model_that_does_not_generate_has_no_drafters(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, settings = SILENT[kind]
    path = make(tmp_path)
    caplog.set_level(logging.INFO)
    asked = config(path, "auto", **HISTORY, **settings)
    off = config(path, "off", **settings)
    async with AsyncEngine.open(asked) as engine:
        probe = Probe(engine)
        assert probe.worker.draft_counts is None
        assert probe.parts.scheduler.limits.drafts == 0
        report = engine.inspector.memory
    assert "speculation is off: the model does not generate" in caplog.text
    plan = plan_model(asked, Question())
    assert "nothing drafts: the model does not generate" in told(plan)
    assert report.history == 0
    lines = memory_lines(plan_model(off, Question()).memory)
    assert memory_lines(plan.memory) == lines
    assert memory_lines(report)[:-1] == lines[:-1]
    named = config(path, "suffix", **settings)
    reason = r"speculation\.method = suffix cannot be served: the model does not generate"
    with pytest.raises(ConfigError, match=reason):
        plan_model(named, Question())
    with pytest.raises(ConfigError, match=reason):
        async with AsyncEngine.open(named):
            pass


@pytest.mark.parametrize("kind", [*SILENT, "a decoder"])
@pytest.mark.parametrize("wish", ["auto", *TASKS])
def test_whether_a_model_generates_is_known_before_its_tasks_are(
    kind: str, wish: Any, tmp_path: Path
) -> None:
    path = embedder(tmp_path) if kind == "a decoder" else SILENT[kind][0](tmp_path)
    model, wish = load_model(path), wish if wish == "auto" else (wish,)
    try:
        found = find_tasks(
            path,
            model,
            Tokenizer.from_directory(path),
            wish,
            context=64,
            is_encoder=kind == "an encoder",
        )
    except (ConfigError, ModelLoadError):
        return
    assert may_generate(model, wish) == ("generate" in found.tasks)


def test_a_gpu_counts_drafts_only_if_they_are_asked_for_by_name(tmp_path: Path) -> None:
    """Logits of drafts in the largest step, and graphs of steps with drafts."""
    path = make_checkpoint(tmp_path, "llama", tokenizer=True, vocab_size=4000)
    question = Question(device="h100-80gb")
    # Few rows, and few tokens: logits are what the largest step takes.
    changes = {"scheduler__max_num_seqs": 2, "scheduler__max_num_batched_tokens": 64}
    plans = {
        method: plan_model(config(path, method, compile__enforce_eager=False, **changes), question)
        for method in ("off", "auto", "suffix")
    }
    assert memory_lines(plans["auto"].memory) == memory_lines(plans["off"].memory)
    assert plans["suffix"].memory.step > plans["off"].memory.step
    assert plans["suffix"].memory.graphs > plans["off"].memory.graphs
    with pytest.raises(ConfigError, match=r"draft cannot be served: it needs device\.type = cpu"):
        plan_model(config(path, "draft", speculation__model=str(path)), question)


@pytest.mark.parametrize(
    ("family", "changes", "again"),
    [
        ("llama", {}, 0),
        ("granite_moehybrid", {}, 64),
        ("granite_moehybrid", {"model__tasks": ("embed",)}, 0),
    ],
)
def test_tokens_are_computed_again_where_states_are_and_somebody_drafts(
    family: str, changes: dict[str, Any], again: int, tmp_path: Path
) -> None:
    asked = config(make_checkpoint(tmp_path, family), "auto", **changes)
    planned = asked.scheduler.max_num_batched_tokens
    assert most_tokens(asked, outline_of(asked)) == planned + again


@pytest.mark.parametrize(("slots", "backups"), [(12, 0), (13, 1)])
async def test_drafts_nobody_has_asked_for_leave_few_snapshots_alone(
    slots: int, backups: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, "granite_moehybrid", tokenizer=True)
    changes: dict[str, Any] = {"scheduler__max_num_seqs": 40, "model__max_model_len": 16}
    off = config(path, "off", **changes)
    async with AsyncEngine.open(off) as engine:
        states = Probe(engine).parts.kv_plan.states
    assert states is not None
    changes["cache__memory_bytes"] = 2 * slots * states.bytes_per_slot
    plans = {}
    caplog.set_level(logging.INFO)
    for method in ("off", "auto"):
        asked = config(path, method, **changes, **HISTORY)
        planned = plan_model(asked, Question())
        async with AsyncEngine.open(asked) as engine:
            probe = Probe(engine)
            states = probe.parts.kv_plan.states
            assert states is not None
            assert (probe.worker.draft_counts is not None) == (method == "auto" and backups > 0)
            assert planned.memory.kv == engine.inspector.memory.kv
            assert planned.memory.history == engine.inspector.memory.history
            plans[method] = states
    reason = "memory has too few slots of recurrent states to spare"
    assert (reason in told(planned)) == (reason in caplog.text) == (backups == 0)
    assert plans["auto"].num_backups == backups
    assert plans["auto"].num_rows == plans["off"].num_rows
    assert plans["auto"].num_snapshots == plans["off"].num_snapshots - backups
    if not backups:
        assert planned.memory.history == 0


@pytest.mark.parametrize("is_fixed", [True, False])
async def test_a_layer_that_does_not_fit_is_left_out_unless_it_is_asked_for(
    is_fixed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_mtp(tmp_path, "glm4_moe", tokenizer=True).path
    # As many blocks of the model's own layers as the context takes; with the layer there are fewer.
    longest = plan_model(config(path, "off"), Question()).memory.kv
    assert longest is not None
    each = longest.bytes // longest.num_blocks
    needed = each * (longest.max_model_len // longest.block_size + 1)
    changes: dict[str, Any] = {"cache__memory_bytes": needed}
    if is_fixed:
        changes["model__max_model_len"] = longest.max_model_len
    asked = config(path, "auto", **changes)
    caplog.set_level(logging.WARNING)
    async with AsyncEngine.open(asked) as engine:
        report = engine.inspector.memory
        counts = Probe(engine).worker.draft_counts
    assert counts is not None
    [line] = [
        each.getMessage() for each in caplog.records if "the drafter mtp" in each.getMessage()
    ]
    # What was sized with the layer is not said, because it is not so.
    assert "context lowered" not in caplog.text
    reason = line.removeprefix("the drafter mtp that the checkpoint brings is not used: ")
    plan = plan_model(asked, Question())
    assert memory_lines(plan.memory)[:-1] == memory_lines(report)[:-1]
    assert "MTP layer" not in [part.name for part in report.weights]
    assert "(auto): prediction, suffix; they take logits only" in told(plan)
    assert reason in told(plan)
    without = plan_model(config(path, "off", **changes), Question()).memory
    assert memory_lines(plan.memory) == memory_lines(without)
    assert without.kv is not None
    assert without.kv.max_model_len == longest.max_model_len
    # It is served by its name, with a shorter context; where that is fixed it is refused.
    named = config(path, "mtp", **changes)
    if is_fixed:
        with pytest.raises(ConfigError, match="does not fit KV memory"):
            async with AsyncEngine.open(named):
                pass
    else:
        async with AsyncEngine.open(named) as engine:
            assert engine.model_info.max_model_len < longest.max_model_len
    # With room for both it is there.
    roomy = config(path, "auto", **(changes | {"cache__memory_bytes": 2 * needed}))
    async with AsyncEngine.open(roomy) as engine:
        parts = engine.inspector.memory.weights
    assert "MTP layer" in [part.name for part in parts]


@pytest.mark.parametrize(
    ("tokens", "refused"),
    [
        # As at a start, which knows both tokenizers: only the padding of vocabularies may differ.
        ("the same", None),
        ("others", r"token 2 must be '<\|im_end\|>', as the model's, got '<\|im_stop\|>'"),
        ("unknown", "vocab_size must be 320, as the model's, got 352"),
    ],
)
async def test_a_plan_and_a_start_compare_tokens_of_vocabularies(
    tokens: str, refused: str | None, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / "model", tokenizer=True)
    draft = make_checkpoint(tmp_path / "draft", vocab_size=352, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json") if tokens != "unknown" else ():
        text = (path / name).read_text()
        (draft / name).write_text(
            text.replace("<|im_end|>", "<|im_stop|>") if tokens == "others" else text
        )
    asked = config(path, "draft", speculation__model=str(draft))
    if refused is None:
        assert "draft; their weights and KV are counted above" in told(
            plan_model(asked, Question())
        )
        async with AsyncEngine.open(asked):
            pass
        # With a directory that has no tokenizer, sizes are all that is known.
        (path / "tokenizer.json").unlink()
        refused = "vocab_size must be 320"
        with pytest.raises(ConfigError, match=refused):
            plan_model(asked, Question())
        return
    with pytest.raises(ConfigError, match=refused):
        plan_model(asked, Question())
    with pytest.raises(ConfigError, match=refused):
        async with AsyncEngine.open(asked):
            pass
