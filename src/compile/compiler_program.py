"""Makes Inductor use the C++ compiler under whose name builds are cached.

Inductor takes a single program and derives its features from its name: it knows ``g++``, but
neither ``c++`` nor ``ccache g++``. So any other command is wrapped in a script with a known name.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import tempfile
from pathlib import Path

from src.ops.build.cpp_compiler import cpp_compiler, family


def use_found_compiler(root: Path) -> None:
    """Make this process's Inductor use it, if there is one. Scripts are put under ``root``."""
    from torch._inductor import config

    found = cpp_compiler()
    if found is not None:
        config.cpp.cxx = (as_program(found[0], root),)  # type: ignore[assignment]


def as_program(command: list[str], root: Path) -> str:
    """A single program that does what ``command`` does, named after its family of compilers."""
    name = family(command)
    if len(command) == 1 and name in Path(command[0]).name:
        return command[0]
    text = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    # The path contains a digest of the content, so processes sharing the directory do not conflict.
    script = root / "compilers" / hashlib.sha256(text.encode()).hexdigest()[:16] / name
    if not script.exists():
        script.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as whole:
            whole.write(text)
        os.chmod(whole.name, 0o755)
        os.replace(whole.name, script)
    return str(script)
