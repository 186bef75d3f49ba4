"""Kernels and calls are made by one compiler, whatever its command is."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from src.compile import Compilation, ahead
from src.compile.compiler_program import as_program
from src.core.settings import CHECKOUT
from src.ops.build import cpp_compiler
from tests.compile.test_ahead import mix_job

INDUCTOR = """
import sys
from pathlib import Path
from src.compile.compiler_program import use_found_compiler
use_found_compiler(Path(sys.argv[1]))
from torch._inductor import cpp_builder
print(cpp_builder.get_cpp_compiler(), cpp_builder.is_gcc())
"""


def described(*command: str) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_command_of_several_words_becomes_one_program(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None
    assert as_program([compiler], tmp_path) == compiler
    assert list(tmp_path.iterdir()) == []
    program = as_program(["/usr/bin/env", "A=b c", compiler], tmp_path)
    assert Path(program).name == "g++"
    assert described(program) == described(compiler)
    assert as_program(["/usr/bin/env", "A=b c", compiler], tmp_path) == program
    assert as_program(["/usr/bin/env", compiler], tmp_path) != program
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"g++"}


def test_a_name_says_of_which_family_a_compiler_is(tmp_path: Path) -> None:
    for says, name in (("Debian clang version 14.0.6", "clang++"), ("Another 1.0", "my-cc")):
        compiler = tmp_path / "my-cc"
        compiler.write_text(f"#!/bin/sh\necho {says}\n")
        compiler.chmod(0o755)
        cpp_compiler._description.cache_clear()
        assert Path(as_program([str(compiler)], tmp_path / "root")).name == name


@pytest.mark.parametrize("command", ["env g++", None])
def test_inductor_takes_what_kernels_are_built_with(tmp_path: Path, command: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    if command is not None:
        environment["CXX"] = command
    else:
        compiler = shutil.which("g++")
        assert compiler is not None
        (tmp_path / "c++").symlink_to(compiler)
        environment["PATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", INDUCTOR, str(tmp_path / "root")],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    program, is_gcc = done.stdout.split()
    assert "Free Software Foundation" in described(program)
    assert is_gcc == "True"


def test_a_worker_is_told_the_compiler_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "my compiler"
    compiler.write_text("#!/bin/sh\necho mine 1.0\n")
    compiler.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "'./my compiler' -flag")
    said = tmp_path / "said"
    monkeypatch.setattr(ahead, "_COMMAND", ("sh", "-c", f'echo "$CXX" > {said}'))
    Compilation([mix_job()], tmp_path)._workers[0].wait()
    assert shlex.split(said.read_text()) == [str(compiler), "-flag"]
