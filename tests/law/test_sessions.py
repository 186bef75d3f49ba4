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
from src.ops.build.units import SOURCES
from src.ops.runtime.abi import KERNELS
from tests.ops import sanitized

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


def test_sanitizers_watch_every_kernel() -> None:
    """Whoever adds a kernel or a test of one has nothing to enter; what is apart is there."""
    named = {path.name for path in (CHECKOUT / "tests" / "ops").rglob("test_*.py")}
    assert named >= sanitized.APART
    watched = {Path(path).name for path in sanitized.TESTS}
    assert watched >= named - sanitized.APART
    assert not [path for path in sanitized.TESTS if not (CHECKOUT / path).exists()]
    # Cases of every op, on every level.
    assert "test_declarations.py" in watched
    # Of the self-checks, which both sanitizers run, no kernel is without one.
    checks = (SOURCES / "build" / "self_check.cpp").read_text()
    assert not [each.kernel for each in KERNELS if f'{{"{each.kernel}",' not in checks]


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
