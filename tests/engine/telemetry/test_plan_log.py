"""What a recorded scheduler did is done again by another one, from the log alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from src import AsyncEngine, SamplingParams
from src.core.errors import ConfigError
from src.core.outputs import FinishReason
from src.engine.scheduling.replay import (
    END_TOKEN,
    AddLine,
    CommitLine,
    CutLine,
    FinishLine,
    Line,
    NothingLine,
    PlanLine,
    ReplayError,
    ReplayReport,
    read_lines,
    replay,
)
from src.engine.telemetry.plan_log import PlanLog, RecordingScheduler
from tests.engine.scheduling.simulation import Simulation, make_limits, make_request
from tests.replay import driver
from tests.support.engines import small_config
from tests.support.slowness import own_time


def lines_of(path: Path) -> list[Line]:
    return list(read_lines(path.read_bytes().splitlines()))


def replayed(path: Path) -> ReplayReport:
    return replay(lines_of(path))


@pytest.mark.parametrize("trace", driver.TRACES, ids=lambda trace: trace.name.partition(".")[0])
def test_a_log_replays_to_the_plans_that_the_traces_have(trace: Path, tmp_path: Path) -> None:
    """Prefix hits, stop tokens, preemptions, expiries and all: one recorded log has everything."""
    log = PlanLog(tmp_path / "plans.jsonl")
    plans, simulation = driver.replay(trace, lambda limits: RecordingScheduler(limits, log))
    log.close()
    report = replayed(tmp_path / "plans.jsonl")
    assert report.difference is None
    assert report.cut is None
    assert report.num_plans == len(plans)
    # Not only the same plans: every counter that led to them.
    assert report.stats == simulation.scheduler.stats
    recorded = [line for line in lines_of(tmp_path / "plans.jsonl") if isinstance(line, PlanLine)]
    assert [msgspec.json.encode(msgspec.structs.astuple(p)).decode() for p in recorded] == plans


def test_everything_that_can_happen_is_replayed(tmp_path: Path) -> None:
    log = PlanLog(tmp_path / "log")
    limits = make_limits(num_blocks=16)
    simulation = Simulation(limits, 2, RecordingScheduler(limits, log))
    for key in range(3):
        simulation.add(make_request(key, [1, 2, 3, 4, 5], 4, deadline=5.0 if key == 2 else None))
    simulation.step()
    simulation.finish(1)
    simulation.expire(6.0)
    simulation.scheduler.reset_prefix_cache()
    simulation.drain()
    simulation.add(make_request(7, [1, 2, 3, 4, 5], 4))
    simulation.launch()
    simulation.fail_step()
    simulation.drain()
    log.close()
    kinds = [line[0] for line in map(json.loads, (tmp_path / "log").read_text().splitlines())]
    assert set(kinds) >= {"limits", "add", "finish", "expire", "plan", "commit", "reset"}
    assert kinds.count("reset") == 1
    assert kinds.count("finish") == 2
    report = replayed(tmp_path / "log")
    assert report.difference is None
    assert report.stats == simulation.scheduler.stats


def recorded_run(path: Path) -> list[Line]:
    log = PlanLog(path)
    limits = make_limits()
    simulation = Simulation(limits, 2, RecordingScheduler(limits, log))
    for key in range(4):
        simulation.add(make_request(key, 5, 6, seed=key))
        simulation.step()
    simulation.drain()
    log.close()
    return lines_of(path)


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    lines = recorded_run(tmp_path / "log")
    places = [index for index, line in enumerate(lines) if isinstance(line, PlanLine)]
    place = places[len(places) // 2]
    plan = lines[place]
    assert isinstance(plan, PlanLine)
    row, generation, start, num_tokens, samples = plan.rows[0]
    changed = [(row, generation, start + 1, num_tokens, samples), *plan.rows[1:]]
    tampered = msgspec.structs.replace(plan, rows=changed)
    difference = replay([*lines[:place], tampered, *lines[place + 1 :]]).difference
    assert difference is not None
    assert difference.line == place + 1
    assert json.loads(difference.recorded)[4][0][2] == start + 1
    assert json.loads(difference.replayed)[4][0][2] == start


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (AddLine, "is in use"),
        (CommitLine, "KeyError"),
        (NothingLine, '["plan"'),
        (FinishLine, "has ended already"),
    ],
)
def test_what_cannot_have_happened_is_a_difference(
    kind: type[Line], says: str, tmp_path: Path
) -> None:
    lines = recorded_run(tmp_path / "log")
    plan = next(index for index, line in enumerate(lines) if isinstance(line, PlanLine))
    again: Line
    if kind is NothingLine:
        again = NothingLine()
    elif kind is FinishLine:
        again = FinishLine(99, FinishReason.ABORT)
    elif kind is CommitLine:
        again = CommitLine(99, [])
    else:
        again = next(line for line in lines if isinstance(line, kind))
    difference = replay([*lines[:plan], again, *lines[plan:]]).difference
    assert difference is not None
    assert says in difference.replayed


def test_a_log_tells_nobody_the_tokens(tmp_path: Path) -> None:
    """Equal prefixes look alike, and nothing else can be learnt: not which tokens are equal."""
    log = PlanLog(tmp_path / "log")
    limits = make_limits(max_num_batched_tokens=64, num_blocks=64)
    simulation = Simulation(limits, 1, RecordingScheduler(limits, log))
    for key, (prompt, salt) in enumerate([
        ([6, 6, 6, 6], ""), ([6, 6, 6, 6], "hush-hush"), ([6, 6, 6, 5], ""), ([5, 6, 6, 6], "")
    ]):  # fmt: skip
        simulation.add(make_request(key, prompt, 3, cache_salt=salt))
    simulation.drain()
    log.close()
    text = (tmp_path / "log").read_text()
    assert "hush" not in text
    prompts = [line.token_ids for line in lines_of(tmp_path / "log") if isinstance(line, AddLine)]
    assert len(set(prompts[0])) == 4
    assert prompts[0][:3] == prompts[2][:3]
    assert prompts[0][3] != prompts[2][3]
    assert not set(prompts[0]) & (set(prompts[1]) | set(prompts[3]))
    assert min(min(prompt) for prompt in prompts) > 1000
    sampled = [
        token
        for line in lines_of(tmp_path / "log")
        if isinstance(line, CommitLine)
        for row in line.token_ids
        for token in row
    ]
    assert all(token > 1000 or token == END_TOKEN for token in sampled)
    # Another log of the same has other pseudonyms.
    assert prompts[0] != lines_of_prompt(tmp_path)


def lines_of_prompt(tmp_path: Path) -> list[int]:
    log = PlanLog(tmp_path / "other")
    scheduler = RecordingScheduler(make_limits(), log)
    scheduler.add(make_request(0, [6, 6, 6, 6], 3))
    log.close()
    return next(
        line.token_ids for line in lines_of(tmp_path / "other") if isinstance(line, AddLine)
    )


def test_a_disk_that_does_not_keep_up_costs_the_log_its_end(tmp_path: Path) -> None:
    log = PlanLog(tmp_path / "log", max_pending=5)
    scheduler = RecordingScheduler(make_limits(), log)
    for key in range(50):
        scheduler.add(make_request(key, 3))
    log.close()
    report = replayed(tmp_path / "log")
    assert report.cut == "the disk did not keep up"
    assert report.difference is None
    assert report.num_lines < 50
    assert scheduler.num_waiting == 50


def test_a_log_has_a_greatest_length(tmp_path: Path) -> None:
    log = PlanLog(tmp_path / "log", max_bytes=2000)
    scheduler = RecordingScheduler(make_limits(), log)
    for key in range(50):
        scheduler.add(make_request(key, 3))
    log.close()
    assert isinstance(lines_of(tmp_path / "log")[-1], CutLine)
    assert replayed(tmp_path / "log").cut == "the log is as long as it may be"
    assert (tmp_path / "log").stat().st_size < 2200


@pytest.mark.parametrize(
    "text", ["", "[]\n", '["limits",2,{}]\n', '["nothing"]\n', "not json\n", '["plan",1]\n']
)
def test_what_is_no_log_is_refused(text: str) -> None:
    with pytest.raises(ReplayError):
        replay(read_lines(text.splitlines()))


def test_another_version_is_refused(tmp_path: Path) -> None:
    recorded_run(tmp_path / "log")
    text = (tmp_path / "log").read_text().replace('["limits",6', '["limits",7', 1)
    with pytest.raises(ReplayError, match="version 7, expected 2 to 6"):
        replay(read_lines(text.splitlines()))


def test_a_log_of_the_version_before_is_replayed(tmp_path: Path) -> None:
    """It has no tenants, and its limits know nothing of shares."""
    recorded_run(tmp_path / "log")
    lines = [msgspec.json.decode(line) for line in (tmp_path / "log").read_text().splitlines()]
    lines[0][1] = 2
    for name in ("weights", "priority_tenants", "share_prefixes"):
        del lines[0][2][name]
    older = [line[:9] if line[0] == "add" else line for line in lines]
    report = replay(read_lines(map(msgspec.json.encode, older)))
    assert report.difference is None
    assert report.num_plans > 0


def test_turns_of_calls_are_replayed(tmp_path: Path) -> None:
    log = PlanLog(tmp_path / "log")
    limits = make_limits(num_blocks=64)
    simulation = Simulation(limits, 2, RecordingScheduler(limits, log))
    for key in range(12):
        simulation.add(make_request(key, 5, 2, ends=False, call=0 if key < 9 else None))
    simulation.drain()
    log.close()
    report = replayed(tmp_path / "log")
    assert report.difference is None
    assert report.stats == simulation.scheduler.stats
    # A log from before has no calls, and its requests waited in order of arrival.
    lines = [msgspec.json.decode(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line[13] for line in lines if line[0] == "add"] == [0] * 9 + [None] * 3
    older = [line[:13] if line[0] == "add" else line for line in lines]
    older[0][1] = 5
    difference = replay(read_lines(map(msgspec.json.encode, older))).difference
    assert difference is not None
    installs = json.loads(difference.replayed)[2]
    assert [install[2] for install in installs] == [0, 1]


@pytest.mark.parametrize("hides", [False, True])
def test_requests_with_other_media_share_no_prefix_in_a_replay(hides: bool, tmp_path: Path) -> None:
    """Whose tokens are equal and whose images are not."""
    log = PlanLog(tmp_path / "log")
    limits = make_limits(num_blocks=64, max_num_batched_tokens=16)
    simulation = Simulation(limits, 1, RecordingScheduler(limits, log))
    tokens = list(range(1, 10))
    for key, name in enumerate([b"cat", b"dog", b"cat"]):
        media = {0: name, 2: b"both"}
        simulation.add(make_request(key, tokens, 2, ends=False, media_keys=media))
        simulation.drain()
    log.close()
    hits = simulation.scheduler.stats.prefix_cache_hits
    assert hits == 8
    lines = [msgspec.json.decode(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert b"cat" not in (tmp_path / "log").read_bytes()
    if hides:
        lines = [line[:14] if line[0] == "add" else line for line in lines]
    report = replay(read_lines(map(msgspec.json.encode, lines)))
    assert (report.difference is None) != hides
    assert hides or report.stats == simulation.scheduler.stats


def test_tenants_are_replayed(tmp_path: Path) -> None:
    log = PlanLog(tmp_path / "log")
    limits = make_limits(weights={"b": 3}, num_blocks=64, max_num_batched_tokens=12)
    simulation = Simulation(limits, 2, RecordingScheduler(limits, log))
    for key in range(12):
        simulation.add(make_request(key, 9, 20, ends=False, tenant="ab"[key % 2]))
        simulation.step()
    simulation.drain()
    log.close()
    report = replayed(tmp_path / "log")
    assert report.difference is None
    assert report.stats == simulation.scheduler.stats
    alone = (tmp_path / "log").read_text().replace(',"b",', ',"a",')
    assert replay(read_lines(alone.splitlines())).difference is not None


def test_a_file_that_cannot_be_written_is_a_readable_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plan_log"):
        PlanLog(tmp_path / "no" / "such" / "folder")


@pytest.mark.anyio
@pytest.mark.timeout(120)
async def test_a_real_engine_s_log_replays(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    config = small_config(
        checkpoint,
        observability__plan_log=str(path),
        cache__num_blocks=24,
        scheduler__max_num_seqs=6,
        scheduler__max_num_batched_tokens=16,
    )
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20)
    async with AsyncEngine.open(config) as engine:
        running = [
            asyncio.create_task(engine.generate([5 + i % 3] * 9, params, timeout=timeout))
            for i, timeout in enumerate([None] * 8 + [0.02])
        ]
        await asyncio.sleep(0.05)
        running[0].cancel()
        await asyncio.gather(*running, return_exceptions=True)
        stats = engine.stats
    assert stats.num_steps > 10
    report = replayed(path)
    assert report.difference is None
    assert report.num_plans >= stats.num_steps
    assert report.stats.prefix_cache_hits == stats.prefix_cache_hits
    assert report.stats.preemptions == stats.preemptions


def test_handing_over_costs_microseconds(tmp_path: Path) -> None:
    """The thread does the work: the scheduler only appends a reference."""
    log = PlanLog(tmp_path / "log")
    line = NothingLine()
    with own_time() as spent:
        for _ in range(10_000):
            log.put(line)
        took = spent()
    log.close()
    assert took / 10_000 < 20e-6


@pytest.mark.parametrize("looks_first", [False, True])
def test_drafts_are_replayed(looks_first: bool, tmp_path: Path) -> None:
    """With what came of them: requests that end within accepted drafts among them."""
    log = PlanLog(tmp_path / "log")
    limits = make_limits(
        num_blocks=64, max_num_batched_tokens=24, max_drafts=4, looks_first=looks_first
    )
    simulation = Simulation(limits, 2, RecordingScheduler(limits, log))
    for key in range(12):
        request = make_request(key, 5, 20, seed=key)
        grammar = object() if key % 3 == 0 else None
        prediction = b"....." if key % 3 == 1 else None
        simulation.add(msgspec.structs.replace(request, grammar=grammar, prediction=prediction))
        simulation.step()
    simulation.drain()
    log.close()
    assert simulation.worker.num_accepted > 5
    assert FinishReason.STOP in simulation.finished.values()
    report = replay(read_lines((tmp_path / "log").read_bytes().splitlines()))
    assert report.difference is None
    assert report.stats == simulation.scheduler.stats
