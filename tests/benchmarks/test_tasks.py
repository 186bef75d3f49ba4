"""The contest of vectors and ranks, with drivers that answer by rule."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tasks
from benchmarks.peers import running as running_module
from benchmarks.peers.contest import Entrant
from benchmarks.peers.peers import DRIVERS, Peer
from benchmarks.peers.vector_peers import vector_peers
from benchmarks.tasks import LOADS, VectorContest, cosine, parse, save, table

WORDS = ["alpha", "beta", "gamma", "delta"]
DRIVER = """
import sys, time
sys.path.insert(0, {drivers!r})
from vector_turns import Opened, answer_turns

def open_engine(options):
    def embed(texts):
        if {kind!r} == "short" and len(texts) != 8:
            return [[1.0]]
        time.sleep(0.02 if {kind!r} == "slow" else 0.001)
        return [[float(len(text)), 1.0] for text in texts]

    def rank(query, texts):
        return [float(len(query) + len(text)) for text in texts]

    print("what an engine prints is no answer")
    return Opened(embed, None if {kind!r} == "slow" else rank, {{"dtype": "rule"}})

answer_turns(open_engine)
"""


@pytest.fixture
def contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VectorContest:
    for kind in ("quick", "slow", "short"):
        text = DRIVER.format(drivers=str(DRIVERS), kind=kind)
        (tmp_path / f"{kind}.py").write_text(text)
    monkeypatch.setattr(running_module, "DRIVERS", tmp_path)
    monkeypatch.setattr("benchmarks.peers.contest.PAUSE_SECONDS", 0.01)
    entrants = [Entrant(Peer(kind, "torch", kind, "cpu")) for kind in ("quick", "slow", "short")]
    return VectorContest(WORDS, entrants, tmp_path, tmp_path, tmp_path, {"threads": 1}, 30.0)


def test_all_get_the_same_texts_in_turns(
    contest: VectorContest, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = ["many", "ranks"]
    contest.convert()
    try:
        contest.open()
        contest.take_turns(loads, 2)
    finally:
        contest.close()
    quick, slow, short = contest.entrants
    assert "1 results of 32 texts" in short.failure
    # Who gives no scores takes no turn of ranks.
    assert ("ranks", "call") in quick.values
    assert ("ranks", "call") not in slow.values
    assert len(quick.values["many", "call"]) == 2
    assert min(slow.values["many", "call"]) >= 20
    assert slow.about["least_cosine"] == pytest.approx(1)
    shown = table(contest.entrants, loads)
    assert "short is missing: many: 1 results" in shown
    lines: list[tuple[str, dict[str, Any]]] = []

    class Lines:
        def add(self, measure: str, figures: Any, **details: Any) -> None:
            lines.append((measure, details))

    save(Lines(), contest, parse(["--loads", *loads]))  # type: ignore[arg-type]
    assert [measure for measure, _ in lines] == [
        "quick, many", "quick, ranks", "slow, many", "short, missing"
    ]  # fmt: skip
    assert sys.executable not in str(lines)


def test_texts_have_the_lengths_that_a_load_says(contest: VectorContest) -> None:
    for load in LOADS.values():
        lengths = [len(text.split()) for text in contest.texts(load, 1)]
        assert lengths == [length - (1 if load.query else 2) for length in load.lengths]
        assert contest.texts(load, 1) == contest.texts(load, 1) != contest.texts(load, 2)
    assert min(LOADS["mixed"].lengths) in range(8, 16)
    assert max(LOADS["mixed"].lengths) in range(400, 513)


def test_similar_lengths_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DRIVERS))
    from vector_turns import by_length

    assert by_length(["a", "abc", "ab", "abcd"], 3) == [[3, 1, 2], [0]]
    assert cosine([1.0, 0.0], [1.0, 1.0]) == pytest.approx(0.5**0.5)


def test_every_peer_has_a_driver() -> None:
    for peer in vector_peers():
        assert (DRIVERS / f"{peer.driver}.py").is_file()
        for word in peer.converter:
            name = word.removeprefix("{drivers}/")
            assert name == word or (DRIVERS / name).is_file()
    assert tasks.LOADS
