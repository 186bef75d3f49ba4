"""Commit, machine and versions of a measurement; figures are comparable only with these."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from src.core.cpus import usable_cpus
from src.core.settings import CHECKOUT

_PACKAGES: Final = ("torch", "transformers", "triton", "hypercorn", "starlette", "msgspec")
# CPU flags that decide which kernels run.
_FLAGS: Final = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_tile",
)


def portable(value: Any) -> Any:
    """The value without the paths of this checkout and of temporary files; home becomes ``~``."""
    if isinstance(value, Mapping):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, str):
        for place in (CHECKOUT, tempfile.gettempdir()):
            value = value.replace(f"{place}{os.sep}", "")
        return value.replace(str(Path.home()), "~")
    return value


def commit(checkout: Path = CHECKOUT) -> str:
    """The commit, followed by a plus sign if the sources differ from it.

    A copy without a repository may name its commit in a file ``COMMIT``. A repository around the
    checkout is another project's.
    """
    try:
        if (checkout / ".git").exists():
            name = _git(checkout, "rev-parse", "--short=12", "HEAD")
            changed = _git(checkout, "status", "--porcelain", "--", "src", "configs/demo")
            return name + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        pass  # No program, or a repository that is elsewhere.
    try:
        named = (checkout / "COMMIT").read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        named = []
    return named[0][:12] if named else "unknown"


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=checkout, capture_output=True, check=True, text=True
    )
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Processor, memory and load; a load near the number of CPUs spoils the figures."""
    info: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    flags = set(info.get("flags", "").split())
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cpus": usable_cpus(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the relevant packages."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, Any]:
    """Commit, machine and versions, and the command line of this process."""
    return {
        "commit": commit(),
        "command": f"python -m src {shlex.join(without_secrets(sys.argv[1:]))}".strip(),
        "machine": machine(),
        "versions": versions(),
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Arguments without values of headers and users in URLs, which may be keys."""
    shown = []
    is_header = False
    for argument in arguments:
        if argument.startswith("--"):
            is_header = argument.split("=")[0] == "--header"
        option, equals, rest = argument.partition("=")
        if is_header and argument.startswith("--") and equals:
            argument = f"{option}={rest.partition('=')[0]}=..."
        elif is_header and equals:
            argument = f"{option}=..."
        shown.append(re.sub(r"//[^/@]+@", "//", argument))
    return shown
