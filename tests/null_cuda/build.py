"""Compiles the library from what torch's and Triton's packages bring, and a C compiler."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("streams.c", "memory.c", "device.c")
# What `null_cuda_count` numbers so.
LAUNCHES, REPLAYS, REFUSALS = 0, 1, 3
# Triton looks for a driver of this name.
NAME = "libcuda.so.1"
# What of torch calls CUDA.
_CALLERS = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libcaffe2_nvrtc.so")
_PREFIXES = ("cuda", "__cuda", "cublas", "cu")
# cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED and CUBLAS_STATUS_NOT_SUPPORTED.
_REFUSALS = {"cublas": 15, "": 801}


def build(folder: Path) -> Path:
    """The library, in ``folder``.

    Functions that torch may call and the sources do not have say so and refuse.

    Raises
    ------
    RuntimeError
        torch is not a CUDA build, or does not link to CUDA as expected.
    subprocess.CalledProcessError
        The compiler failed.
    """
    packages = _packages()
    headers = [
        f"-I{packages / 'nvidia' / 'cu13' / 'include'}",
        # Brings those which the runtime's own refer to.
        f"-I{packages / 'triton' / 'backends' / 'nvidia' / 'include'}",
    ]
    compile_c = ("cc", "-std=gnu11", "-O1", "-fPIC", "-Wall", "-Wextra", f"-I{HERE}", *headers)
    objects = []
    for source in SOURCES:
        made = folder / f"{source}.o"
        _run(*compile_c, "-c", str(HERE / source), "-o", str(made))
        objects.append(str(made))
    defined = _symbols(*objects, wanted="T")
    called = _symbols(
        *(str(packages / "torch" / "lib" / name) for name in _CALLERS), wanted="U", dynamic=True
    )
    stubs = folder / "refusals.c"
    stubs.write_text(_refusals(sorted(called - defined)), encoding="utf-8")
    library = folder / NAME
    linked = ("-shared", f"-Wl,-soname,{NAME}", *objects, str(stubs), "-o", str(library))
    _run(*compile_c, *linked, "-ldl", "-lpthread")
    return library


def _packages() -> Path:
    # Not imported: it would load the real libraries.
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    packages = Path(spec.origin).parents[1]
    if not (packages / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise RuntimeError("this needs a CUDA build of torch, such as 2.11.0 of PyPI")
    if not (packages / "nvidia" / "cu13" / "include" / "cuda_runtime_api.h").exists():
        raise RuntimeError("this needs a torch that was built for CUDA 13")
    return packages


def _symbols(*files: str, wanted: str, dynamic: bool = False) -> set[str]:
    lines = _run("nm", *(("-D",) if dynamic else ()), *files).splitlines()
    names = {
        words[-1].split("@")[0]
        for line in lines
        if len(words := line.split()) > 1 and words[-2] == wanted
    }
    return {name for name in names if name.startswith(_PREFIXES) and _is_function_of_cuda(name)}


def _is_function_of_cuda(name: str) -> bool:
    # The other libraries are torch's own, and never called here.
    others = ("cudnn", "cufft", "curand", "cusparse", "cusolver", "cufile", "cupti")
    return not name.startswith(others)


def _refusals(names: list[str]) -> str:
    # Not null_cuda.h, whose headers know what these take and return.
    counts = "extern atomic_long null_cuda_counts[];"
    lines = ["#include <stdatomic.h>", "#include <stdio.h>", counts]
    for name in names:
        code = _REFUSALS["cublas" if name.startswith("cublas") else ""]
        told = f'fputs("null CUDA: there is no {name}\\n", stderr);'
        lines.append(
            f"int {name}(void) {{ {told} null_cuda_counts[{REFUSALS}]++; return {code}; }}"
        )
    return "\n".join(lines) + "\n"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
