"""Checks of the machine: memory and CPUs that this process may use, caches, and the port."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from src.cli.doctor.finding import Finding, short
from src.core.cgroups import control_groups
from src.core.config import GIB, Config
from src.core.cpus import usable_cpus
from src.core.host_memory import available_memory
from src.core.memory_report import size

_LITTLE: Final = 2 * GIB
_LITTLE_DISK: Final = 2 * GIB
# Files that are counted at most, so that a large cache of models takes no minutes.
_MOST_FILES: Final = 200_000
_LARGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def memory() -> Iterator[Finding]:
    """Memory that is free, the limits of the control group, and large pages."""
    free = available_memory()
    limits = [
        group.number("memory.max") for group in control_groups("memory") if group.version == 2
    ]
    limits += [
        group.number("memory.limit_in_bytes")
        for group in control_groups("memory")
        if group.version == 1
    ]
    # Version 1 writes "no limit" as a number that no machine has.
    least = min((limit for limit in limits if limit is not None and limit < 2**60), default=None)
    text = f"{size(free)} may be allocated"
    if least is not None:
        text += f", the control group's limit is {size(least)}"
    if free < _LITTLE:
        yield Finding(
            "memory",
            "slow",
            f"{text}: little, the demo model fits and not much else",
            "end other programs, or raise the container's limit; python -m src plan MODEL",
        )
    else:
        yield Finding("memory", "good", text)
    yield from _large_pages()


def _large_pages() -> Iterator[Finding]:
    try:
        setting = _LARGE_PAGES.read_text()
    except OSError:
        return
    if "[never]" in setting:
        yield Finding(
            "memory",
            "slow",
            "large pages are off, so reading weights takes longer on the CPU",
            f"echo madvise > {_LARGE_PAGES}   (as root)",
        )


def cpus() -> Iterator[Finding]:
    """CPUs that this process may use."""
    here, usable = os.cpu_count() or 1, usable_cpus()
    text = f"{usable} of {here} may be used"
    if usable < here:
        text += ", by affinity or the control group's quota"
    yield Finding("cpus", "good", text)


def code_cache() -> Iterator[Finding]:
    """The directory for compiled code: size, room, and whether it is used."""
    from src.ops.build.cache_root import cache_root, chosen_cache_root

    chosen = chosen_cache_root()
    if cache_root() != chosen:
        yield Finding(
            "caches",
            "slow",
            f"compiled code: others may write to {short(chosen)}, so every start compiles",
            f"chmod go-w {short(chosen)}   (and chown, if it is not yours)",
        )
    else:
        yield from _cache("caches", "compiled code", chosen, "SLIPSTREAM_CACHE_DIR")


def model_cache() -> Iterator[Finding]:
    """The directory for models of the hub: size, room, and whether it can be written."""
    from huggingface_hub.constants import HF_HUB_CACHE

    yield from _cache("models", "models of the hub", Path(HF_HUB_CACHE), "HF_HUB_CACHE")


def _cache(subject: str, what: str, directory: Path, variable: str) -> Iterator[Finding]:
    # It is made by whoever writes first.
    existing = next(each for each in (directory, *directory.parents) if each.exists())
    text = f"{what}: {short(directory)}"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Finding(
            subject,
            "slow",
            f"{text}: cannot be written, so every start begins anew",
            f"export {variable}=/a/directory/of/yours",
        )
        return
    if directory.is_dir():
        taken, is_whole = _size_of(directory)
        text += f", {'' if is_whole else 'more than '}{size(taken)}"
    else:
        text += ", empty"
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    text += f", {size(free)} free"
    if free < _LITTLE_DISK:
        text = f"{text}: little room"
        yield Finding(subject, "slow", text, f"make room, or export {variable}=/another/directory")
    else:
        yield Finding(subject, "good", text)


def _size_of(directory: Path) -> tuple[int, bool]:
    """Bytes of the files below a directory, and whether all were counted."""
    taken = count = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            count += 1
            if count > _MOST_FILES:
                return taken, False
            try:
                # Links of the hub's cache point to files that are counted themselves.
                taken += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return taken, True


def port(arguments: argparse.Namespace, config: Config) -> Iterator[Finding]:
    """Whether a server could listen where it would."""
    from src.cli.serve import hypercorn_settings

    settings = hypercorn_settings(arguments, config)
    where = settings.bind[0]
    try:
        sockets = settings.create_sockets()
    except (OSError, OverflowError, ValueError) as error:
        yield Finding(
            "port",
            "broken",
            f"cannot listen on {where}: {error}",
            "end what listens there, or python -m src serve --port ANOTHER",
        )
        return
    for each in (*sockets.secure_sockets, *sockets.insecure_sockets, *sockets.quic_sockets):
        each.close()
    yield Finding("port", "good", f"{where} is free")
