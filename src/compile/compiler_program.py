"""Has Inductor compile with the compiler that everything is kept under the name of.

Inductor takes one program and reads what it may ask of it from its path: it knows ``g++``, and
neither ``c++`` nor ``ccache g++``. So any other command is called by a script under such a name.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import tempfile
from pathlib import Path

from src.ops.cpu.cpp_compiler import cpp_compiler, family


def use_found_compiler(root: Path) -> None:
    """Have this process's Inductor use it, unless there is none. Scripts go under ``root``."""
    from torch._inductor import config

    found = cpp_compiler()
    if found is not None:
        config.cpp.cxx = (as_program(found[0], root),)  # type: ignore[assignment]


def as_program(command: list[str], root: Path) -> str:
    """One program that does as ``command``, named by the family of compilers that it is of."""
    name = family(command)
    if len(command) == 1 and name in Path(command[0]).name:
        return command[0]
    text = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    # By its content, so that processes which share the directory write the same.
    script = root / "compilers" / hashlib.sha256(text.encode()).hexdigest()[:16] / name
    if not script.exists():
        script.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as whole:
            whole.write(text)
        os.chmod(whole.name, 0o755)
        os.replace(whole.name, script)
    return str(script)
