"""What of torch and of the kernels is installed, and which instruction sets pass their check."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from src.ops.build.cache_root import cache_root
from src.ops.build.compilers import BuildError
from src.ops.build.kernel_cache import KernelCache
from src.ops.build.level_check import PASSED, check
from src.ops.build.levels import LEVELS, Level, cpu_flags


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

    ``verdict`` is ``passed``, what went wrong, or ``None`` if it was never checked: a build tries
    the fastest level first, and ends with the first that passes.
    """

    name: str
    supported: bool
    verdict: str | None


def level_states(serving: str) -> list[LevelState]:
    """All levels, slowest first. The one that serves runs its self-check again. Blocks.

    Verdicts of other levels are those of the build.
    """
    flags = cpu_flags()
    cache = KernelCache(cache_root())
    verdicts: dict[str, str] = {}
    if cache.compiler is not None:
        directory = cache.directory()
        verdicts = _recorded(directory)
        for level in LEVELS:
            if level.name == serving:
                verdicts[serving] = _checked(directory, level) or verdicts.get(serving, PASSED)
    return [
        LevelState(level.name, level.needs <= flags, verdicts.get(level.name)) for level in LEVELS
    ]


def _checked(directory: Path, level: Level) -> str | None:
    """The verdict on a library of the cache; ``None`` if it is not there."""
    portable, file = directory / "portable.so", directory / f"{level.name}.so"
    if not file.exists() or not portable.exists():
        return None
    try:
        return check(portable, file, level.number)
    except (BuildError, OSError) as error:
        return str(error)


def _recorded(directory: Path) -> dict[str, str]:
    """Verdicts of the build; none if it wrote none."""
    try:
        checks = json.loads((directory / "manifest.json").read_text())["checks"]
        return {str(name): str(verdict) for name, verdict in checks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
