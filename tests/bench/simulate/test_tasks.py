"""Loads of texts to embed beside text that is generated."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import msgspec
import pytest

from src.bench.simulate.calibration import Calibration, calibrate_engine, load, save
from src.bench.simulate.engine import SimulatedEngine
from src.bench.simulate.fleet import simulate
from src.bench.simulate.outcome import NEVER, Journal
from src.bench.simulate.requests import (
    RandomWorkload,
    SimulatedRequest,
    TextWorkload,
    merged,
)
from src.bench.simulate.step_cost import Price, Work, fit
from src.cli.main import main
from src.core.errors import ConfigError, InvalidRequestError
from src.core.plan import StepPlan
from src.core.request import Pooling
from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.engine.scheduling.replay import AddLine, LimitsLine, PlanLine, plan_line, read_lines
from tests.bench.simulate.prices import LIMITS, cost_of, record
from tests.support.checkpoints import make_checkpoint
from tests.support.encoders import make_encoder, save_encoder_tokenizer
from tests.support.engines import small_config

DEVICE = Price(step=0.010, decode_rows=0.001, prefill_tokens=0.0005, pooled_rows=0.002)
PREFIX = list(range(3, 11))


def text(at: float, number: int, length: int, pooling: Pooling = "last") -> SimulatedRequest:
    return SimulatedRequest(at, ((number, length),), 0, 1, task="embed", pooling=pooling)


def test_a_text_ends_with_its_step_and_has_no_first_token() -> None:
    journal = Journal()
    engine = SimulatedEngine(LIMITS, cost_of(DEVICE), journal, depth=1)
    engine.submit(text(1.0, 0, 20))
    engine.advance(math.inf)
    assert journal.first[0] == NEVER
    assert journal.last[0] == pytest.approx(1.0 + 0.010 + 20 * 0.0005 + 0.002)
    assert engine.scheduler.stats.steps == 1
    engine.scheduler.check_idle()


def test_a_flood_of_texts_beside_streams() -> None:
    streams = RandomWorkload(count=4, input_len=(8, 16), output_len=(30, 30))
    texts = TextWorkload(count=200, input_len=(10, 40))
    alone = simulate(streams.requests(math.inf), LIMITS, cost_of(DEVICE))
    both = simulate(
        merged(streams.requests(math.inf), texts.requests(math.inf)), LIMITS, cost_of(DEVICE)
    )
    assert (alone.embedded, both.embedded, both.completed) == (0, 200, 204)
    assert both.total_output_tokens == alone.total_output_tokens == 120
    # Their times stand apart, and the streams wait for the texts' share of each step.
    assert both.embed_e2el.median > 0
    assert both.tpot.median > 1.5 * alone.tpot.median
    narrow = msgspec.structs.replace(
        LIMITS, max_mixed_prefill_tokens=8, prefill_tokens_per_decode=0
    )
    bounded = simulate(
        merged(streams.requests(math.inf), texts.requests(math.inf)), narrow, cost_of(DEVICE)
    )
    assert bounded.tpot.median < both.tpot.median
    assert bounded.embed_e2el.median > both.embed_e2el.median


def test_streams_are_merged_by_their_time() -> None:
    streams = RandomWorkload(count=20, input_len=(8, 8), output_len=(4, 4)).requests(2.0)
    texts = TextWorkload(count=20, input_len=(8, 8)).requests(3.0)
    times = [request.at for request in merged(streams, texts)]
    assert len(times) == 40
    assert times == sorted(times)


def test_texts_are_good_by_their_whole_time_alone() -> None:
    texts = TextWorkload(count=20, input_len=(10, 40)).requests(1.0)
    within = {"ttft": 1e-9, "tpot": 1e-9, "e2el": 1.0}
    found = simulate(texts, LIMITS, cost_of(DEVICE), objectives=within)
    assert found.request_goodput == pytest.approx(found.embedded_per_second)
    late = simulate(
        TextWorkload(count=20, input_len=(10, 40)).requests(1.0),
        LIMITS, cost_of(DEVICE), objectives={"e2el": 1e-9},
    )  # fmt: skip
    assert late.request_goodput == 0


def test_whole_texts_are_not_parted() -> None:
    limits = msgspec.structs.replace(
        LIMITS, max_model_len=64, whole_prompts=True, enable_prefix_caching=False
    )
    texts = TextWorkload(count=50, input_len=(33, 60), pooling="mean").requests(math.inf)
    found = simulate(texts, limits, cost_of(DEVICE))
    assert found.embedded == 50
    # 64 tokens hold one such text, and what is left of them is not used for a part of the next.
    assert found.scheduler.steps == 50


def test_what_a_vector_costs_is_fitted() -> None:
    works = [Work(i % 3, 2, 20 + i, 60 + 3 * i, 4 * i, i % 3, i % 4) for i in range(60)]
    price = Price(step=0.004, decode_rows=0.001, prefill_tokens=0.0002, pooled_rows=0.003)
    steps, begin = [], 100.0
    for number, work in enumerate(works):
        seconds = price.seconds(work)
        steps.append(
            msgspec.structs.replace(
                record(number, work, begin, seconds), pooled_rows=work.pooled_rows
            )
        )
        begin += seconds + 0.01
    assert fit(steps).device.pooled_rows == pytest.approx(0.003, rel=0.05)
    without = [msgspec.structs.replace(step, pooled_rows=0) for step in steps]
    assert fit(without).device.pooled_rows == 0


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
async def test_the_simulated_order_is_that_of_a_real_engine(tmp_path: Path, kind: str) -> None:
    """The same arrivals between the same steps: every plan is the same, block by block."""
    is_encoder = kind == "encoder"
    if is_encoder:
        path = make_encoder(tmp_path / "tiny", "bert")
        save_encoder_tokenizer(path)
    else:
        path = make_checkpoint(tmp_path / "tiny", "qwen3", tokenizer=True)
    log = tmp_path / "plans.jsonl"
    sizes = {"model__max_model_len": 64, "scheduler__max_num_batched_tokens": 64}
    config = small_config(
        path, scheduler__pipeline_depth=1, scheduler__plan_late=False,
        observability__plan_log=str(log), **sizes,
    )  # fmt: skip
    # Lengths tell prompts apart.
    streams = {} if is_encoder else {20 + i: 12 + i for i in range(6)}
    texts = [30 + i for i in range(24)]

    def prompt(length: int) -> list[int]:
        return [*PREFIX, *(11 + (7 * length + i) % 300 for i in range(length - len(PREFIX)))]

    async with AsyncEngine.open(config) as engine:
        await asyncio.gather(
            *(
                engine.generate(
                    prompt(length), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
                )
                for length, n in streams.items()
            ),
            engine.embed([prompt(length) for length in texts]),
        )
    lines = list(read_lines(log.read_bytes().splitlines()))
    limits = next(line.limits for line in lines if isinstance(line, LimitsLine))
    assert limits.whole_prompts == is_encoder
    recorded = [line for line in lines if isinstance(line, PlanLine)]
    planned: list[PlanLine] = []
    one_second = cost_of(Price(step=1.0))
    engine_of = SimulatedEngine(limits, one_second, Journal(), depth=1, seed=None)
    schedule = engine_of.scheduler.schedule

    def watched() -> StepPlan | None:
        plan = schedule()
        if plan is not None:
            planned.append(plan_line(plan))
        return plan

    engine_of.scheduler.schedule = watched  # type: ignore[method-assign]
    # Step k runs from k - 1 to k, so what was added behind it arrives meanwhile.
    keys, steps = {}, 0
    for line in lines:
        if isinstance(line, PlanLine):
            steps += 1
        elif isinstance(line, AddLine):
            keys[line.key] = len(keys)
            length = len(line.token_ids)
            pieces = ((0, len(PREFIX)), (1 + length, length - len(PREFIX)))
            n = streams.get(length, 0)
            at = 0.0 if steps == 0 else steps - 0.5
            engine_of.advance(at)
            engine_of.submit(
                SimulatedRequest(
                    at,
                    pieces,
                    n,
                    max(n, 1),
                    task=line.task,
                    pooling=line.pooling,
                    call=None if line.call is None else keys[line.call],
                )
            )
    engine_of.advance(math.inf)
    assert {line.task for line in lines if isinstance(line, AddLine)} == (
        {"embed"} if is_encoder else {"generate", "embed"}
    )

    def renamed(plan: PlanLine) -> PlanLine:
        installs = [
            (row, generation, keys[key], *rest) for row, generation, key, *rest in plan.installs
        ]
        return msgspec.structs.replace(plan, installs=installs)

    assert len(recorded) > 5
    assert planned == [renamed(plan) for plan in recorded]


@pytest.mark.anyio
async def test_engines_are_calibrated_with_texts(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path / "encoder", "bert")
    save_encoder_tokenizer(encoder)
    async with AsyncEngine.open(
        small_config(encoder, observability__timeline_steps=10_000)
    ) as engine:
        found = await calibrate_engine(engine, 0.2)
    assert found.limits.whole_prompts
    assert not found.limits.enable_prefix_caching
    assert found.cost.device.decode_rows == 0
    save(found, tmp_path / "cost.json")
    assert load(tmp_path / "cost.json") == found
    decoder = make_checkpoint(tmp_path / "decoder", "qwen3", tokenizer=True)
    async with AsyncEngine.open(
        small_config(decoder, observability__timeline_steps=10_000)
    ) as engine:
        await calibrate_engine(engine, 0.2, embed_share=0.5)
        view = engine.inspector.timeline()
        assert {track.task for track in view.requests} == {"generate", "embed"}
    config = small_config(decoder, model__tasks=["generate"])
    async with AsyncEngine.open(config) as engine:
        with pytest.raises(InvalidRequestError, match="does not embed"):
            await calibrate_engine(engine, 0.2, embed_share=0.5)


def test_the_command_has_columns_for_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, figures = tmp_path / "cost.json", tmp_path / "out.json"
    cost = cost_of(DEVICE)
    save(Calibration(model="m", source="a test", limits=LIMITS, pipeline_depth=2, cost=cost), file)
    command = ["bench", "simulate", "--calibration", str(file), "--random-input-len", "16"]
    command += ["--random-output-len", "8", "--num-prompts", "5"]
    texts = ["--num-texts", "40", "--text-len", "24", "--text-rate", "50"]
    assert main([*command, *texts, "--output-json", str(figures)]) == 0
    assert "texts/s" in capsys.readouterr().out
    (run,) = json.loads(figures.read_text())
    assert (run["outcome"]["embedded"], run["outcome"]["completed"]) == (40, 45)
    assert main(command) == 0
    assert "texts/s" not in capsys.readouterr().out
    assert main([*command[:-1], "0", *texts]) == 0
    assert main([*command[:-1], "0"]) == 2
    with pytest.raises(ConfigError, match="a text's length"):
        TextWorkload(count=1, input_len=(0, 4))
    assert main(["bench", "calibrate", "--embed-share", "1.5"]) == 2
    assert "--embed-share" in capsys.readouterr().err
