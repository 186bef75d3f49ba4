"""A process that compiles jobs ahead of time: `python -m src.compile.worker`.

It reads one `Setup` from standard input and writes one line of JSON per job. So a compiler uses the
memory and the GIL of this process, and can crash only this one. When standard input ends, the
parent has ended; this process then ends too, with every compiler that it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from src.compile import replace_openmp
from src.compile.artifacts import Artifact, ArtifactCache
from src.compile.compiler_program import use_found_compiler
from src.compile.job import OPTIONS, Job, flatten, is_meta, is_tensor, substitute
from src.compile.replace_torch_shims import with_library_tensors
from src.compile.worker_setup import Setup
from src.ops.build.scratch import scratch_in
from src.ops.runtime.compiled_entries import CALLED, c_shim

# Generated code calls the library of CPU kernels instead of going through torch's dispatcher.
_C_SHIMS: Final = {op.overload: [c_shim(op)] for op in CALLED}


def main() -> None:
    """Compile what standard input asks for."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers may write there
    setup: Setup = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    os.nice(setup.niceness)
    cache = ArtifactCache(setup.root)
    for job in setup.jobs:
        began, cpu = time.monotonic(), os.times()
        answer: dict[str, Any] = {"key": job.key}
        try:
            with cache.locked(job) as directory:
                answer["compiled"] = cache.find(job) is None
                if answer["compiled"]:
                    use_found_compiler(setup.root)
                    _compile_into(job, directory)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        used = os.times()
        answer["seconds"] = time.monotonic() - began
        answer["cpu_seconds"] = sum(used[:4]) - sum(cpu[:4])
        answers.write(json.dumps(answer) + "\n")


def _end_with_the_input() -> None:
    # Not a buffered file: at exit, the interpreter would wait for the file's lock.
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _compile_into(job: Job, directory: Path) -> None:
    """Put the artifact of ``job`` into ``directory``, completely or not at all."""
    with scratch_in(directory) as scratch:
        library, source = scratch / "library.so", scratch / "wrapper.cpp"
        code, result = None, None
        if replace_openmp.prepare():
            result = _compile(job, library, source, replace_openmp.OPTIONS)
            code = replace_openmp.with_library_threads(library.read_bytes(), source.read_text())
        if code is None:
            result = _compile(job, library, source, {"cpp.threads": 1})
            code = library.read_bytes()
        rewritten = with_library_tensors(code, source.read_text())
        library.write_bytes(code if rewritten is None else rewritten)
        ArtifactCache.publish(
            directory, Artifact(library, source, result, has_own_tensors=rewritten is not None)
        )


def _compile(job: Job, library: Path, source: Path, options: Mapping[str, Any]) -> str | None:
    """Write the job's library and its generated source. Returns what `_export` returns."""
    package = library.with_name("model.pt2")
    result = _export(job, package, options)
    with zipfile.ZipFile(package) as archive, source.open("wb") as text:
        for name in sorted(archive.namelist(), key=lambda name: name.endswith(".kernel.cpp")):
            with archive.open(name) as packed:
                if name.endswith(".so"):
                    library.write_bytes(packed.read())
                elif name.endswith(".cpp"):
                    shutil.copyfileobj(packed, text)
    return result


def _export(job: Job, package: Path, options: Mapping[str, Any]) -> str | None:
    """Compile into a package; returns the name of the result's type, None for a single tensor."""
    from torch._inductor import aoti_compile_and_package
    from torch.export import Dim, export
    from torch.fx.experimental import _config as symbolic_shapes

    function = job.resolve()
    result: list[str | None] = []

    class Flat(torch.nn.Module):
        """The function with its tensors as a flat list of arguments."""

        def forward(self, *tensors: torch.Tensor) -> Any:
            outcome = function(*substitute(job.arguments, is_meta, iter(tensors)))
            if is_tensor(outcome):
                result[:] = [None]
                return outcome
            result[:] = [f"{type(outcome).__module__}:{type(outcome).__qualname__}"]
            return tuple(outcome)

    tensors, shapes = [], []
    for position, argument in enumerate(job.arguments):
        counts_tokens = position in job.token_arguments
        for meta in flatten(argument, is_meta):
            # Never written to, so the system allocates no memory for it.
            tensors.append(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype))
            shapes.append({0: Dim.DYNAMIC} if counts_tokens else None)
    # Without this, export would specialise the code for sizes 0 and 1.
    with symbolic_shapes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = export(Flat(), tuple(tensors), dynamic_shapes=(tuple(shapes),), strict=False)
        with contextlib.redirect_stdout(sys.stderr):
            aoti_compile_and_package(
                program, package_path=str(package), inductor_configs=_known_options(options)
            )
    return result[0]


def _known_options(more: Mapping[str, Any]) -> dict[str, Any]:
    from torch._inductor import config

    known = config.get_config_copy()
    options = {name: value for name, value in {**OPTIONS, **more}.items() if name in known}
    return options | {"aot_inductor.custom_ops_to_c_shims": _C_SHIMS}


if __name__ == "__main__":
    main()
