"""Building and caching of the CPU kernels."""

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from src.ops import OPS
from src.ops.build import kernel_cache as cached
from src.ops.build import kernels as build
from src.ops.build import level_check, ways
from src.ops.build.cache_root import cache_root
from src.ops.build.compilers import BuildError
from src.ops.build.kernel_cache import KernelCache
from src.ops.build.level_check import KILLED, check
from src.ops.build.levels import LEVELS, cpu_flags, cpu_model
from src.ops.build.scratch import is_ours, make_directory
from src.ops.build.units import SAME_FOR_EVERY_LEVEL, SOURCES, UNITS
from src.ops.projections import rounding
from src.ops.runtime.abi import KERNELS
from src.ops.runtime.c_records import Record, _records, int64, record
from src.ops.runtime.kernel_library import KernelLibrary, UnusableLibraryError
from tests.ops.comparison import COMPILED

ROOT = Path(__file__).parents[3]


@pytest.fixture
def private(
    tmp_path: Path, level_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> KernelCache:
    """A cache of this test's own whose linker copies the libraries that are already built.

    They have passed their self-checks, which take seconds and are not run again. What would be
    timed does nothing.
    """
    monkeypatch.setattr(cached, "check", lambda *_: level_check.PASSED)
    monkeypatch.setattr(cached, "timed_calls", lambda _: lambda *_: lambda: None)
    built = {level.name: level_files.get(level.name, "no such file") for level in LEVELS}
    compiler = tmp_path / "copying-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "  *--version*) echo copying 1.0; exit ;;\n"
        "esac\n"
        "for last; do :; done\n"
        f'echo "$last" >> "{tmp_path}/calls"\n'
        'case "$*" in\n'
        '  *" -c "*) echo "$*" > "$last"; exit ;;\n'
        # Each level's flags are those of a slower one and more.
        f'  *-mamx-bf16*) from="{built["amx"]}" ;;\n'
        f'  *-mavx512bf16*) from="{built["avx512_bf16"]}" ;;\n'
        f'  *-mavx512vnni*) from="{built["avx512_vnni"]}" ;;\n'
        f'  *-mavx512f*) from="{built["avx512"]}" ;;\n'
        f'  *-mavxvnni*) from="{built["avx2_vnni"]}" ;;\n'
        f'  *-mavx2*) from="{built["avx2"]}" ;;\n'
        f'  *) from="{built["portable"]}" ;;\n'
        "esac\n"
        'sleep 0.2\ncp "$from" "$last"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    return KernelCache(tmp_path / "cache")


@pytest.fixture
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as it starts: the references serve, nothing has been tried."""
    before = [op.active("cpu") for op in OPS]
    monkeypatch.setattr(build, "_state", build._State())
    monkeypatch.setattr(rounding._on_cpu, "kernel", None)
    for op in OPS:
        op.uninstall_cpu()
    yield
    for op, kernel in zip(OPS, before, strict=True):
        op.install_cpu(kernel)


def test_built_once_then_loaded(private: KernelCache) -> None:
    assert private.load() is None
    level, _ = private.build()
    assert level == private.levels[-1].name
    modified = (private.directory() / "manifest.json").stat().st_mtime_ns
    assert private.build()[0] == level
    loaded = private.load()
    assert loaded is not None
    assert loaded[0] == level
    assert (private.directory() / "manifest.json").stat().st_mtime_ns == modified


def test_another_model_of_cpu_takes_its_own_measurements(
    private: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where machines share a cache, or one is copied: features alone do not tell what is fast."""
    private.build()
    (tmp_path / "calls").write_text("")
    monkeypatch.setattr(cached, "cpu_model", lambda: "another model with the same features")
    elsewhere = KernelCache(tmp_path / "cache")
    assert elsewhere.load() is None
    elsewhere.build()
    # The objects are the same, so they are only linked.
    assert ".o" not in {Path(line).suffix for line in (tmp_path / "calls").read_text().split()}
    assert elsewhere.load() is not None


