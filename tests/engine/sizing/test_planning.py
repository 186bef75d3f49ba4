"""Plans for devices that are not here, for what does not fit, and of bad configurations."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import pytest
import torch

from benchmarks.shapes import write_checkpoint
from src.core.config import GIB, MIB, Config
from src.core.errors import ConfigError, ModelLoadError, SlipstreamError
from src.core.settings import CHECKOUT
from src.engine.sizing import device_table
from src.engine.sizing.answer import Advice, ModelPlan, plan_lines
from src.engine.sizing.device_table import NAMED_DEVICES, describe_device
from src.engine.sizing.planning import Question, plan_model
from src.engine.sizing.roofline import Roofline
from src.engine.sizing.speed import DECODE_SHARE_ON_CPU, PREFILL_SHARE_ON_CPU, Work
from src.models import outline_model
from tests.support.checkpoints import CLASSES, make_checkpoint
from tests.support.encoders import make_encoder, save_modules
from tests.support.gguf_files import gguf, write_gguf

pytestmark = pytest.mark.timeout(120)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "dtype": "bfloat16",
}
KV_OF_A_TOKEN = 4 * 2 * 4 * 64 * 2
WEIGHTS = 4 * (2 * 512 * 512 + 2 * 256 * 512 + 3 * 512 * 1024) + 2 * 4096 * 512


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_table, "available_memory", lambda: 512 * MIB)
    limits = Roofline(bandwidth=20e9, flops=2e11)
    monkeypatch.setattr(device_table, "measure", lambda device, dtype: limits)


def written(directory: Path, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    return directory


def config_for(directory: Path | str, **changes: Any) -> Config:
    """``changes`` are ``section__key`` values."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(directory)},
        "device": {"type": "cpu", "num_threads": 1},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return msgspec.convert(values, Config)


def planned(directory: Path | str, question: Question | None = None, **changes: Any) -> ModelPlan:
    return plan_model(config_for(directory, **changes), question or Question())


def test_every_named_device_can_be_planned_for(tmp_path: Path) -> None:
    directory = written(tmp_path)
    for name, device in NAMED_DEVICES.items():
        plan = planned(directory, Question(device=name))
        assert plan.fits
        assert plan.device.free == device.free
        memory = plan.memory
        assert memory.kv is not None
        # The step and the graphs are set aside, and nothing is counted twice.
        assert 0 < memory.step < GIB
        assert 0 < memory.graphs < GIB
        assert memory.total + memory.free == device.free
        # No benchmark has run on any of them.
        assert {speed.share for speed in plan.decode} == {None}
        assert any(name in line for line in plan_lines(plan))


def test_the_most_that_a_gpu_gives_to_kv_memory_is_nine_tenths(tmp_path: Path) -> None:
    question = Question(device="l4", concurrency=100_000)
    plan = planned(written(tmp_path), question, compile__cuda_graphs="off")
    kv = plan.memory.kv
    assert kv is not None
    assert plan.memory.graphs == 0
    room = NAMED_DEVICES["l4"].free - plan.memory.weight_bytes - plan.memory.tables
    wanted = 0.9 * (room - plan.memory.step)
    assert kv.bytes == pytest.approx(wanted, abs=64 * KV_OF_A_TOKEN)


def test_an_unknown_device_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'h1000' is not known: .*h100-80gb, h200, l4"):
        describe_device("h1000", torch.bfloat16)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device here"):
            describe_device("cuda", torch.bfloat16)


def test_limits_of_speed_are_bytes_and_operations(tmp_path: Path) -> None:
    plan = planned(written(tmp_path), Question(context=1000, concurrency=16))
    one, many = plan.decode
    head = 4096 * 512
    weights = 2 * (WEIGHTS - head) + 9 * 2 * 512
    assert (one.rows, many.rows) == (1, 16)
    assert one.bound == "memory"
    assert one.seconds_per_token == pytest.approx((weights + 1000 * KV_OF_A_TOKEN) / 20e9)
    read = (weights + 16 * 1000 * KV_OF_A_TOKEN) / 20e9
    assert many.seconds_per_token == pytest.approx(read)
    assert many.tokens_per_second == pytest.approx(16 / read)
    # A prompt's tokens meet every weight but the head's, and half of the prompt.
    prompt = plan.prefill
    assert prompt is not None
    assert prompt.bound == "arithmetic"
    flops = 1000 * (2 * (WEIGHTS - 2 * head) + 4 * 4 * 8 * 64 * 500) + 2 * head
    assert prompt.tokens_per_second == pytest.approx(1000 / (flops / 2e11))
    assert one.share is not None
    assert prompt.share is not None


