"""Packages outside the tree: the one of docs/plugins.md, installed by pip, and small ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from src.core.settings import CHECKOUT

NAME = "slipstream-echo"


def blocks(language: str) -> list[str]:
    """The blocks of a language on the page, in their order."""
    page = (CHECKOUT / "docs" / "plugins.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def install_echo(folder: Path) -> Path:
    """Build the package that the page shows, and install it into a folder for PYTHONPATH."""
    source, target = folder / "source", folder / "installed"
    source.mkdir()
    (project,) = blocks("toml")
    (source / "pyproject.toml").write_text(project)
    (source / "slipstream_echo.py").write_text("\n\n".join(blocks("python")))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)],
        check=True,
        capture_output=True,
    )
    return target


def write_package(folder: Path, name: str, code: str, entries: dict[str, str]) -> None:
    """What pip leaves of a package: ``entries`` maps groups to objects of its only module."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\nit = {module}:{value}\n" for group, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
