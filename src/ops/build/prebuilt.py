"""Libraries that were compiled beforehand, for machines that were not known then.

An image is built on one machine and runs on others, and a cache that was filled on one CPU is of no
use to a CPU with other features. So `python -m src.ops.build.prebuild` compiles every level into a
folder beside the sources, which is trusted as they are. A start copies from there what it would
compile, and checks it on its own CPU as always.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).parent / "prebuilt"
_INDEX: Final = "index.json"


class Prebuilt:
    """Libraries by level.

    Parameters
    ----------
    key
        Digest of sources, flags and the kind of machine; libraries of others do not count.
    directory
        Where they are; None: beside the sources.
    """

    def __init__(self, key: str, directory: Path | None = None) -> None:
        self._key = key
        self._directory = DIRECTORY if directory is None else directory

    def has(self, level: str) -> bool:
        """Whether there is a library of a level."""
        return level in self._hashes()

    def copy(self, level: str, output: Path) -> bool:
        """Write a level's library to ``output``; False if there is none, or it is damaged."""
        expected = self._hashes().get(level)
        if expected is None:
            return False
        try:
            content = (self._directory / f"{level}.so").read_bytes()
            if hashlib.sha256(content).hexdigest() != expected:
                return False
            output.write_bytes(content)
        except OSError:
            return False
        return True

    def keep(self, files: Mapping[str, Path]) -> None:
        """Take over libraries by level; those of other sources go."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        hashes = {}
        for level, file in files.items():
            shutil.copy(file, self._directory / f"{level}.so")
            hashes[level] = hashlib.sha256(file.read_bytes()).hexdigest()
        # Last, and at once: a library that is not in the index does not exist.
        scratch = self._directory / f"{_INDEX}.tmp"
        scratch.write_text(json.dumps({"key": self._key, "sha256": hashes}, indent=1))
        os.replace(scratch, self._directory / _INDEX)

    def _hashes(self) -> dict[str, str]:
        try:
            index = json.loads((self._directory / _INDEX).read_text())
            hashes: dict[str, str] = index["sha256"] if index["key"] == self._key else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return hashes
