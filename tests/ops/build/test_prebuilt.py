"""Kernels that were compiled beforehand, for machines with other CPUs."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from src.ops.build import kernel_cache, level_check, prebuilt
from src.ops.build.compilers import BuildError
from src.ops.build.kernel_cache import KernelCache
from src.ops.build.levels import LEVELS, Level
from src.ops.build.prebuild import prebuild
from tests.ops.build.test_ways import kernels_with


class Image:
    """A compiler that writes its options into its output, and the folder beside the sources."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls = tmp_path / "calls"
        self._calls.write_text("")
        self._compiler = tmp_path / "compiler"
        self.folder = tmp_path / "prebuilt"
        self.cache_directory = tmp_path / "cache"
        self.knows_amx = True
        self.write()
        monkeypatch.setattr(prebuilt, "DIRECTORY", self.folder)
        monkeypatch.setenv("CXX", str(self._compiler))

    def write(self, broken: str = "no-level") -> None:
        unknown = "none" if self.knows_amx else "-mamx-bf16"
        self._compiler.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *--version*) echo writing 1.0; exit ;; *{unknown}*) exit 1 ;; esac\n'
            'case "$*" in *-fsyntax-only*) exit ;; esac\n'
            f'case "$*" in *{broken}*) exit 1 ;; esac\n'
            f'for last; do :; done\necho "$last" >> "{self._calls}"\necho "$*" > "$last"\n'
        )
        self._compiler.chmod(self._compiler.stat().st_mode | stat.S_IXUSR)

    @property
    def compilations(self) -> int:
        """Of libraries."""
        return sum(line.endswith(".so") for line in self._calls.read_text().splitlines())

    def cache(self) -> KernelCache:
        return KernelCache(self.cache_directory)


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    return Image(tmp_path, monkeypatch)


def names(levels: tuple[Level, ...] = LEVELS) -> list[str]:
    return [level.name for level in levels]


def test_every_level_is_compiled_whatever_this_cpu_has(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    assert not image.cache().is_prebuilt
    assert prebuild(image.cache()) == names()
    assert image.compilations == len(LEVELS)
    assert image.cache().is_prebuilt
    for level in LEVELS:
        assert (image.folder / f"{level.name}.so").read_text().count(" -mavx2 ") == (
            level.name != "portable"
        )


@pytest.mark.parametrize("level", LEVELS, ids=names())
def test_a_cpu_takes_its_own_level_and_compiles_nothing(
    image: Image, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: Level
) -> None:
    prebuild(image.cache())
    compiled = image.compilations
    monkeypatch.setattr(kernel_cache, "cpu_flags", lambda: level.needs)
    checked: list[str] = []

    def check(portable: Path, library: Path, number: int) -> str:
        checked.extend((portable.stem, library.stem))
        return level_check.PASSED

    monkeypatch.setattr(kernel_cache, "check", check)
    loaded: list[Path] = []

    def load(path: Path) -> Any:
        loaded.append(path)
        return SimpleNamespace(ways=kernels_with(), streamed_linear=None)

    monkeypatch.setattr(kernel_cache, "KernelLibrary", load)
    cache = image.cache()
    assert cache.build()[0] == level.name
    assert checked == ["portable", level.name]
    assert [path.read_bytes() for path in loaded] == [
        (image.folder / f"{level.name}.so").read_bytes()
    ]
    assert (cache.compilations, image.compilations) == (0, compiled)
    # The next start finds its verdict.
    again = image.cache().load()
    assert again is not None
    assert again[0] == level.name


def test_what_was_not_prebuilt_or_is_damaged_is_compiled(image: Image, tmp_path: Path) -> None:
    image.knows_amx = False
    image.write()
    assert prebuild(image.cache()) == names(LEVELS[:-1])
    (image.folder / "avx2.so").write_text("other code")
    (image.folder / "avx512.so").unlink()
    before = image.compilations
    image.knows_amx = True
    image.write()
    cache = image.cache()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    outputs, failed = cache.compile(scratch, LEVELS)
    assert (list(outputs), failed) == (names(), {})
    assert cache.compilations == image.compilations - before == 3
    assert "other code" not in outputs["avx2"].read_text()


@pytest.mark.parametrize("index", ["", "{", "[]", '{"key": "other", "sha256": {"avx2": "0"}}'])
def test_libraries_of_other_sources_are_none(image: Image, index: str) -> None:
    prebuild(image.cache())
    (image.folder / "index.json").write_text(index)
    assert not image.cache().is_prebuilt
    # And they go when this one's come.
    (image.folder / "stray.so").write_text("")
    prebuild(image.cache())
    assert image.cache().is_prebuilt
    assert not (image.folder / "stray.so").exists()


def test_flags_are_part_of_the_key(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuild(image.cache())
    monkeypatch.setenv("SLIPSTREAM_KERNEL_FLAGS", "-Werror")
    assert image.cache().is_prebuilt
    monkeypatch.setenv("SLIPSTREAM_KERNEL_FLAGS", "-ffast-math")
    assert not image.cache().is_prebuilt


def test_a_level_that_fails_is_no_image(image: Image) -> None:
    image.write(broken="-mavx512vnni")
    with pytest.raises(BuildError, match="avx512_vnni"):
        prebuild(image.cache())
    assert not image.folder.exists()
