"""The C++ compiler that this process would use, for what is kept under its name."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess


def cpp_compiler() -> tuple[list[str], str] | None:
    """Its command (`CXX`, else g++, else c++), by an absolute path, and its version.

    None without one that can be run.
    """
    try:
        words = shlex.split(os.environ.get("CXX", ""))
    except ValueError:
        # No command: a quotation does not end.
        return None
    program, *arguments = words or ["g++" if shutil.which("g++") else "c++"]
    found = shutil.which(program)
    if found is None:
        return None
    # Whoever is told of it may run elsewhere.
    command = [os.path.abspath(found), *arguments]
    try:
        return command, _version(*command)
    except OSError:
        return None


def family(command: list[str]) -> str:
    """Under which name a compiler understands what this one does: g++, clang++, or its own."""
    described = _description(*command)
    if "clang" in described:
        return "clang++"
    return "g++" if "Free Software Foundation" in described else os.path.basename(command[0])


def _version(*command: str) -> str:
    return _description(*command).partition("\n")[0]


@functools.cache
def _description(*command: str) -> str:
    # Asked once: several caches want to know, in a start of which every process counts.
    answer = subprocess.run(
        [*command, "--version"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    return answer.stdout
