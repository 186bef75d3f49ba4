"""What of torch and of the kernels is installed, and which instruction sets pass their check."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from src.ops.cpu.build import KernelCache, cache_root
from src.ops.cpu.compilers import BuildError
from src.ops.cpu.level_check import PASSED, check
from src.ops.cpu.levels import LEVELS, cpu_flags


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch.

    Attributes
    ----------
    cuda
        The version of CUDA that it is built for; ``None`` for the CPU alone.
    gpus
        Name and bytes of each GPU that it sees.
    """

    version: str
    cuda: str | None
    gpus: tuple[tuple[str, int], ...]


def torch_build() -> TorchBuild:
    """Describe torch. Initialises CUDA if there is a GPU."""
    gpus = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            gpus.append((properties.name, properties.total_memory))
    return TorchBuild(torch.__version__, torch.version.cuda, tuple(gpus))


@dataclass(frozen=True)
class LevelState:
    """One instruction set level.

    ``verdict`` is ``passed``, what went wrong, or ``None`` if it is not built: a build tries the
    fastest level first, and ends with the first that passes.
    """

    name: str
    supported: bool
    verdict: str | None


def level_states() -> list[LevelState]:
    """All levels, slowest first. Built ones of this compiler run their self-check again. Blocks."""
    flags = cpu_flags()
    cache = KernelCache(cache_root())
    directory = cache.directory() if cache.compiler is not None else None
    recorded = {} if directory is None else _recorded(directory)
    states = []
    for level in LEVELS:
        file = None if directory is None else directory / f"{level.name}.so"
        verdict = recorded.get(level.name)
        if file is not None and file.exists() and (directory / "portable.so").exists():
            try:
                verdict = check(directory / "portable.so", file, level.number)
            except (BuildError, OSError) as error:
                verdict = str(error)
        states.append(LevelState(level.name, level.needs <= flags, verdict))
    return states


def _recorded(directory: Path) -> dict[str, str]:
    """Verdicts of the build, which removes libraries that it does not need."""
    try:
        checks = json.loads((directory / "manifest.json").read_text())["checks"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {name: str(verdict) for name, verdict in checks.items() if verdict != PASSED}
