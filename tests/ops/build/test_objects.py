"""Objects of the kernels' units: what each depends on, which are compiled, and which are kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from src.ops.build import kernel_cache as cached
from src.ops.build import objects as objects_module
from src.ops.build.compilers import BuildError, compilers
from src.ops.build.cpp_compiler import cpp_compiler
from src.ops.build.kernel_cache import KernelCache
from src.ops.build.level_check import KILLED
from src.ops.build.levels import LEVELS
from src.ops.build.objects import DOES_NOT_COMPILE, Objects, compilers_at_once
from src.ops.build.units import (
    FLAGS,
    SAME_FOR_EVERY_LEVEL,
    SOURCES,
    UNITS,
    Unit,
    files_of,
    units_of,
)

GPP = (["g++"], "1.0")


class Compiler:
    """A compiler that writes its options into its output and notes what it is asked for.

    A unit whose first line is a shell command runs it first.
    """

    def __init__(self, folder: Path) -> None:
        self._calls = folder / "calls"
        self._program = folder / "compiler"
        self._program.write_text(
            "#!/bin/sh\n"
            "for word; do case $word in *.cpp) unit=$word ;; esac; last=$word; done\n"
            f'echo "$(basename "$unit")" >> "{self._calls}"\n'
            'first=$(head -n 1 "$unit")\n'
            'case "$first" in "//"*) eval "${first#//}" ;; esac\n'
            'echo "$*" > "$last"\n'
        )
        self._program.chmod(0o755)
        self.forget()

    def forget(self) -> None:
        self._calls.write_text("")

    @property
    def command(self) -> tuple[list[str], str]:
        return [str(self._program)], "writing 1.0"

    @property
    def compiled(self) -> list[str]:
        return sorted(self._calls.read_text().splitlines())


class Workshop:
    """Three units, two of which include a header, and a place for their objects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / "kept"
        self.compiler = Compiler(folder)
        self.header = folder / "common.h"
        self.header.write_text("int common;\n")
        for name, text in (
            ("a.cpp", '#include "common.h"\n'),
            ("b.cpp", '#include "other.h"\n'),
            ("c.cpp", ""),
        ):
            (folder / name).write_text(text)
        (folder / "other.h").write_text('#include "common.h"\n')

    def units(self, *flags: str, names: str = "abc") -> list[Unit]:
        return [Unit(self.folder / f"{name}.cpp", flags) for name in names]

    def make(
        self, machine: str = "", seconds: float = 60.0, **wanted: list[Unit]
    ) -> tuple[dict[str, list[Path]], dict[str, str]]:
        self.compiler.forget()
        scratch = self.folder / f"scratch{time.monotonic_ns()}"
        scratch.mkdir()
        return Objects(self.kept, self.compiler.command, machine).make(wanted, scratch, seconds)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def test_each_unit_is_compiled_once_and_then_taken(workshop: Workshop) -> None:
    made, failed = workshop.make(one=workshop.units("-O1"))
    assert failed == {}
    assert workshop.compiler.compiled == ["a.cpp", "b.cpp", "c.cpp"]
    assert [f"-O1 -I{SOURCES} -c " in file.read_text() for file in made["one"]] == [True] * 3
    again, _ = workshop.make(one=workshop.units("-O1"))
    assert workshop.compiler.compiled == []
    assert [each.read_bytes() for each in again["one"]] == [f.read_bytes() for f in made["one"]]
    # In the order in which they were asked for.
    backwards, _ = workshop.make(one=workshop.units("-O1", names="cba"))
    assert [each.name for each in backwards["one"]] == [f.name for f in made["one"]][::-1]


def test_after_a_change_only_who_includes_it_is_compiled(workshop: Workshop) -> None:
    workshop.make(one=workshop.units())
    workshop.header.write_text("int changed;\n")
    workshop.make(one=workshop.units())
    assert workshop.compiler.compiled == ["a.cpp", "b.cpp"]
    (workshop.folder / "c.cpp").write_text("int own;\n")
    workshop.make(one=workshop.units())
    assert workshop.compiler.compiled == ["c.cpp"]


def test_flags_the_compiler_and_the_machine_count(workshop: Workshop) -> None:
    workshop.make(one=workshop.units("-O1"))
    workshop.make(one=workshop.units("-O1", "-Werror"))
    assert workshop.compiler.compiled == [], "it changes no object that does compile"
    workshop.make(one=workshop.units("-O2"))
    assert len(workshop.compiler.compiled) == 3
    workshop.make(one=workshop.units("-O1"), machine="another")
    assert len(workshop.compiler.compiled) == 3
    unit = workshop.units("-O1")[0]
    before = Unit(unit.source, unit.flags, workshop.header)
    keys = {
        unit.key(GPP, ""),
        before.key(GPP, ""),
        unit.key((["g++"], "2.0"), ""),
        unit.key((["clang++"], "1.0"), ""),
    }
    assert len(keys) == 4