def test_without_a_compiler_another_model_s_build_serves_with_the_fixed_table(
    private: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.build()
    monkeypatch.setattr(cached, "cpp_compiler", lambda: None)
    at_home = KernelCache(tmp_path / "cache").load()
    assert at_home is not None
    monkeypatch.setattr(cached, "cpu_model", lambda: "another model with the same features")
    elsewhere = KernelCache(tmp_path / "cache").load()
    assert elsewhere is not None
    assert at_home[1].has_measured_ways
    assert elsewhere[1].has_measured_ways == (not ways.has_several(elsewhere[1].ways))


def test_a_model_is_read_from_what_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = (
        "processor\t: 0\nvendor_id\t: GenuineIntel\n"
        "model\t\t: 143\nmodel name\t: Xeon: a\nflags\t: x\n"
    )
    (tmp_path / "cpuinfo").write_text(f"{one}\n{one.replace('143', '207')}\n")
    real = open
    monkeypatch.setattr("builtins.open", lambda name, *rest: real(tmp_path / "cpuinfo", *rest))
    assert cpu_model() == "vendor_id: GenuineIntel, model: 143, model name: Xeon: a"


def test_without_a_measurement_a_fixed_table_serves(
    private: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so, at the build and at each start; no start measures again."""
    caplog.set_level(logging.WARNING, "src")

    def fails(*_: object) -> None:
        raise RuntimeError("no memory for what a kernel computes on the way")

    monkeypatch.setattr(cached.ways, "measure", fails)
    _, built = private.build()
    (told,) = caplog.messages
    assert "was not measured (no memory for what a kernel computes on the way)" in told
    assert not built.has_measured_ways
    # Not an empty choice, which a level with one way for everything has.
    assert json.loads((private.directory() / "manifest.json").read_text())["ways"] is None
    caplog.clear()
    loaded = private.load()
    assert loaded is not None
    if ways.has_several(built.ways):
        (told,) = caplog.messages
        assert "was not measured (when these CPU kernels were built); a fixed table serves" in told
    else:
        assert caplog.messages == []
    # A copy: one file is one library for a process, whatever it has chosen.
    file = private.directory() / f"{private.levels[-1].name}.so"
    usual = KernelLibrary(Path(shutil.copy(file, private.directory() / "copy.so")))
    for library in (built, loaded[1]):
        for format in range(len(ways.FORMATS)):
            for rows in ways.ROWS:
                for same_bits in (False, True):
                    expected = usual.ways.chosen(format, rows, same_bits)
                    assert library.ways.chosen(format, rows, same_bits) == expected


@pytest.mark.parametrize("damage", ["truncate", "delete", "garbage manifest", "empty manifest"])
def test_damaged_cache_is_rebuilt(private: KernelCache, damage: str) -> None:
    level, _ = private.build()
    library = private.directory() / f"{level}.so"
    manifest = private.directory() / "manifest.json"
    if damage == "truncate":
        # Replaced, not shortened in place: this process has the old file mapped.
        half = library.read_bytes()[:1000]
        library.unlink()
        library.write_bytes(half)
    elif damage == "delete":
        library.unlink()
    else:
        manifest.write_text("{" if damage == "garbage manifest" else "{}")
    assert private.load() is None
    assert private.build()[0] == level


def test_concurrent_builders_share_one_build(private: KernelCache, tmp_path: Path) -> None:
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(KernelCache(tmp_path / "cache").build()[0]))
        for _ in range(4)
    ]
    (tmp_path / "calls").write_text("")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [private.levels[-1].name] * 4
    # The fastest level, and the one that it is checked against.
    calls = [Path(line).suffix for line in (tmp_path / "calls").read_text().splitlines()]
    levels = min(2, len(private.levels))
    assert calls.count(".so") == levels
    # Units that are the same for every level are compiled once.
    shared = len(SAME_FOR_EVERY_LEVEL)
    assert calls.count(".o") == levels * (len(UNITS) - shared) + shared


def test_all_levels_are_there_for_who_asks(private: KernelCache, tmp_path: Path) -> None:
    level, _ = private.build()
    few = {path.stem for path in private.directory().glob("*.so")}
    assert few == {"portable", level}
    names = [each.name for each in private.levels]
    files = private.build_all()
    assert list(files) == names
    contents = {path.read_bytes() for path in files.values()}
    assert len(contents) == len(names), "each level is a library of its own"
    (tmp_path / "calls").write_text("")
    assert len(private.build_all()) == len(names)
    assert (tmp_path / "calls").read_text() == ""


def test_a_level_that_does_not_pass_is_no_level_less_for_who_tests_all(
    private: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest = private.levels[-1]
    monkeypatch.setattr(
        cached, "check", lambda *given: "differs" if given[-1] == fastest.number else "passed"
    )
    with pytest.raises(BuildError, match=r"no instruction set|'differs'"):
        private.build_all()


def test_every_level_of_this_machine_and_compiler_is_tested(
    kernel_cache: KernelCache, level_files: dict[str, Path], libraries: dict[str, KernelLibrary]
) -> None:
    known = [level.name for level in kernel_cache.levels if kernel_cache.knows(level)]
    assert list(level_files) == list(libraries) == known
    # `build_all` has checked each when it was compiled; the one that serves is checked here.
    *_, fastest = (level for level in kernel_cache.levels if level.name in known)
    assert check(level_files["portable"], level_files[fastest.name], fastest.number) == "passed"


def test_the_next_level_serves_where_the_fastest_does_not_pass(
    private: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest = private.levels[-1]

    def checked(portable: Path, library: Path, number: int) -> str:
        return "crashed" if number == fastest.number else level_check.PASSED

    monkeypatch.setattr(cached, "check", checked)
    if fastest.name == "portable":
        with pytest.raises(BuildError, match="no instruction set level passed"):
            private.build()
        return
    level, _ = private.build()
    assert level == private.levels[-2].name
    manifest = json.loads((private.directory() / "manifest.json").read_text())
    assert manifest["checks"] == {fastest.name: "crashed", level: "passed"}
    assert fastest.name not in {path.stem for path in private.directory().glob("*.so")}


@pytest.fixture
def disturbed(private: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """One whose compiler is killed at the fastest level, as where memory is short."""
    copying = os.environ["CXX"]
    compiler = tmp_path / "killed-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f'[ -e "{tmp_path}/disturbed" ] && case "$*" in\n'
        f'  *"{" ".join(private.levels[-1].flags)}"*-o*) kill -KILL $$ ;;\n'
        "esac\n"
        f'exec {copying} "$@"\n'
    )
    compiler.chmod(0o755)
    (tmp_path / "disturbed").touch()
    monkeypatch.setenv("CXX", str(compiler))
    return KernelCache(tmp_path / "cache")


@pytest.mark.parametrize("disturbance", ["check", "compiler"])
def test_a_level_that_was_killed_is_tried_again(
    private: KernelCache,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disturbance: str,
) -> None:
    fastest = private.levels[-1]
    if fastest.name == "portable":
        return
    cache = private
    with monkeypatch.context() as patch:
        if disturbance == "check":
            verdicts = {fastest.number: KILLED}
            patch.setattr(cached, "check", lambda *given: verdicts.get(given[-1], "passed"))
        else:
            cache = request.getfixturevalue("disturbed")
        # It serves here, and nobody else.
        assert cache.build()[0] == private.levels[-2].name
        assert cache.load() is None
    (tmp_path / "disturbed").unlink(missing_ok=True)
    assert cache.build()[0] == fastest.name
    assert cache.load() is not None


def test_what_a_killed_build_left_is_removed(private: KernelCache) -> None:
    left = private.directory() / "tmp4f5k2m9x"
    left.mkdir(parents=True)
    (left / "portable.so").write_text("half")
    private.build()
    assert {path.name for path in private.directory().iterdir()} == {
        *("lock", "manifest.json", "portable.so"),
        f"{private.levels[-1].name}.so",
    }


def test_compilers_leave_others_a_head_start_unless_they_are_awaited(
    private: KernelCache, fresh_state: None, tmp_path: Path
) -> None:
    (tmp_path / "calls").write_text("")
    assert build.ensure_built(wait=False, head_start=600) == "reference"
    assert build.is_building()
    time.sleep(0.3)
    assert (tmp_path / "calls").read_text() == ""
    # Who only looks leaves it; who needs them at once ends it.
    build.ensure_built(wait=False)
    time.sleep(0.3)
    assert build.is_building()
    assert not build.is_compiling()
    build.ensure_built(wait=False, head_start=0)
    deadline = time.monotonic() + 60
    while build.kernel_status() == "reference":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert build.ensure_built(wait=True).startswith("cpp-")
    assert not build.is_compiling()


def test_a_level_that_crashes_or_differs_is_not_used(
    level_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portable = level_files["portable"]
    source = tmp_path / "broken.c"
    functions = [each.kernel for each in KERNELS if each.kernel != "paged_attention"]
    for body, verdict in (
        ("__builtin_trap(); return 0;", "exit code"),
        ("return 0;", "results of paged_attention differ"),
        ("return raise(9);", KILLED),
        ("return pause();", KILLED),
    ):
        source.write_text(
            "int raise(int);\nint pause(void);\n"
            f"int slipstream_paged_attention(void* a) {{ {body} }}\n"
            + "".join(f"int slipstream_{name}(void* a) {{ return 0; }}\n" for name in functions)
            + "void slipstream_assume_wake_cost(double microseconds) {}\n"
        )
        broken = tmp_path / f"{verdict.replace(' ', '-')}.so"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", broken], check=True)
        with monkeypatch.context() as patch:
            if "pause" in body:
                patch.setattr(level_check, "_TIMEOUT", 1.0)
            assert verdict in check(portable, broken, 0)
    for level in LEVELS:
        if not level.needs <= cpu_flags():
            assert "does not claim" in check(portable, portable, level.number)
    with pytest.raises(UnusableLibraryError):
        KernelLibrary(broken)


def test_a_kernel_that_nobody_checks_is_a_failure(level_files: dict[str, Path]) -> None:
    @record(kernel="abi")
    class Unchecked(Record):
        """Of an entry point that every library has."""

        tokens: int = int64()

    _records.remove(Unchecked)
    portable = level_files["portable"]
    assert check(portable, portable, 0) == "passed"
    assert "no check of abi" in check(portable, portable, 0, (*KERNELS, Unchecked))


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        ("latent_attention", "changed.rank -= 8;"),
        ("latent_attention", "changed.value -= 1;"),
        # Of rows that are not expanded, and of those that are.
        ("latent_attention", "changed.deterministic = 1, changed.tokens = 1;"),
        ("latent_attention", "changed.rows = 1;"),
        ("lora", "changed.room -= 1;"),
        ("recurrence", "changed.delta = 0;"),
        ("convolution", "changed.bias = nullptr;"),
        ("experts", "changed.limit *= 2;"),
        ("linear", "changed.offsets = nullptr;"),
        ("quantize", "changed.group *= 2;"),
        ("lay_out", "changed.strips -= 1;"),
        ("gumbel_argmax", "changed.rows -= 1;"),
    ],
)
def test_the_self_check_compares_every_kernel(
    level_files: dict[str, Path], tmp_path: Path, kernel: str, change: str
) -> None:
    library = _changed(level_files["portable"], tmp_path, kernel, change)
    verdict = check(level_files["portable"], library, 0)
    assert verdict == f"results of {kernel} differ from the portable level"


def _changed(portable: Path, directory: Path, kernel: str, change: str) -> Path:
    """A library that is the portable one, but for a change in the arguments of one kernel."""
    source, library = directory / "changed.cpp", directory / "changed.so"
    source.write_text(
        "#include <dlfcn.h>\n#include <vector>\n"
        '#include "runtime/abi.h"\n'
        "void* of_portable(const char* name) {\n"
        f'  return dlsym(dlopen("{portable}", RTLD_NOW), name);\n}}\n'
        + "".join(
            f"SLIPSTREAM_EXPORT int slipstream_{each.kernel}(const {each.__name__}* args) {{\n"
            f"  {each.__name__} changed = *args;\n"
            f"  {change if each.kernel == kernel else ''}\n"
            f"  return ((int (*)(const {each.__name__}*))"
            f'of_portable("slipstream_{each.kernel}"))(&changed);\n}}\n'
            for each in KERNELS
        )
        + 'extern "C" void slipstream_assume_wake_cost(double) {}\n'
    )
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run([*command, source, "-o", library, "-ldl"], check=True)
    return library


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ("", "passed"),
        # Of decoding rows alone, as a kernel of theirs might: every row but them is as it was.
        ("lengths[1] -= 1;", "differ"),
        ("lengths[5] -= 1;", "differ"),
        ("spec.cap = 0;", "differ"),
        ("spec.sinks = nullptr;", "differ"),
        ("spec.window += spec.window > 0;", "differ"),
        ("spec.chunk += spec.chunk > 0;", "differ"),
        ("if (args->head_dim == 256) spec.scale *= 1.01f;", "differ"),
    ],
)
def test_the_self_check_finds_what_a_kernel_leaves_out(
    level_files: dict[str, Path], tmp_path: Path, change: str, verdict: str
) -> None:
    """Of decoding rows alone, or of one modifier."""
    portable = level_files["portable"]
    prepared = (
        "AttentionSpec spec = *args->spec;\n"
        "std::vector<int32_t> lengths(args->seq_lens, args->seq_lens + args->rows);\n"
        f"{change}\nchanged.spec = &spec, changed.seq_lens = lengths.data();"
    )
    library = _changed(portable, tmp_path, "paged_attention", prepared)
    assert verdict in check(portable, library, 0)


@pytest.mark.parametrize("command", ["no-such-compiler", "no-program", "'no end of a quotation"])
def test_without_a_compiler_one_warning_and_the_references_serve(
    fresh_state: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: str,
) -> None:
    (tmp_path / "no-program").write_text("neither a binary nor a script")
    (tmp_path / "no-program").chmod(0o755)
    monkeypatch.setenv("CXX", command)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        # Nobody expects kernels in the meantime, nor lays weights out for them.
        assert build.ensure_built(wait=False, head_start=600) == "reference"
        assert not build.is_building()
        assert not build.takes_strips()
        assert not build.multiplies_bytes()
        assert build.ensure_built(wait=True) == "reference"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text
    assert build.kernel_status() == "reference"
    with pytest.raises(BuildError):
        KernelCache(tmp_path).build()


def test_without_a_compiler_an_earlier_build_is_used(
    private: KernelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level, _ = private.build()
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    loaded = KernelCache(tmp_path / "cache").load()
    assert loaded is not None
    assert loaded[0] == level


def test_failing_compiler_leaves_the_references(
    fresh_state: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    assert build.ensure_built(wait=True) == "reference"
    assert "slower torch references serve" in caplog.text


def test_a_compiler_may_say_anything_when_it_fails(
    fresh_state: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\nprintf 'oh \\377\\376 no'\nprintf 'oh \\377\\376 no' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    assert build.ensure_built(wait=True) == "reference"
    assert "oh \N{REPLACEMENT CHARACTER}" in caplog.text
    assert "slower torch references serve" in caplog.text


def test_a_build_that_fails_in_any_way_is_not_begun_again(
    private: KernelCache,
    fresh_state: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(KernelCache, "_build_into", fail)
    assert build.ensure_built(wait=True) == "reference"
    assert "nobody thought of this" in caplog.text
    assert "Traceback" in caplog.text
    assert build.ensure_built(wait=False) == "reference"
    assert not build.is_building()


def test_background_build_takes_over(private: KernelCache, fresh_state: None) -> None:
    assert build.ensure_built(wait=False) == "reference"
    status = build.ensure_built(wait=True)
    assert status == build.kernel_status() == f"cpp-{private.levels[-1].name}"
    assert {op.active("cpu").name for op in COMPILED} == {status}
    library = build.kernel_library()
    assert library is not None
    assert rounding._on_cpu.kernel == library.quantize


def test_unwritable_cache_builds_for_this_process_alone(
    private: KernelCache, fresh_state: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert build.ensure_built(wait=True).startswith("cpp-")


@pytest.mark.parametrize(
    ("ending", "mode"), [("", 0o700), ("process_exit.end_process(3, 'no more')\n", 0o777)]
)
def test_compilers_end_with_the_process(tmp_path: Path, ending: str, mode: int) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    cache.mkdir()
    cache.chmod(mode)
    compiler = tmp_path / "endless-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo endless 1.0; exit ;; esac\n'
        f'sleep 600 &\necho $! > "{tmp_path}/$$.half"\n'
        f'mv "{tmp_path}/$$.half" "{tmp_path}/$$.pass"\nwait\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    script = (
        "import pathlib, sys, time\n"
        "from src.http.server import process_exit\n"
        "from src.ops.build import kernels as build\n"
        "from src.ops.build.objects import compilers_at_once\n"
        "assert build.ensure_built(wait=False) == 'reference'\n"
        "assert build.is_building()\n"
        "while len(list(pathlib.Path(sys.argv[1]).glob('*.pass'))) < compilers_at_once():\n"
        "    time.sleep(0.05)\n" + ending
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        env={
            **os.environ,
            "CXX": str(compiler),
            "SLIPSTREAM_CACHE_DIR": str(cache),
            "TMPDIR": str(temporary),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == (3 if ending else 0)
    said = [line for line in done.stderr.splitlines() if "others may write" not in line]
    assert said == (["slipstream: no more"] if ending else [])
    # Nothing was in the other cache, and what was made instead of it is gone.
    assert any(cache.iterdir()) == (mode == 0o700)
    assert list(temporary.iterdir()) == []
    passes = [int(path.read_text()) for path in tmp_path.glob("*.pass")]
    assert passes
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in passes):
        assert time.monotonic() < deadline, "they go on"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o1777])
def test_a_cache_that_others_may_write_to_is_left_alone(
    private: KernelCache,
    fresh_state: None,
    tmp_path: Path,
    mode: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    private.build()
    root = tmp_path / "cache"
    assert cache_root() == root
    root.chmod(mode)
    with caplog.at_level(logging.WARNING):
        own = cache_root()
        assert cache_root() == own != root
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    # Threads that earlier tests have left may say something of their own.
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    (warning,) = (record for record in warnings if record.name == cache_root.__module__)
    assert str(root) in warning.getMessage()
    assert KernelCache(own).load() is None


def test_who_may_write_to_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o775)
    owner, group = tmp_path.stat().st_uid, tmp_path.stat().st_gid
    monkeypatch.setattr(os, "geteuid", lambda: group)
    # A user's own group has the user's number.
    assert is_ours(tmp_path) == (owner in (0, group))
    monkeypatch.setattr(os, "geteuid", lambda: group + 1)
    assert not is_ours(tmp_path)
    tmp_path.chmod(0o755)
    assert is_ours(tmp_path) == (owner in (0, group + 1))
    assert is_ours(tmp_path / "not there")


def test_a_cache_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat(tmp_path)
    others = os.stat_result((real.st_mode, *real[1:4], 4321, *real[5:]))
    monkeypatch.setattr(Path, "stat", lambda _: others)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert not is_ours(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert is_ours(tmp_path)


def test_cache_location(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", "/some/where")
    assert cache_root() == Path("/some/where")
    monkeypatch.delenv("SLIPSTREAM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/slipstream")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "slipstream"


def test_a_relative_location_is_the_same_wherever_a_compiler_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", "some/where")
    assert cache_root() == tmp_path / "some" / "where"


def test_what_is_made_is_ours_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        make_directory(tmp_path / "a" / "root" / "inner")
    finally:
        os.umask(before)
    for made in ("a", "a/root", "a/root/inner"):
        assert is_ours(tmp_path / made)
        assert stat.S_IMODE((tmp_path / made).stat().st_mode) == 0o755
    # What is there stays as it is.
    (tmp_path / "a").chmod(0o700)
    make_directory(tmp_path / "a" / "root" / "inner")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_command_line(kernel_cache: KernelCache) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "src.ops.build"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    assert "CPU kernels: cpp-" in answer.stdout
