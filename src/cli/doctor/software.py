"""Checks of Python and of the packages that are needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
import tomllib
from collections.abc import Iterator
from typing import Final

from src.cli.doctor.finding import Finding
from src.core.settings import CHECKOUT
from src.core.version import DISTRIBUTION, VERSION

_OLDEST: Final = (3, 11)
# Packages that are worth a line of their own although nothing is wrong with them.
_TOLD: Final = ("transformers", "tokenizers", "huggingface-hub", "hypercorn")


def python() -> Iterator[Finding]:
    """The interpreter and the system."""
    version = platform.python_version()
    text = f"Python {version} on {platform.system()} {platform.machine()}, Slipstream {VERSION}"
    if sys.version_info < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        yield Finding("python", "broken", text, f"install Python {wanted} or later")
    elif platform.system() != "Linux":
        yield Finding("python", "broken", f"{text}: only Linux is supported")
    else:
        yield Finding("python", "good", text)


def packages() -> Iterator[Finding]:
    """Versions of the dependencies, held against the ranges that the project asks for."""
    requirements = _requirements()
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Finding(
            "packages", "unchecked", "cannot be checked without packaging", "pip install packaging"
        )
        return
    told = []
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("packages", "broken", f"{requirement.name} is missing", _install(line))
            continue
        # A local build such as 2.13.0+cpu has the version that it is a build of.
        if not requirement.specifier.contains(version, prereleases=True):
            text = (
                f"{requirement.name} {version} is not in the tested range {requirement.specifier}"
            )
            yield Finding("packages", "broken", text, _install(line))
        elif requirement.name in _TOLD:
            told.append(f"{requirement.name} {version}")
    yield Finding("packages", "good", ", ".join(told) or "none of them is found")


def _install(requirement: str) -> str:
    return f"python -m pip install '{requirement}'"


def _requirements() -> list[str]:
    """The dependencies without extras, of the installed distribution or of the checkout."""
    file = CHECKOUT / "pyproject.toml"
    if file.is_file():
        return list(tomllib.loads(file.read_text())["project"]["dependencies"])
    lines = importlib.metadata.requires(DISTRIBUTION) or []
    return [line for line in lines if "extra ==" not in line]
