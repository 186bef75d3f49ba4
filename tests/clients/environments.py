"""Environments that clients are installed into: never the project's, and few, as they are large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

INSTALL_SECONDS = 1200
# A client's own output, where it is long, is of use at its end.
REASON_CHARACTERS = 300


class NotInstalled(Exception):
    """The packages could not be installed; the message is the installer's last words."""


@dataclass(frozen=True)
class Environment:
    """Packages that are installed together: from PyPI, or from npm where ``npm`` is set.

    ``local`` asks for pip, which also finds local builds of torch; where it is unset, uv does the
    same in a tenth of the time, if it is there. ``seconds`` bounds each of the commands.
    """

    name: str
    requirements: tuple[str, ...]
    npm: bool = False
    local: bool = False
    seconds: int = INSTALL_SECONDS

    def path(self, root: Path) -> Path:
        return root / self.name

    def programs(self, root: Path) -> Path:
        """The folder of what the packages put on PATH."""
        inside = ("node_modules", ".bin") if self.npm else ("bin",)
        return self.path(root).joinpath(*inside)

    def install(self, root: Path) -> None:
        """Install what is missing; an environment that is complete is used again.

        Raises:
            NotInstalled: if the installer fails or takes longer than ``seconds``.
        """
        stamp = self.path(root) / "complete.json"
        if stamp.is_file() and json.loads(stamp.read_text()) == list(self.requirements):
            return
        stamp.unlink(missing_ok=True)
        self.path(root).mkdir(parents=True, exist_ok=True)
        try:
            for command in self._commands(root):
                subprocess.run(
                    command,
                    cwd=self.path(root),
                    check=True,
                    capture_output=True,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    timeout=self.seconds,
                )
        except subprocess.CalledProcessError as error:
            words = " ".join((error.stderr or error.stdout).split())
            raise NotInstalled(words[-REASON_CHARACTERS:]) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotInstalled(str(error)[:REASON_CHARACTERS]) from error
        stamp.write_text(json.dumps(self.requirements))

    def _commands(self, root: Path) -> list[list[str]]:
        if self.npm:
            quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
            return [["npm", "init", "-y"], ["npm", "install", *quiet, *self.requirements]]
        python = str(self.programs(root) / "python")
        if self.local or find_spec("uv") is None:
            installer = [python, "-m", "pip", "install", "-q"]
        else:
            installer = [sys.executable, "-m", "uv", "pip", "install", "-q", "-p", python]
        venv = [sys.executable, "-m", "venv", str(self.path(root))]
        return [venv, [*installer, *self.requirements]]

    def version(self, root: Path, package: str) -> str:
        """The installed version of a package."""
        if self.npm:
            manifest = self.path(root) / "node_modules" / package / "package.json"
            return str(json.loads(manifest.read_text())["version"])
        code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
        python = str(self.programs(root) / "python")
        done = subprocess.run(
            [python, "-c", code, package], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def variables(self, root: Path) -> dict[str, str]:
        """The environment variables of a process that is to find the packages' programs."""
        path = f"{self.programs(root)}{os.pathsep}{os.environ['PATH']}"
        inherited = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
        return {**inherited, "PATH": path}
