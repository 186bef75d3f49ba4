"""The commit that a measurement is recorded with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from src.bench.environment import commit


def repository(folder: Path) -> str:
    """Make a repository with one commit; returns that."""
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for arguments in (("init", "-q"), (*who, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_repository_names_its_commit_and_changed_sources(tmp_path: Path) -> None:
    name = repository(tmp_path)
    # Left from another time.
    (tmp_path / "COMMIT").write_text("0" * 40)
    assert commit(tmp_path) == name
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "new.py").touch()
    assert commit(tmp_path) == f"{name}+"


def test_a_copy_inside_of_another_repository_is_not_at_its_commit(tmp_path: Path) -> None:
    repository(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    assert commit(copy) == "unknown"


@pytest.mark.parametrize("has_git", [False, True])
def test_a_copy_names_its_commit_in_a_file(
    has_git: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_git:
        repository(tmp_path)
        monkeypatch.setenv("GIT_DIR", "/nonexistent")
    (tmp_path / "COMMIT").write_text("0123456789abcdef0123456789abcdef01234567\n")
    assert commit(tmp_path) == "0123456789ab"
    (tmp_path / "COMMIT").write_text("\n")
    assert commit(tmp_path) == "unknown"
