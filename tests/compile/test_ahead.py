"""Compiled by another process, once for all who share a cache, and called without a compiler."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src import ops
from src.compile import (
    Compilation,
    CompilationClosedError,
    CompilationError,
    Job,
    LoadedFunction,
    ahead,
    artifacts,
    job,
    use_artifact_cache,
)
from src.compile.artifacts import ArtifactCache
from src.models.adapters.adapted import AdaptedWeight
from src.models.layers.mlp import mlp
from src.ops.build import cpp_compiler
from src.ops.matrix import Matrix
from src.ops.projections.linear import LINEAR, Linear
from src.ops.projections.projection import Projection
from src.ops.runtime import step
from src.ops.runtime.compiled import Caller
from src.ops.runtime.kernel_library import KernelLibrary
from tests.compile.functions import (
    Mixed,
    Weights,
    impossible,
    mix,
    pass_on,
    project,
)

# On a machine that does other things too, a compiler takes its time.
pytestmark = pytest.mark.timeout(900)

MIX = (0.5, Weights(torch.randn(96, 48), None), torch.randn(50, 48))
SLEEP = ("sleep", "600")


def tokens(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 48), torch.arange(count) % 50


def mix_job() -> Job:
    return Job.of(mix, (*MIX, *tokens(4)), (3, 4))


@pytest.fixture(scope="module")
def caller(library: KernelLibrary) -> Caller:
    return Caller(library.path, 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def mixed(root: Path, caller: Caller) -> LoadedFunction:
    """Compiled by two starts at once."""
    job = mix_job()
    starts = [Compilation([job], root) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        loaded = [pool.submit(start.load, caller) for start in starts]
        functions = [future.result()[0] for future in loaded]
    assert sum(start.num_compiled for start in starts) == 1
    return functions[0]


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@torch.inference_mode()
def test_any_number_of_tokens(mixed: LoadedFunction) -> None:
    for count in (4, 0, 1, 2, 3, 7, 300):
        x, positions = tokens(count)
        got = mixed(*MIX, x, positions)
        assert isinstance(got, Mixed)
        torch.testing.assert_close(got, mix(*MIX, x, positions))


@torch.inference_mode()
def test_weights_are_arguments_and_strided_tokens_are_copied(mixed: LoadedFunction) -> None:
    x, positions = torch.randn(48, 9).t(), torch.arange(18)[::2]
    for _ in range(3):
        weights = (0.5, Weights(torch.randn(96, 48), None), torch.randn(50, 48))
        torch.testing.assert_close(mixed(*weights, x, positions), mix(*weights, x, positions))


def test_other_weights_than_it_was_compiled_for_are_refused(mixed: LoadedFunction) -> None:
    narrow = (0.5, Weights(torch.randn(96, 40), None), torch.randn(50, 48))
    with pytest.raises(
        ValueError,
        match=r"argument 1\.gate: compiled for torch\.float32 \(96, 48\) with strides \(48, 1\), "
        r"got torch\.float32 \(96, 40\) ",
    ):
        mixed(*narrow, *tokens(3))


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ((0.25, *MIX[1:]), r"argument 0: compiled for float 0\.5, got float 0\.25"),
        (
            (0.5, Weights(MIX[1].gate, torch.zeros(96)), MIX[2]),
            r"argument 1\.bias: compiled for NoneType None, got torch\.float32 \(96,\)",
        ),
        ((0.5, tuple(MIX[1]), MIX[2]), "argument 1: compiled for Weights"),
    ],
)
def test_other_constants_than_it_was_compiled_for_are_refused(
    mixed: LoadedFunction, others: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        mixed(*others, *tokens(3))
    torch.testing.assert_close(mixed(*MIX, *(given := tokens(3))), mix(*MIX, *given))


@pytest.mark.usefixtures("mixed")
def test_weights_live_as_long_as_the_function(root: Path, caller: Caller) -> None:
    (function,) = Compilation([mix_job()], root).load(caller)
    weight = torch.randn(96, 48)
    function(0.5, Weights(weight, None), MIX[2], *tokens(3))
    kept = weakref.ref(weight)
    del weight
    assert kept() is not None
    del function
    assert kept() is None


@pytest.mark.usefixtures("mixed", "no_processes")
def test_the_second_start_compiles_nothing(root: Path, caller: Caller) -> None:
    second = Compilation([mix_job()], root)
    assert len(second.load(caller)) == 1
    assert second.num_compiled == 0


@pytest.mark.usefixtures("mixed")
def test_what_is_corrupt_or_foreign_is_built_again(
    tmp_path: Path, caller: Caller, root: Path
) -> None:
    job, cache = mix_job(), ArtifactCache(tmp_path)
    good = ArtifactCache(root).find(job)
    assert good is not None
    with cache.locked(job) as directory:
        pass
    for text in ("", "{}", '{"library": 3}'):
        (directory / "manifest.json").write_text(text)
        assert cache.find(job) is None
    (tmp_path / "library.so").write_bytes(good.shared_object.read_bytes())
    (tmp_path / "wrapper.cpp").write_text("")
    cache.publish(
        directory,
        replace(good, shared_object=tmp_path / "library.so", source=tmp_path / "wrapper.cpp"),
    )
    copied = cache.find(job)
    assert copied is not None
    copied.shared_object.write_bytes(copied.shared_object.read_bytes()[:-1])
    assert cache.find(job) is None
    # Whole, and not what it should be.
    (tmp_path / "library.so").write_text("no library")
    (tmp_path / "wrapper.cpp").write_text("")
    cache.publish(
        directory,
        replace(good, shared_object=tmp_path / "library.so", source=tmp_path / "wrapper.cpp"),
    )
    again = Compilation([job], tmp_path)
    (function,) = again.load(caller)
    assert again.num_compiled == 1
    x, positions = tokens(5)
    torch.testing.assert_close(function(*MIX, x, positions), mix(*MIX, x, positions))


@torch.inference_mode()
def test_the_interpreter_runs_on_during_a_call(mixed: LoadedFunction) -> None:
    x, positions = tokens(400_000)

    def call() -> tuple[float, list[float]]:
        """Seconds of a call, and between the ticks of a thread beside it."""
        gaps, ended = [0.0], threading.Event()

        def tick() -> None:
            last = time.perf_counter()
            while not ended.is_set():
                time.sleep(0.0005)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        ticking = threading.Thread(target=tick)
        ticking.start()
        began = time.perf_counter()
        mixed(*MIX, x, positions)
        took = time.perf_counter() - began
        ended.set()
        ticking.join()
        return took, gaps

    calls = []
    # A busy machine may keep the other thread waiting as well, but hardly every time.
    for _ in range(8):
        took, gaps = call()
        assert took > 0.02
        calls.append((took, len(gaps), max(gaps)))
        # A call that held the lock would let it tick twice at most.
        if len(gaps) > 4 and max(gaps) < 0.9 * took:
            return
    pytest.fail(f"the interpreter stood still: {calls}")


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("layout", [pytest.param("", marks=pytest.mark.compilers), "strips of "])
def test_projections_are_those_of_the_op(
    root: Path, caller: Caller, dtype: torch.dtype, layout: str
) -> None:
    matrices: list[Any] = []
    for kind in ("same", f"{layout}int8", f"{layout}int4/32"):
        _, matrix, bias = Linear.of_flat(
            *LINEAR.build(
                "cpu", tokens=1, inputs=64, outputs=64, dtype=dtype, weight=kind, has_bias=True
            )
        )
        matrices += [matrix.values, bias] if matrix.scales is None else [matrix]
    weights = tuple(matrices)
    job = Job.of(project, (torch.randn(4, 64).to(dtype), *weights), (0,))
    (function,) = Compilation([job], root).load(caller)
    for count in (1, 2, 70):
        x = torch.randn(count, 64).to(dtype)
        torch.testing.assert_close(
            function(x, *weights), project(x, *weights), rtol=2**-7, atol=2**-7
        )
    # Tensors of the same shapes and dtypes, which stand for other numbers.
    *others, levels, nibbles = weights
    for changed, reason in (
        (
            (levels, nibbles._replace(encoding=replace(nibbles.encoding, number="e2m1"))),
            r"argument 4\.encoding: compiled for Encoding int4 in groups of 32, "
            r"got Encoding e2m1 in groups of 32$",
        ),
        (
            (levels._replace(encoding=replace(levels.encoding, group=64)), nibbles),
            r"argument 3\.encoding: compiled for Encoding int8 per row, "
            r"got Encoding int8 in groups of 64$",
        ),
        (
            (levels, nibbles._replace(order=torch.arange(64, dtype=torch.int32))),
            r"argument 4\.order: compiled for NoneType None, got torch\.int32 \(64,\)",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            function(x, *others, *changed)


def test_generated_code_allocates_nothing_the_size_of_a_weight(
    mixed: LoadedFunction, root: Path
) -> None:
    artifact = ArtifactCache(root).find(mix_job())
    assert artifact is not None
    assert_allocates_tokens_only(artifact.source.read_text())


def assert_allocates_tokens_only(source: str) -> None:
    """Every buffer has a size that varies, and nothing is cloned."""
    run = source[source.index("::run_impl(") :]
    allocated = re.findall(r"aoti_torch_empty_strided\(\d+, (\w+),", run)
    # One call of a kernel allocates nothing here.
    assert allocated or "streamed_linear" in run
    constant = set(re.findall(r"static constexpr int64_t (\w+)\[\]", run))
    assert not constant.intersection(allocated)
    assert not re.search(r"aoti_torch\w*_(clone|copy_|contiguous)\w*\(", run)


def test_everything_that_code_depends_on_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE"):
        monkeypatch.delenv(name, raising=False)
    x, positions = tokens(4)
    keys = {mix_job().key}
    keys.add(Job.of(mix, (0.25, *MIX[1:], x, positions), (3, 4)).key)
    keys.add(Job.of(mix, (*MIX, x.double(), positions), (3, 4)).key)
    biased = Weights(MIX[1].gate, torch.randn(96))
    keys.add(Job.of(mix, (0.5, biased, MIX[2], x, positions), (3, 4)).key)
    keys.add(Job.of(mix, (0.5, MIX[1], torch.randn(51, 48), x, positions), (3, 4)).key)
    keys.add(Job.of(mix, (*MIX, x.t().contiguous().t(), positions), (3, 4)).key)
    keys.add(Job.of(mix, (*MIX, x, positions), (3,)).key)
    keys.add(Job.of(pass_on, (*MIX, x, positions), (3, 4)).key)
    for owner, name, other in (
        (torch, "__version__", "0.0"),
        (torch.version, "git_version", "0"),
        (job, "cpu_flags", lambda: frozenset({"sse2"})),
        (job, "OPTIONS", {**job.OPTIONS, "aot_inductor.compile_wrapper_opt_level": "O3"}),
        (job, "_FORMAT", job._FORMAT + 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            keys.add(mix_job().key)
    assert len(keys) == 13
    for name, value in (
        ("ATEN_CPU_CAPABILITY", "default"),
        ("ATEN_CPU_CAPABILITY", "avx2"),
        ("TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE", "64"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            keys.add(mix_job().key)
    assert len(keys) == 16
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
        assert mix_job().key in keys
    meta = tuple(t.to("meta") for t in (MIX[2], x, positions))
    on_meta = (0.5, Weights(MIX[1].gate.to("meta"), None), *meta)
    assert Job.of(mix, on_meta, (3, 4)).key == mix_job().key


def test_every_source_that_makes_the_code_is_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "sources_of_a_function"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("def double(x):\n    return x + x\n")
    (package / "outer.py").write_text(
        "from sources_of_a_function.inner import double\n\ndef f(x):\n    return double(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("sources_of_a_function.outer").f
    driver = tmp_path / "driver"
    shutil.copytree(job._PACKAGE, driver)
    monkeypatch.setattr(job, "_PACKAGE", driver)
    keys = {Job.of(function, (torch.randn(4),), (0,)).key}
    changed = [package / "outer.py", package / "inner.py"]
    changed += [driver / name for name in job._COMPILER]
    for count, file in enumerate(changed, 2):
        with file.open("a") as text:
            text.write("# changed\n")
        keys.add(Job.of(function, (torch.randn(4),), (0,)).key)
        assert len(keys) == count, file


@pytest.mark.usefixtures("mixed", "no_processes")
def test_another_compiler_has_artifacts_of_its_own_and_none_takes_any(
    root: Path, caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cpp_compiler, "_version", lambda *_: "another version")
        assert ArtifactCache(root).find(mix_job()) is None
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    assert cpp_compiler.cpp_compiler() is None
    assert ArtifactCache(tmp_path).find(mix_job()) is None
    without = Compilation([mix_job()], root)
    assert len(without.load(caller)) == 1
    assert without.num_compiled == 0


def test_what_else_has_been_imported_is_not_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = job._sources(mlp)
    # That of an op with a record, too, whose function is made of text.
    assert {"linear.py", "lora.py"} <= {path.name for path in before}
    assert not any(path.name == "step.py" for path in before)
    # As the import of a module leaves it: in the list of modules, and in its package.
    monkeypatch.setitem(sys.modules, "src.ops.another", step)
    monkeypatch.setattr(step, "__name__", "src.ops.another")
    monkeypatch.setattr(ops, "another", step, raising=False)
    assert job._sources(mlp) == before


def test_methods_of_arguments_are_in_the_key() -> None:
    weight, tensor = Projection(Matrix.plain(torch.zeros(2, 2))), torch.zeros(1)
    adapted = AdaptedWeight(weight, tensor, tensor, tensor, tensor)
    made = Job.of(mlp, (tensor, (adapted,)), (0,))
    assert {"projection.py", "adapted.py"} <= {path.name for path in made._files()}


def test_what_cannot_be_compiled_is_told(tmp_path: Path, caller: Caller) -> None:
    compilation = Compilation([Job.of(impossible, (torch.randn(4),), (0,))], tmp_path)
    with pytest.raises(CompilationError, match=r"DataDependent|data-dependent"):
        compilation.load(caller)


def test_a_compiler_that_crashes_takes_nobody_along(
    tmp_path: Path, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_COMMAND", ("sh", "-c", "echo oh no >&2; kill -SEGV $$"))
    with pytest.raises(CompilationError, match="-11: oh no"):
        Compilation([mix_job()], tmp_path).load(caller)


@pytest.mark.parametrize("line", ['{"key": "half', "[3]"])
def test_a_line_that_a_compiler_died_in_is_a_fault(
    tmp_path: Path, caller: Caller, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(ahead, "_COMMAND", ("printf", "%s", line))
    compilation = Compilation([mix_job()], tmp_path)
    with pytest.raises(CompilationError, match=re.escape(line)):
        compilation.load(caller)
    # Reaped: nothing of it is left to the system.
    assert compilation._workers[0]._process.returncode == 0


def test_a_compiler_that_never_ends_is_killed(
    tmp_path: Path, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(ahead, "_COMMAND", ("sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"))
    # Long enough for a shell on a busy machine to come so far that there is something to kill.
    monkeypatch.setattr(ahead, "_TIMEOUT", 3.0)
    with pytest.raises(CompilationError, match=r"longer than 3 s|longer than 3.0 s"):
        Compilation([mix_job()], tmp_path).load(caller)
    assert is_gone(int(pid_file.read_text()))


def test_a_lock_that_is_never_given_back_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, cache = mix_job(), ArtifactCache(tmp_path)
    monkeypatch.setattr(artifacts, "_LOCK_TIMEOUT", 0.3)
    refused = pytest.raises(TimeoutError, match="does not end")
    with cache.locked(job), refused, cache.locked(job):
        pass
    with cache.locked(job) as directory:
        assert directory.is_dir()


def test_closing_kills_the_compiler_and_all_that_it_runs(
    tmp_path: Path, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(ahead, "_COMMAND", ("sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"))
    compilation = Compilation([mix_job()], tmp_path)

    def close_when_written() -> None:
        while not (pid_file.is_file() and pid_file.read_text().strip()):
            time.sleep(0.01)
        compilation.close()

    threading.Thread(target=close_when_written).start()
    began = time.monotonic()
    with pytest.raises(CompilationClosedError):
        compilation.load(caller)
    assert time.monotonic() - began < 60
    assert is_gone(int(pid_file.read_text()))


def test_closing_before_anybody_waits_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the weights that it goes with cannot be loaded."""
    monkeypatch.setattr(ahead, "_COMMAND", ("sleep", "600"))
    compilation = Compilation([mix_job()], tmp_path)
    process = compilation._workers[0]._process
    compilation.close()
    assert process.returncode == -signal.SIGKILL
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        assert pipe.closed


