"""What noxfile.py says of tests: every file is there, and a process that dies is a failed run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from src.core.settings import CHECKOUT

LISTS = ("ALONE", "COMPILED_TOO", "FIRST", "QUICK", "TWO_AT_A_TIME", "WHOLE_ENGINES")


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its lists; nox need not be here to read them."""
    monkeypatch.chdir(CHECKOUT)
    names: dict[str, Any] = {"Path": Path}
    for node in ast.parse((CHECKOUT / "noxfile.py").read_text()).body:
        is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in LISTS
        if is_list or (isinstance(node, ast.FunctionDef) and node.name == "named"):
            exec(compile(ast.Module([node], []), "noxfile.py", "exec"), names)
    return {name: names[name] for name in LISTS}


def test_every_file_that_is_listed_is_there(lists: dict[str, Any]) -> None:
    for name, entries in lists.items():
        paths = [entry.rpartition("=")[2] for entry in entries if "tests/" in entry]
        assert not [path for path in paths if not (CHECKOUT / path).exists()], name
        assert len(paths) == len(set(paths)), name
    # And `tests` runs all of them, but those that are left to sessions of their own.
    assert not {entry for entry in lists["FIRST"] if entry in lists["ALONE"]}


@pytest.mark.timeout(120)
def test_a_process_that_dies_ends_the_run(lists: dict[str, Any], tmp_path: Path) -> None:
    # More files than processes, so that some are waiting when one dies.
    for number in range(6):
        dies = "import os; os.abort()" if number == 1 else "pass"
        code = f"def test_before():\n    pass\n\n\ndef test_it():\n    {dies}\n"
        (tmp_path / f"test_{number}.py").write_text(code)
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    options = ("-p", "no:cacheprovider", *lists["TWO_AT_A_TIME"])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode not in (0, 5), run.stdout
    assert "test_1.py" in run.stdout
    assert "crashed" in run.stdout
