"""An outline is made at every start, before weights are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.models.test_quantized_checkpoints import ROUNDED, WEIGHT_ONLY, made
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import Type, write_gguf

PROCESS = """
import sys
from pathlib import Path
from src.models import outline_model
from src.models.loading.options import LoadOptions
for line in sys.stdin.read().splitlines():
    path, quantization = line.split()
    chosen = None if quantization == "-" else quantization
    for rounds in (False, True):
        options = LoadOptions(quantization=chosen, rounds_inputs=rounds, dtype="bfloat16")
        outline_model(Path(path), options)
        for module in ("torch._dynamo", "torch._inductor", "sympy", "triton"):
            assert module not in sys.modules, (path, quantization, rounds, module)
"""


def test_an_outline_of_no_format_imports_compilers(tmp_path: Path) -> None:
    """They take seconds of a start. torch imports them for arithmetic on the meta device."""
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    asked = [(plain, "int8"), (plain, "int4")]
    for name, (section, pack, *_) in (WEIGHT_ONLY | ROUNDED).items():
        asked.append((made(tmp_path / name, section, pack, num_hidden_layers=1)[0], "-"))
    for kind in (Type.Q4_0, Type.Q4_1, Type.Q5_1, Type.Q8_0):
        file = tmp_path / f"{kind.name}.gguf"
        asked.append((write_gguf(file, plain, "llama", lambda _, kind=kind: kind), "-"))
    lines = "\n".join(f"{path} {quantization}" for path, quantization in asked)
    subprocess.run([sys.executable, "-c", PROCESS], input=lines, text=True, check=True)