def test_libraries_share_the_objects_of_equal_units(workshop: Workshop) -> None:
    other = [*workshop.units("-O1", names="a"), *workshop.units("-O2", names="b")]
    made, _ = workshop.make(one=workshop.units("-O1"), two=other)
    assert workshop.compiler.compiled == ["a.cpp", "b.cpp", "b.cpp", "c.cpp"]
    assert made["one"][0] == made["two"][0]


@pytest.mark.parametrize("content", [b"", b"other code"])
def test_a_damaged_object_is_compiled_again(workshop: Workshop, content: bytes) -> None:
    workshop.make(one=workshop.units(names="a"))
    (kept,) = workshop.kept.iterdir()
    expected = kept.read_bytes()
    kept.write_bytes(content)
    made, _ = workshop.make(one=workshop.units(names="a"))
    assert workshop.compiler.compiled == ["a.cpp"]
    assert made["one"][0].read_text().split()[:-1] == expected.decode().split()[:-1]


def test_the_objects_that_were_used_last_are_kept(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        workshop.make(one=workshop.units(names=name))
    for age, path in enumerate(sorted(workshop.kept.iterdir())):
        os.utime(path, (1e9 - age, 1e9 - age))
    workshop.make(one=workshop.units(names="b"))  # which uses it
    assert workshop.compiler.compiled == []
    size = max(path.stat().st_size for path in workshop.kept.iterdir())
    monkeypatch.setattr(objects_module, "_KEPT_BYTES", 2 * size + size // 2)
    (workshop.kept / "1234.567.half").write_bytes(bytes(size))  # a killed build left it
    os.utime(workshop.kept / "1234.567.half", (1e8, 1e8))
    workshop.make(one=workshop.units("-O3", names="a"))
    assert len(list(workshop.kept.iterdir())) == 2
    workshop.make(one=[*workshop.units(names="b"), *workshop.units("-O3", names="a")])
    assert workshop.compiler.compiled == []


def test_a_unit_that_fails_fails_its_libraries_alone(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    (workshop.folder / "b.cpp").write_text("//case $* in *-O2*) echo oh no >&2; exit 1 ;; esac\n")
    (workshop.folder / "c.cpp").write_text("//case $* in *-O3*) kill -KILL $$ ;; esac\n")
    made, failed = workshop.make(
        one=workshop.units("-O1"), two=workshop.units("-O2"), three=workshop.units("-O3")
    )
    assert list(made) == ["one"]
    assert failed == {"two": DOES_NOT_COMPILE, "three": KILLED}
    assert "b.cpp of the two level (does not compile): oh no" in caplog.text
    assert "c.cpp of the three level (killed, or took too long)" in caplog.text
    # What it left is no object.
    (workshop.folder / "b.cpp").write_text("//echo half > $last; exit 1\n")
    assert workshop.make(one=workshop.units("-O1", names="b"))[1] == {"one": DOES_NOT_COMPILE}
    assert workshop.make(one=workshop.units("-O1", names="b"))[1] == {"one": DOES_NOT_COMPILE}


def test_after_a_failure_no_other_unit_is_begun(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "compilers_at_once", lambda: 1)
    (workshop.folder / "a.cpp").write_text("//exit 1\n")
    workshop.make(one=workshop.units(), two=workshop.units(names="c"))
    assert workshop.compiler.compiled == ["a.cpp", "c.cpp"]


def test_a_unit_that_takes_too_long_is_killed(workshop: Workshop) -> None:
    (workshop.folder / "a.cpp").write_text("//sleep 60\n")
    begun = time.monotonic()
    assert workshop.make(one=workshop.units(names="a"), seconds=0.3)[1] == {"one": KILLED}
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("cpus", [1, 3])
def test_as_many_are_compiled_at_once_as_there_are_processors(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    monkeypatch.setattr(objects_module, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(objects_module, "available_memory", lambda: 1 << 50)
    # None ends before as many have begun as are to run at once; "on" tells who runs now.
    counted = "begun" if cpus == 3 else "on"
    for name in "abc":
        (workshop.folder / f"{name}.cpp").write_text(
            f"//cd {workshop.folder}; touch {name}.begun {name}.on; "
            f"for i in $(seq 200); do [ $(ls *.begun | wc -l) -ge {cpus} ] && break; "
            f"sleep 0.1; done; sleep 0.2; ls *.{counted} | wc -l >> seen; rm {name}.on\n"
        )
    workshop.make(one=workshop.units())
    assert (workshop.folder / "seen").read_text().split() == [str(cpus)] * 3


def test_memory_bounds_how_many_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "usable_cpus", lambda: 64)
    for free, expected in ((1 << 20, 1), (5 << 30, 5), (1 << 50, 64)):
        monkeypatch.setattr(objects_module, "available_memory", lambda free=free: free)
        assert compilers_at_once() == expected

    def no_such_file() -> int:
        raise FileNotFoundError

    monkeypatch.setattr(objects_module, "available_memory", no_such_file)
    assert compilers_at_once() == 64


def test_an_end_of_the_process_ends_it(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (workshop.folder / f"{name}.cpp").write_text("//sleep 60\n")
    monkeypatch.setattr(compilers, "closed", False)
    timer = threading.Timer(0.5, compilers.close)
    timer.start()
    begun = time.monotonic()
    with pytest.raises(BuildError, match="this process ends"):
        workshop.make(one=workshop.units())
    timer.join()
    assert time.monotonic() - begun < 30


def test_units_are_all_there_are_and_each_is_named_once() -> None:
    found = sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cpp"))
    assert sorted(UNITS) == found
    assert set(UNITS) >= SAME_FOR_EVERY_LEVEL


@pytest.mark.parametrize("name", UNITS)
def test_what_a_unit_depends_on_is_what_the_compiler_reads(name: str) -> None:
    compiler = cpp_compiler()
    assert compiler is not None
    # Every level's: what one includes under a condition counts for all.
    read: set[Path] = set()
    for level in (LEVELS[0], LEVELS[-1]):
        command = [*compiler[0], "-std=c++17", *level.flags, f"-I{SOURCES}", "-MM"]
        command.append(str(SOURCES / name))
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        read |= {Path(word) for word in re.findall(r"\S+\.(?:cpp|h)\b", answer)}
    assert read <= set(files_of(SOURCES / name))


@pytest.mark.parametrize("name", sorted(SAME_FOR_EVERY_LEVEL))
def test_who_is_the_same_for_every_level_asks_for_no_instruction_set(name: str) -> None:
    asks = re.compile(r"__(AVX|SSE|FMA|F16C|AMX|BMI)|[a-z]mmintrin\.h|SLIPSTREAM_(PAIRS|TILES)")
    for path in files_of(SOURCES / name):
        assert not asks.search(path.read_text()), path.name


def test_levels_differ_in_all_other_units() -> None:
    portable, fastest = units_of(LEVELS[0]), units_of(LEVELS[-1])
    pairs = zip(portable, fastest, strict=True)
    same = {one.source.relative_to(SOURCES).as_posix() for one, other in pairs if one == other}
    assert same == SAME_FOR_EVERY_LEVEL
    assert "-O3" in FLAGS
    assert {"-O1", "-O3"} & set(units_of(LEVELS[0], "-O1")[0].flags) == {"-O1"}


def test_builds_of_other_sources_go_when_nobody_has_used_them_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "_KEPT_BUILDS", 2)
    cache = KernelCache(tmp_path)
    ages = {"new": 0, "recent": 1, "used lately": 6, "old": 8, "older": 9}
    for name, days in {**ages, "objects": 99}.items():
        (tmp_path / "cpu-kernels" / name / "compiler").mkdir(parents=True)
        at = time.time() - days * 24 * 3600
        os.utime(tmp_path / "cpu-kernels" / name, (at, at))
    cache._forget_old_builds()
    assert {path.name for path in (tmp_path / "cpu-kernels").iterdir()} == {
        *("new", "recent", "used lately", "objects")
    }


@pytest.mark.compilers
@pytest.mark.timeout(1800)
def test_every_level_passes_as_it_is_shipped(kernel_cache: KernelCache) -> None:
    known = [level.name for level in kernel_cache.levels if kernel_cache.knows(level)]
    files = kernel_cache.build_all()
    assert list(files) == known
    assert [file.stem for file in files.values()] == known
    # Others have only been compiled, for a CPU that this machine is not.
    others = [level for level in LEVELS if level not in kernel_cache.levels]
    scratch = kernel_cache.directory() / "tmp-others"
    scratch.mkdir()
    try:
        outputs, failed = kernel_cache.compile(
            scratch, [level for level in others if kernel_cache.knows(level)]
        )
        assert failed == {}
        assert all(output.stat().st_size for output in outputs.values())
    finally:
        shutil.rmtree(scratch)
