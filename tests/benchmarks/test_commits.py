"""Commits of this engine in turns: which trees, what is held against what, and what is worse."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import commits
from benchmarks.commits import bases, checkout, entered, parse, table
from benchmarks.peers.contest import Contest, Entrant
from benchmarks.peers.peers import Peer
from src.core.settings import CHECKOUT


def entrant(name: str, **values: float) -> Entrant:
    one = Entrant(Peer(name, "pytest", "drive", "cpu"))
    for figure, value in values.items():
        one.add("prefill" if figure == "prefill" else "one", figure, value)
    return one


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a file that says which of two commits it is of."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr(commits, "CHECKOUT", here)
    own = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "init", "-q", str(here)], check=True)
    configuration = here / "src" / "core" / "config.py"
    configuration.parent.mkdir(parents=True)
    for text in ("old", "new"):
        (here / "file").write_text(text)
        sections = ("Model", "Cache") if text == "old" else ("Model", "Cache", "Speculation")
        lines = [f"    {each.lower()}: {each}Section = {each}Section()\n" for each in sections]
        configuration.write_text("".join(["class Config:\n", *lines]))
        subprocess.run(["git", "add", "."], cwd=here, check=True)
        subprocess.run(["git", *own, "commit", "-qm", text], cwd=here, check=True)
    return here


def test_a_commit_is_checked_out_once_and_this_tree_is_used_as_it_is(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "file").write_text("not committed")
    old = checkout("HEAD~1", tmp_path)
    assert (old / "file").read_text() == "old"
    (old / "left").touch()
    assert checkout("HEAD~1", tmp_path) == old
    assert (old / "left").exists()
    assert checkout(".", tmp_path) == repository
    with pytest.raises(SystemExit, match="git rev-parse"):
        checkout("no-such-commit", tmp_path)


def test_every_commit_enters_in_every_format(repository: Path, tmp_path: Path) -> None:
    words = ["HEAD~1", ".", "--quantization", "none", "int8", "--root", str(tmp_path)]
    found = entered(parse([*words, "--set", "model.dtype=float32"]))
    assert [each.peer.name for each in found] == ["HEAD~1", ".", "HEAD~1, int8", "., int8"]
    assert [each.peer.checkout == repository for each in found] == [False, True, False, True]
    settings = [each.peer.options["settings"] for each in found]
    assert settings[0] == {"model.dtype": "float32"}
    assert settings[3] == {"model.dtype": "float32", "model.quantization": "int8"}
    assert [each.peer.name for each in bases(found, 2)] == ["HEAD~1"] * 2 + ["HEAD~1, int8"] * 2
    assert [each.peer.name for each in bases(found, 1)] == ["HEAD~1"] * 4


def test_a_commit_is_not_told_of_sections_that_came_later(repository: Path, tmp_path: Path) -> None:
    words = ["HEAD~1", ".", "--root", str(tmp_path), "--set", "speculation.method=off"]
    old, new = entered(parse([*words, "--set", "cache.block_size=16"]))
    assert old.peer.options["settings"] == {"cache.block_size": "16"}
    assert new.peer.options["settings"] == {
        "speculation.method": "off",
        "cache.block_size": "16",
    }


def test_one_commit_is_held_against_this_tree() -> None:
    assert parse(["HEAD~1"]).commits == ["HEAD~1", "."]
    assert parse([".", "--quantization", "none", "int8"]).commits == ["."]


def test_ratios_are_of_costs_and_what_is_worse_is_marked() -> None:
    old = entrant("old", ttft=10.0, tpot=1.0, prefill=1000.0)
    new = entrant("new", ttft=10.1, tpot=1.03, prefill=970.0)
    lines = [line for line in table([old, new], 2) if " new " in line]
    ratios = {line.split()[1]: line.split()[5] for line in lines}
    assert ratios == {"ttft": "1.010", "tpot": "1.030", "prefill": "1.031"}
    assert ["worse" in line for line in lines] == [False, True, True]
    new.fail("it crashed")
    assert "new is missing: it crashed" in table([old, new], 2)


def test_starts_may_keep_what_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "kernels").touch()
    started: list[tuple[str, Path, Path]] = []

    def start(contest: Contest, entrant: Entrant, kind: str) -> None:
        checkout = entrant.peer.checkout
        started.append((kind, contest._cache(entrant), checkout))

    monkeypatch.setattr(Contest, "_start", start)
    monkeypatch.setattr(Contest, "_rest", lambda _: 0.0)
    entrants = [entrant("a"), entrant("b")]
    contest = Contest(entrants, tmp_path, tmp_path, tmp_path, {}, 1.0, shared)
    contest.start(2, ("start-warm",))
    assert started == [("start-warm", shared, CHECKOUT)] * 4
    assert (shared / "kernels").exists()
