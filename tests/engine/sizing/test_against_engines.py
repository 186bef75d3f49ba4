"""What is planned from a configuration alone is what an engine takes when it starts."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors import safe_open

from src import AsyncEngine
from src.core.config import MIB, Config
from src.core.errors import ModelLoadError
from src.core.memory_report import MemoryReport, memory_lines
from src.engine.execution import kv_cache
from src.engine.sizing import device_table
from src.engine.sizing.planning import Question, plan_model
from src.engine.sizing.roofline import Roofline
from src.engine.speculation.history import SharedHistory
from src.ops.build.kernels import ensure_built
from tests.architectures.tiny import make_tiny
from tests.models.test_packing import LEFT_OUT, Checkpoints
from tests.models.test_quantized_checkpoints import ROUNDED, WEIGHT_ONLY
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import small_config
from tests.support.families import SHORT_SIGHTED
from tests.support.gguf_files import Type, write_gguf
from tests.support.probe import Probe
from tests.support.quantized import awq, write_quantized

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

# (architecture, fields of its configuration, settings)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "a tied head": ("qwen2", {"tie": True}, {"cache__memory_fraction": 0.1}),
    "groups of layers": ("gemma2", SHORT_SIGHTED["gemma2"], {"cache__memory_fraction": 0.1}),
    "experts": ("mixtral", {}, {"cache__num_blocks": 100}),
    "int8": ("llama", {}, {"model__quantization": "int8"}),
    "int4, tied": ("llama", {"tie": True}, {"model__quantization": "int4"}),
    "a cache in int8": ("gemma2", SHORT_SIGHTED["gemma2"], {"cache__dtype": "int8"}),
    "a fixed context": ("llama", {}, {"model__max_model_len": 77}),
}


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory does not change between the plan and the start, and nothing is measured."""
    for module in (kv_cache, device_table):
        monkeypatch.setattr(module, "available_memory", lambda: 512 * MIB)
    limits = Roofline(bandwidth=20e9, flops=2e11)
    monkeypatch.setattr(device_table, "measure", lambda device, dtype: limits)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Config]:
    architecture, fields, settings = CASES[request.param]
    directory = make_checkpoint(tmp_path / "model", architecture, tokenizer=True, **fields)
    # What is rounded, and how, depends on the kernels.
    ensure_built(wait=True)
    return directory, small_config(directory, compile__enforce_eager=True, **settings)


def taken_by(engine: AsyncEngine) -> tuple[int, int]:
    """Bytes of the tensors of weights, and of keys and values."""
    probe = Probe(engine)
    weights = {id(one): one.nbytes for one in probe.model.parameters().values()}
    return sum(weights.values()), sum(one.nbytes for one in probe.kv_cache.memory)


async def test_a_plan_is_what_an_engine_takes(case: tuple[Path, Config]) -> None:
    _, config = case
    plan = plan_model(config, Question())
    assert plan.fits
    memory = plan.memory
    assert memory.kv is not None
    async with AsyncEngine.open(config) as engine:
        weights, kv = taken_by(engine)
        started = engine.inspector.memory
        length = engine.model_info.max_model_len
    assert memory.weight_bytes == pytest.approx(weights, rel=0.03)
    assert memory.kv.bytes == pytest.approx(kv, rel=0.03)
    assert memory.weight_bytes + memory.kv.bytes == pytest.approx(weights + kv, rel=0.03)
    assert memory.kv.max_model_len == length
    # The start's own report has the same parts.
    assert [part.name for part in started.weights] == [part.name for part in memory.weights]
    assert started.weight_bytes == weights
    assert started.kv is not None
    assert started.kv.bytes == kv
    assert started.kv.groups == memory.kv.groups
    assert started.kv.dtype == memory.kv.dtype
    assert started.tables == memory.tables


@pytest.mark.parametrize("kind", ["awq", "mxfp4"])
async def test_packed_experts_are_planned_as_they_are_held(tmp_path: Path, kind: str) -> None:
    if kind == "mxfp4":
        directory = Checkpoints(tmp_path, LEFT_OUT, {0, 1, 2}, tokenizer=True).packed
    else:
        plain = make_checkpoint(tmp_path / "plain", "mixtral", tokenizer=True)
        section = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
        chosen = re.compile(r"(self_attn\.\w_proj|experts\.\d+\.\w+)\.weight$")
        directory = write_quantized(plain, tmp_path / "packed", section, awq(32), chosen=chosen)
    config = small_config(directory, compile__enforce_eager=True, cache__num_blocks=100)
    memory = plan_model(config, Question()).memory
    async with AsyncEngine.open(config) as engine:
        weights, _ = taken_by(engine)
        started = engine.inspector.memory
    assert memory.weight_bytes == pytest.approx(weights, rel=0.03)
    of_part = [{part.name: part.bytes for part in each.weights} for each in (memory, started)]
    assert of_part[0] == of_part[1]
    (experts,) = (part for part in started.weights if part.name == "experts")
    # The model is in float32; beside the experts there are their biases and routers.
    assert experts.bytes < experts.parameters * 4 / 4


