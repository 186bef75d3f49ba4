"""The process that compiles, without a compiler."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from src.compile import Job, ahead, replace_openmp, worker
from src.compile.artifacts import ArtifactCache
from tests.compile.functions import impossible


def test_what_a_killed_worker_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(replace_openmp, "prepare", lambda: False)
    monkeypatch.setattr(worker, "_compile", fail)
    job, cache = Job.of(impossible, (torch.randn(4),), (0,)), ArtifactCache(tmp_path)
    with cache.locked(job) as directory:
        left = directory / "tmp4f5k2m9x"
        left.mkdir()
        (left / "library.so").write_text("half")
        with pytest.raises(RuntimeError, match="no compiler"):
            worker._compile_into(job, directory)
        assert [path.name for path in directory.iterdir()] == ["lock"]


def test_all_that_a_compiler_runs_ends_before_what_it_writes_to_is_removed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import functools, pathlib, shutil, time\n"
        "from src.compile import Compilation, ahead\n"
        "from src.core.process_end import at_process_end, end_now\n"
        "from tests.compile.test_ahead import is_gone, mix_job\n"
        f"pid_file = pathlib.Path({str(pid_file)!r})\n"
        "at_process_end(lambda: print(is_gone(int(pid_file.read_text()))), after_others=True)\n"
        f"ahead._COMMAND = ('sh', '-c', 'sleep 600 & echo $! > {pid_file}; wait')\n"
        "compilation = Compilation([mix_job()], pid_file.parent)\n"
        "while not (pid_file.is_file() and pid_file.read_text().strip()):\n"
        "    time.sleep(0.01)\n"
        "end_now(3)\n"
    )
    command = [sys.executable, "-u", "-c", script]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ahead.CHECKOUT)
    assert (told.returncode, told.stdout) == (3, "True\n")
