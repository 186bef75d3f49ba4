"""The C++ compiler that this process would use, for what is kept under its name."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess


def cpp_compiler() -> tuple[list[str], str] | None:
    """Its command (`CXX`, else g++, else c++) and its version; None without one."""
    command = shlex.split(os.environ.get("CXX", ""))
    if not command:
        found = shutil.which("g++") or shutil.which("c++")
        command = [found] if found else []
    if not command or shutil.which(command[0]) is None:
        return None
    return command, _version(*command)


@functools.cache
def _version(*command: str) -> str:
    # Asked once: several caches want to know, in a start of which every process counts.
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0]