def test_a_compiler_ends_with_the_process_that_wanted_it(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib\n"
        "from tests.compile.test_ahead import mix_job\n"
        "from src.compile import Compilation\n"
        f"compilation = Compilation([mix_job()], pathlib.Path({str(tmp_path)!r}))\n"
        "print(compilation._workers[0]._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    told = subprocess.run(
        [ahead.sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ahead.CHECKOUT,
    )
    pid, deadline = int(told.stdout), time.monotonic() + 120
    while not is_gone(pid):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.1)
    assert ArtifactCache(tmp_path).find(mix_job()) is None


def is_gone(pid: int) -> bool:
    """Ended, whether or not somebody has noticed; a killed process may take a moment to."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if status.rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_artifacts_go_where_they_are_told_unless_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    use_artifact_cache(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    use_artifact_cache(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


def test_others_may_have_a_head_start(tmp_path: Path, caller: Caller) -> None:
    compilation = Compilation([mix_job()], tmp_path, head_start=2.0)
    assert compilation._workers == []
    assert len(compilation.load(caller)) == 1
    assert compilation.num_compiled == 1
    # Nothing is left to be compiled, so nobody waits.
    again = Compilation([mix_job()], tmp_path, head_start=600)
    began = time.monotonic()
    assert len(again.load(caller)) == 1
    assert again.num_compiled == 0
    never = Compilation([mix_job()], tmp_path / "other", head_start=600)
    never.close()
    with pytest.raises(CompilationClosedError):
        never.load(caller)
    assert time.monotonic() - began < 60
    assert never._workers == []


def test_a_compiler_that_cannot_be_started_later_is_told_of(
    tmp_path: Path, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_COMMAND", (str(tmp_path / "nothing"),))
    compilation = Compilation([mix_job()], tmp_path, head_start=0.05)
    with pytest.raises(CompilationError, match="no compiler could be started"):
        compilation.load(caller)