# Checkpoints that are quantized: a section and how it packs, or a file's types of tensors.
STORED: dict[str, Any] = {
    **{f"fp8 {name}": ROUNDED[name][:2] for name in ("fp8", "fp8-static", "fp8-blocks", "fbgemm")},
    **{
        name: WEIGHT_ONLY[name][:2]
        for name in ("awq", "gptq", "gptq-order", "gptq-v2-8-bits-by-16")
    },
    **{name: WEIGHT_ONLY[name][:2] for name in ("packed", "packed-zeros", "int8", "fp8-rows")},
    "w8a8-int8": ROUNDED["w8a8-int8"][:2],
    "Q4_1": lambda name: Type.Q4_1,
    "Q4_K and Q6_K": lambda name: Type.Q6_K if "ffn_down" in name or "embd" in name else Type.Q4_K,
    "Q8_0 and F16": lambda name: Type.F16 if "attn" in name else Type.Q8_0,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", STORED)
async def test_a_plan_of_a_quantized_checkpoint_is_what_an_engine_takes(
    tmp_path: Path, name: str, tied: bool
) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    plain = make_checkpoint(tmp_path / "plain", tokenizer=True, tie=tied, **shape)
    if callable(STORED[name]):
        path = write_gguf(tmp_path / "m.gguf", plain, "llama", STORED[name])
    else:
        path = write_quantized(plain, tmp_path / "model", *STORED[name])
    ensure_built(wait=True)
    config = small_config(path, compile__enforce_eager=True, cache__num_blocks=64)
    memory = plan_model(config, Question()).memory
    async with AsyncEngine.open(config) as engine:
        weights, _ = taken_by(engine)
        started = engine.inspector.memory
    assert memory.weight_bytes == pytest.approx(weights, rel=0.03)
    assert started.weight_bytes == weights
    assert [part.name for part in started.weights] == [part.name for part in memory.weights]


@pytest.mark.parametrize("method", ["off", "suffix"])
async def test_recurrent_states_are_planned_too(method: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "granite_moehybrid", tokenizer=True)
    config = small_config(
        directory,
        compile__enforce_eager=True,
        cache__memory_bytes=MIB,
        model__max_model_len=64,
        speculation__method=method,
    )
    planned = plan_model(config, Question()).memory.kv
    assert planned is not None
    async with AsyncEngine.open(config) as engine:
        parts = Probe(engine).parts
        states = parts.kv_plan.states
        assert states is not None
        assert (states.num_backups > 0) == (method == "suffix")
        assert (
            planned.bytes == parts.kv_plan.total_bytes == taken_by(engine)[1] + states.total_bytes
        )
        assert planned.requests_at_once <= states.num_rows


def test_parameters_are_those_of_the_files(case: tuple[Path, Config]) -> None:
    directory, config = case
    plan = plan_model(config, Question())
    with safe_open(directory / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.offset_keys()}
    stored = {name: math.prod(shape) for name, shape in shapes.items()}
    reference = load_reference(directory)
    assert sum(stored.values()) == reference.num_parameters()
    # A tied head that is rounded is a matrix of its own.
    if config.model.quantization and reference.config.tie_word_embeddings:
        stored["head"] = stored["model.embed_tokens.weight"]
    assert plan.memory.num_parameters == sum(stored.values())
    of_part = {part.name: part.parameters for part in plan.memory.weights}
    attention = sum(
        count for name, count in stored.items() if re.search(r"self_attn\.\w_proj\.weight", name)
    )
    assert of_part["attention"] == attention
    assert of_part["embedding"] == stored["model.embed_tokens.weight"]
    if config.model.quantization is None:
        # float32
        assert plan.memory.weight_bytes == 4 * sum(stored.values())


async def test_a_start_logs_where_memory_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_checkpoint(tmp_path / "model", tokenizer=True)
    config = small_config(directory, compile__enforce_eager=True)
    with caplog.at_level(logging.INFO, logger="src"):
        async with AsyncEngine.open(config) as engine:
            report = engine.inspector.memory
    (told,) = [one for one in caplog.records if one.getMessage() == "where memory goes"]
    lines = memory_lines(report)
    assert (told.stack_info or "").splitlines() == lines
    assert any(line.split()[:2] == ["KV", "memory"] for line in lines)
    planned = plan_model(config, Question()).memory
    # Word for word, but for what the device is called and what is free.
    assert memory_lines(planned)[:-1] == lines[:-1]


async def test_what_is_kept_of_outputs_is_a_part_of_memory(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", tokenizer=True)
    config = small_config(
        directory,
        compile__enforce_eager=True,
        speculation__method="auto",
        speculation__shared_history_bytes=50_000,
    )
    async with AsyncEngine.open(config) as engine:
        report = engine.inspector.memory
    planned = plan_model(config, Question()).memory
    # Tables have a power of two of entries.
    taken = SharedHistory(50_000).nbytes
    assert report.history == planned.history == taken == 2048 * 20
    assert memory_lines(planned)[:-1] == memory_lines(report)[:-1]
    assert any("shared history" in line for line in memory_lines(report))
    without = plan_model(small_config(directory), Question()).memory
    assert without.history == 0
    assert planned.total - without.total == taken
    off = small_config(directory, speculation__shared_history_bytes=50_000)
    assert plan_model(off, Question()).memory.history == 0


async def test_an_engine_that_transformers_computes_reports_its_memory(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make_tiny(directory, "gpt_neox")
    config = small_config(directory, compile__enforce_eager=True)
    async with AsyncEngine.open(config) as engine:
        assert engine.model_info.implementation == "transformers"
        weights, kv = taken_by(engine)
        report = engine.inspector.memory
    assert report.weight_bytes == weights
    assert report.kv is not None
    assert report.kv.bytes == kv
    assert {"embedding", "attention", "MLP", "norms"} <= {part.name for part in report.weights}
    # In advance only programs are known.
    with pytest.raises(ModelLoadError, match="plan knows native families only"):
        plan_model(config, Question())


def test_a_report_survives_json(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", tokenizer=True)
    report = plan_model(small_config(directory), Question()).memory
    text = msgspec.json.encode(report)
    assert msgspec.json.decode(text, type=MemoryReport) == report
    assert json.loads(text)["kv"]["groups"][0]["window"] is None
