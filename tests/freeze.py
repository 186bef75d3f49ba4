"""Digests of what ops and models compute, to show that a change of the code changes no bit.

`python -m tests.freeze record FILE` writes the digests of this checkout, and
`python -m tests.freeze compare FILE` names every one that is another now. Record on the old
commit and compare on the new one, on the same machine: sums of torch and of each level's kernels
depend on the CPU and on the compiler, so `compare` refuses a file of another machine.

What is recorded: each case of each op, by its reference and by the kernels of each level that this
CPU has, with the way that computed it; and each family's logits on a tiny random checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from src.core.errors import ModelLoadError
from src.models import load_model
from src.models.loading.options import LoadOptions
from src.ops import OPS, Kernel, Op
from src.ops.build.cache_root import cache_root
from src.ops.build.kernel_cache import KernelCache
from src.ops.build.kernels import ensure_built, kernel_library
from src.ops.build.levels import cpu_flags
from src.ops.runtime.kernel_library import KernelLibrary
from tests.models.harness import PagedSequence
from tests.support.checkpoints import CLASSES, make_checkpoint
from tests.support.kernel_flags import refuse_warnings

Digests = dict[str, str]

# Of levels that serve nobody here, as in the tests of the ops.
_OPTIMIZATION = "-O1"
_REFERENCE = "reference"
_PROMPT = [3 + 7 * index % 300 for index in range(40)]
# How a family's checkpoint is loaded.
_LOADED: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int8", "rounds_inputs": True},
    {"dtype": "bfloat16", "quantization": "int4", "group_size": 16},
)


def machine() -> str:
    """What digests depend on beside the code."""
    torch_build = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return f"{torch_build}; {' '.join(sorted(cpu_flags()))}"


def digest(*tensors: torch.Tensor) -> str:
    """Of dtypes, shapes and bits, those of NaN and of zeros included."""
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        found.update(f"{whole.dtype} {tuple(whole.shape)};".encode())
        found.update(whole.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def digest_of_op(op: Op[..., Any], case: Mapping[str, Any]) -> tuple[str, str]:
    """The way that computed a case with the kernel now installed, and its digest.

    The digest is of the result and of every argument that a call changes.
    """
    given = op.build("cpu", **case)
    names = [argument.name for argument in op.overload._schema.arguments]
    with _calls_of_references() as calls:
        result = op.overload(*given)
    changed = [value for name, value in zip(names, given, strict=False) if name in op.mutated]
    tensors = (*([] if result is None else [result]), *changed)
    way = _REFERENCE if calls else op.active("cpu").name
    return way, digest(*tensors)


def digest_of_family(checkpoint: Path, loaded: Mapping[str, Any]) -> str:
    """The digest of logits: of a prompt in two chunks, and of two tokens after it."""
    try:
        model = load_model(checkpoint, LoadOptions(**loaded))
    except ModelLoadError as error:
        return f"refused: {error}"
    sequence = PagedSequence(model)
    parts = (_PROMPT[:13], _PROMPT[13:], [5], [6])
    return digest(*(sequence.append(part) for part in parts))


@contextmanager
def _calls_of_references() -> Iterator[list[None]]:
    """A list that gets an element for each call of the reference of an op."""
    calls: list[None] = []

    def watch(frame: Any, event: str, _: object) -> None:
        is_reference = event == "call" and frame.f_code.co_name == "reference"
        if is_reference and frame.f_globals["__name__"].startswith("src.ops."):
            calls.append(None)

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _install(level: str, library: KernelLibrary | None) -> None:
    for op in OPS:
        run = getattr(library, op.name, None)
        if run is None:
            op.uninstall_cpu()
        else:
            op.install_cpu(Kernel(level, run))


def _libraries() -> dict[str, KernelLibrary | None]:
    refuse_warnings()
    files = KernelCache(cache_root()).build_all(_OPTIMIZATION)
    return {_REFERENCE: None} | {name: KernelLibrary(path) for name, path in files.items()}


def record() -> Digests:
    """Everything, by a name; takes minutes."""
    found: Digests = {}
    torch.set_num_threads(1)
    libraries = _libraries()
    for level, library in libraries.items():
        _install(level, library)
        for op in OPS:
            if level != _REFERENCE and not hasattr(library, op.name):
                continue
            for case in op.cases:
                name = f"{op.name} {json.dumps(case, default=str, sort_keys=True)}"
                found[f"{name} at {level}"] = " ".join(digest_of_op(op, case))
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = {name: make_checkpoint(Path(directory, name), name) for name in CLASSES}
        for level in (_REFERENCE, "portable", "serving"):
            if level == "serving":
                # Matrices are packed now as the kernels like them.
                ensure_built(wait=True)
            _install(level, kernel_library() if level == "serving" else libraries[level])
            for name, checkpoint in checkpoints.items():
                for loaded in _LOADED:
                    key = f"{name} {json.dumps(loaded)} at {level}"
                    found[key] = digest_of_family(checkpoint, loaded)
    return found


def differences(before: Digests, now: Digests) -> list[str]:
    """A line for each entry that only one of both has, or that differs."""
    return [
        f"{name}: {before.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def main() -> int:
    """See the module's text; the status is 1 if something differs."""
    action, file = sys.argv[1], Path(sys.argv[2])
    if action == "record":
        found = record()
        file.write_text(json.dumps({"machine": machine(), "digests": found}, indent=0))
        print(f"{len(found)} digests in {file}")
        return 0
    if action != "compare":
        raise SystemExit("expected: record FILE, or compare FILE")
    kept = json.loads(file.read_text())
    if kept["machine"] != machine():
        raise SystemExit(f"{file} is of another machine: {kept['machine']}; here {machine()}")
    lines = differences(kept["digests"], record())
    print("\n".join(lines) or f"{len(kept['digests'])} digests, all as before")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