def test_experts_are_read_as_far_as_tokens_take_them(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "mixtral")
    raw = json.loads((directory / "config.json").read_text())
    experts, chosen = raw["num_local_experts"], raw["num_experts_per_tok"]
    plan = planned(directory, Question(context=16, concurrency=64))
    of_part = {part.name: part.bytes for part in plan.memory.weights}
    stack = raw["num_hidden_layers"] * experts * 3 * raw["hidden_size"] * raw["intermediate_size"]
    router = raw["num_hidden_layers"] * experts * raw["hidden_size"]
    assert of_part["experts"] == 4 * (stack + router)
    one, many = (speed.seconds_per_token * 20e9 for speed in plan.decode)
    kv = 16 * 2 * raw["num_hidden_layers"] * raw["num_key_value_heads"] * raw["head_dim"] * 4
    left = 4 * stack * (1 - chosen / experts)
    # 64 tokens take nearly all experts; one token takes those that are chosen for it.
    assert many - 64 * kv - (one - kv) == pytest.approx(left, rel=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_few_rows_share_some_of_their_experts(tmp_path: Path, rows: int) -> None:
    """Counted over all the choices that two experts of six can be, for so many tokens."""
    directory = make_checkpoint(tmp_path / "model", "mixtral", num_hidden_layers=1)
    raw = json.loads((directory / "config.json").read_text())
    of_an_expert = 4 * 3 * raw["hidden_size"] * raw["intermediate_size"]
    choices = list(itertools.combinations(range(raw["num_local_experts"]), 2))
    # How many experts so many tokens take, as a distribution.
    taken = {frozenset[int](): 1.0}
    for _ in range(rows):
        grown: dict[frozenset[int], float] = {}
        for found, share in taken.items():
            for choice in choices:
                union = found | set(choice)
                grown[union] = grown.get(union, 0.0) + share / len(choices)
        taken = grown
    expected = sum(len(found) * share for found, share in taken.items())
    work = Work(outline_model(directory))
    read = [work.bytes_of_step(1, tokens, 16) for tokens in (rows, 10**6)]
    left = of_an_expert * (raw["num_local_experts"] - expected)
    assert read[1] - read[0] == pytest.approx(left)


@pytest.mark.parametrize("architecture", CLASSES)
def test_every_family_can_be_planned(architecture: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", architecture)
    raw = json.loads((directory / "config.json").read_text())
    for device in (None, "l4"):
        plan = planned(directory, Question(device=device))
        assert plan.fits
        of_part = {part.name.split()[0]: part.parameters for part in plan.memory.weights}
        assert set(of_part) <= {"embedding", "attention", "MLP", "experts", "norms", "head"}
        assert of_part["embedding"] == raw["vocab_size"] * raw["hidden_size"]
        assert of_part["attention"] > of_part["norms"] > 0
        assert of_part.get("MLP", 0) + of_part.get("experts", 0) > of_part["norms"]
        assert plan.decode
        assert plan.prefill is not None


def test_shares_are_those_of_the_newest_benchmarks() -> None:
    lines = (CHECKOUT / "benchmarks/results/decode_bandwidth.jsonl").read_text().splitlines()
    newest = {
        line["measure"]: line["figures"]["fraction"]["median"] for line in map(json.loads, lines)
    }
    for weights, share in DECODE_SHARE_ON_CPU.items():
        assert share == pytest.approx(newest[f"0.35b, {weights}, one stream"], abs=0.006)


def test_the_operations_of_a_token_behind_the_share_of_a_prompt(tmp_path: Path) -> None:
    work = Work(outline_model(write_checkpoint(tmp_path / "m", "0.35b")))
    flops = work.flops_of_step(1, 2048, 1024) / 2048
    assert PREFILL_SHARE_ON_CPU["bfloat16"] == pytest.approx(579 * flops / (2 * 221e9), abs=0.006)


WHAT_IFS: dict[str, tuple[dict[str, Any], Question, dict[str, Any]]] = {
    "too many requests": ({}, Question(context=4096, concurrency=20), {}),
    "too long a context": (
        {"max_position_embeddings": 65_536},
        Question(context=65_536),
        {},
    ),
    "KV memory that was set too small": (
        {},
        Question(context=4096),
        {"cache__memory_bytes": 4 * MIB},
    ),
    "weights too large": ({"num_hidden_layers": 150, "dtype": "float32"}, Question(), {}),
    "a GPU that is too small": (
        {"num_hidden_layers": 160, "hidden_size": 4096, "intermediate_size": 11_264},
        Question(device="rtx4090", context=4096),
        {},
    ),
}


def applied(
    advice: Advice, question: Question, changes: dict[str, Any]
) -> tuple[Question, dict[str, Any]]:
    """The question and the settings after an advice was taken."""
    option, value = shlex.split(advice.option)
    if option == "--set":
        name, _, value = value.partition("=")
        typed = int(value) if value.isdigit() else value
        return question, changes | {name.replace(".", "__"): typed}
    if option == "--quantization":
        return question, changes | {"model__quantization": value}
    name = option.removeprefix("--").replace("-", "_")
    return replace(question, **{name: value if name == "device" else int(value)}), changes


@pytest.mark.parametrize("name", WHAT_IFS)
def test_whatever_is_advised_helps(name: str, tmp_path: Path) -> None:
    fields, question, changes = WHAT_IFS[name]
    directory = written(tmp_path, **fields)
    plan = planned(directory, question, **changes)
    assert not plan.fits
    assert plan.reason
    assert plan.advice
    assert plan.command is None
    text = "\n".join(plan_lines(plan))
    assert f"It does not fit: {plan.reason}." in text
    for advice in plan.advice:
        assert advice.option in text
        other, settings = applied(advice, question, changes)
        assert planned(directory, other, **settings).fits, advice


def test_what_is_advised_for_too_many_requests(tmp_path: Path) -> None:
    directory = written(tmp_path)
    plan = planned(directory, Question(context=4096, concurrency=20))
    # A quarter of what is free: 125 MiB, and a request of 4,096 tokens takes 16 MiB.
    assert plan.reason is not None
    assert plan.reason.startswith("20 requests of 4096 tokens take 320.0 MiB of KV memory")
    options = {advice.option for advice in plan.advice}
    assert f"--set cache.memory_bytes={320 * MIB}" in options
    assert "--concurrency 7" in options
    (shorter,) = (int(one.split()[1]) for one in options if one.startswith("--context"))
    assert 1400 < shorter < 1600
    assert not planned(directory, Question(context=4096, concurrency=8)).fits


def test_a_rank_holds_its_part(tmp_path: Path) -> None:
    directory = written(tmp_path)
    whole = planned(directory, Question(device="l4"))
    half = planned(directory, Question(device="l4", tensor_parallel=2))
    parts = [{part.name: part.bytes for part in one.memory.weights} for one in (whole, half)]
    for part in ("attention", "MLP"):
        assert parts[1][part] * 2 == parts[0][part]
    for part in ("embedding", "head"):
        assert parts[1][part] == parts[0][part]
    kv = [one.memory.kv for one in (whole, half)]
    assert kv[0] is not None
    assert kv[1] is not None
    assert kv[1].groups[0].bytes_per_token * 2 == kv[0].groups[0].bytes_per_token
    assert any("not available yet" in note for note in half.notes)
    assert half.command is None
    with pytest.raises(ConfigError, match=r"tensor-parallel 3: .* among 2, 4$"):
        planned(directory, Question(device="l4", tensor_parallel=3))
    with pytest.raises(ConfigError, match="is for several GPUs"):
        planned(directory, Question(tensor_parallel=2))


def test_an_encoder_has_texts_a_step_and_no_requests(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert")
    save_modules(directory, pooling={"pooling_mode": "mean"}, max_seq_length=100)
    sizes = {"scheduler__max_num_batched_tokens": 512, "scheduler__max_num_seqs": 8}
    plan = planned(directory, **sizes)
    assert plan.fits
    assert (plan.reads_only, plan.is_for_texts, plan.longest_text) == (True, True, 100)
    assert (plan.decode, plan.prefill) == ((), None)
    # Of both lengths, the usual one is longer than the longest text.
    (only,) = plan.texts
    assert (only.tokens, only.rows_per_step) == (100, 5)
    # float32: two operations for each weight of the layers, and what 500 tokens do with 100 keys
    # each; the embedding is looked up, and there is no head.
    layers = 3 * (4 * 64 * 64 + 2 * 64 * 96)
    flops = 500 * (2 * layers + 3 * 4 * 64 * 100)
    assert only.bound == "arithmetic"
    assert only.texts_per_second == pytest.approx(5 / (flops / 2e11), rel=0.02)
    kv = plan.memory.kv
    assert kv is not None
    assert kv.lasts == "step"
    text = "\n".join(plan_lines(plan))
    assert "It fits. The longest text has 100 tokens; a step computes 5 of these." in text
    assert "step's KV" in text
    assert "KV memory" not in text
    assert "tokens/s" not in text
    assert re.search(r"texts of 100 tokens +5 +[\d,]+  arithmetic", text)
    few = planned(directory, **{**sizes, "scheduler__max_num_seqs": 2})
    assert few.texts[0].rows_per_step == 2


def test_a_step_that_is_too_short_for_a_text_does_not_fit(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert", max_position_embeddings=128)
    plan = planned(directory, scheduler__max_num_batched_tokens=64)
    assert not plan.fits
    assert plan.reason is not None
    assert "a text of 128 tokens" in plan.reason
    assert "max_num_batched_tokens is 64" in plan.reason
    options = [advice.option for advice in plan.advice]
    assert options == ["--set scheduler.max_num_batched_tokens=128", "--context 64"]
    assert planned(directory, Question(context=64), scheduler__max_num_batched_tokens=64).fits


def test_a_decoder_that_embeds_has_both_tables(tmp_path: Path) -> None:
    directory = written(tmp_path)
    plain = planned(directory)
    # It embeds when it is asked to, but that is not what it is for.
    assert [one.tokens for one in plain.texts] == [128, 2048]
    assert not plain.is_for_texts
    assert "texts/s" not in "\n".join(plan_lines(plain))
    assert planned(directory, model__tasks=["score"]).is_for_texts
    save_modules(directory, pooling={"pooling_mode": "lasttoken"}, max_seq_length=1024)
    plan = planned(directory, scheduler__max_num_batched_tokens=512)
    text = "\n".join(plan_lines(plan))
    assert "tokens/s" in text
    assert "texts/s" in text
    short, longest = plan.texts
    assert (short.tokens, short.rows_per_step) == (128, 4)
    # A text that is longer than a step takes several.
    assert (longest.tokens, longest.rows_per_step) == (1024, 1)
    assert 8 < short.texts_per_second / longest.texts_per_second < 12
    # Neither is slower for a head that it has no use for.
    assert plan.prefill is not None
    assert longest.texts_per_second > plan.prefill.tokens_per_second / 1024
    # Each of these reads every weight of the layers again, and half of the keys on the mean.
    sizes = {"scheduler__max_num_batched_tokens": 8, "scheduler__max_num_seqs": 8}
    many_steps = planned(directory, **sizes).texts[-1]
    assert (many_steps.rows_per_step, many_steps.bound) == (1, "memory")
    read = 2 * (WEIGHTS - 2 * 4096 * 512) + 9 * 2 * 512 + 512 * KV_OF_A_TOKEN
    assert many_steps.texts_per_second == pytest.approx(8 / 1024 / (read / 20e9))
    save_modules(directory, pooling={"pooling_mode": "max"})
    unknown = planned(directory)
    assert (unknown.texts, unknown.longest_text, unknown.fits) == ((), None, True)


def test_an_encoder_is_not_divided(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert")
    with pytest.raises(ConfigError, match=r"tensor-parallel 2: .* on one device.* among none$"):
        planned(directory, Question(device="l4", tensor_parallel=2))


def test_what_a_gpu_does_not_have_is_refused_as_a_start_does(tmp_path: Path) -> None:
    directory, gpu = written(tmp_path), Question(device="h200")
    rounded = {"model__quantization": "int8", "model__quantize_activations": True}
    with pytest.raises(ConfigError, match="quantize_activations = true is for the CPU, the device"):
        planned(directory, gpu, **rounded)
    plain, quantized = (
        planned(directory, gpu, model__dtype="bfloat16", **changes).memory.weight_bytes
        for changes in ({}, {"model__quantization": "int8"})
    )
    assert quantized < plain


def test_the_command_serves_what_was_planned(tmp_path: Path) -> None:
    directory = written(tmp_path / "it's here")
    plan = planned(directory, Question(context=512, concurrency=2), model__quantization="int8")
    assert plan.command is not None
    words = shlex.split(plan.command)
    assert words[:5] == ["python", "-m", "src", "serve", "--model"]
    assert words[5] == str(directory)
    assert words[6:] == [
        *("--set", "model.max_model_len=512"),
        *("--set", "model.quantization=int8"),
        *("--set", "scheduler.max_num_seqs=2"),
    ]


def test_a_hub_id_needs_its_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = written(tmp_path)
    asked: list[tuple[str, Any]] = []

    def snapshot_download(model: str, **options: Any) -> str:
        asked.append((model, options["allow_patterns"]))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    plan = planned("team/tiny")
    assert plan.fits
    assert plan.model == "team/tiny"
    ((model, patterns),) = asked
    assert model == "team/tiny"
    assert not [one for one in patterns if "safetensors" in one]


def test_a_single_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(
        ModelLoadError, match=r"is a file of tensors: name the directory .* expected"
    ):
        planned(file)


def test_a_gguf_file_is_planned_without_its_weights(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "of", "llama")
    file = write_gguf(
        tmp_path / "m.gguf", checkpoint, "llama", lambda name: gguf.GGMLQuantizationType.Q4_1
    )
    plan = planned(file)
    assert plan.fits
    quantized = {part.name: part.bytes for part in plan.memory.weights}
    plain = {part.name: part.bytes for part in planned(checkpoint).memory.weights}
    # Half a byte a weight, and 8 for each 32 of them; instead of 4.
    assert quantized["MLP"] == plain["MLP"] * 0.75 / 4
    # Nothing but the header is needed.
    with file.open("r+b") as stream:
        stream.seek(-8192, 2)
        stream.write(bytes(8192))
    assert planned(file) == plan


HOSTILE: dict[str, Any] = {
    "more layers than memory": {"num_hidden_layers": 10**9},
    "wider than addresses": {"hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1},
    "more than an integer": {"vocab_size": 10**30},
    "wider than any model": {"hidden_size": 2**24 + 8},
    "as large as numbers go": {"vocab_size": 2**31 - 1, "hidden_size": 2**24},
    "a long life": {"max_position_embeddings": 2**31 - 1},
    "less than none": {"num_hidden_layers": -1},
    "no number": {"hidden_size": "512"},
    "not finite": {"rope_theta": float("inf")},
    "heads that do not divide": {"num_key_value_heads": 3},
    "a name that is none": {"architectures": [7]},
    "an unknown name": {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"},
    "code of its own": {"architectures": ["X"], "model_type": "x", "auto_map": {"AutoModel": "x"}},
    "rounded already": {"quantization_config": {"quant_method": "gptq"}},
    "experts without end": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 10**8,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_configuration_is_one_clear_error(name: str, tmp_path: Path) -> None:
    directory = written(tmp_path, **HOSTILE[name])
    if name in ("a long life", "as large as numbers go"):
        # They are only large: it is said that they do not fit.
        assert not planned(directory, Question(concurrency=64)).fits
        return
    with pytest.raises(SlipstreamError) as refused:
        planned(directory)
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}", "\xff\x00"]
)
def test_a_file_that_is_no_configuration_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        planned(tmp_path)
