"""The C++ compiler that this process would use; cached builds are kept per compiler."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess


def cpp_compiler() -> tuple[list[str], str] | None:
    """Its command (`CXX`, else g++, else c++) with an absolute path, and its version.

    None if there is none that runs.
    """
    try:
        words = shlex.split(os.environ.get("CXX", ""))
    except ValueError:
        # Not a command: it has an unclosed quotation mark.
        return None
    program, *arguments = words or ["g++" if shutil.which("g++") else "c++"]
    found = shutil.which(program)
    if found is None:
        return None
    # Absolute, because the command may be used in another directory.
    command = [os.path.abspath(found), *arguments]
    try:
        return command, _version(*command)
    except OSError:
        return None


def family(command: list[str]) -> str:
    """The kind of compiler, whose options it understands: g++, clang++, or its own name."""
    described = _description(*command)
    if "clang" in described:
        return "clang++"
    return "g++" if "Free Software Foundation" in described else os.path.basename(command[0])


def _version(*command: str) -> str:
    return _description(*command).partition("\n")[0]


@functools.cache
def _description(*command: str) -> str:
    # Cached: several caches ask during a start, and each process costs start-up time.
    answer = subprocess.run(
        [*command, "--version"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    return answer.stdout
