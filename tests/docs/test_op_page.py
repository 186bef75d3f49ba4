"""docs/adding-an-op.md has a whole op: what the page says computes what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from src.core.settings import CHECKOUT

PAGE = (CHECKOUT / "docs" / "adding-an-op.md").read_text(encoding="utf-8")
# The struct that `abi.py` would have, the kernel of the page, and the op with it and without.
CHECKED = """
import ctypes, subprocess, sys, torch
from pathlib import Path
from src.ops.build.units import FLAGS, SOURCES
from src.ops.runtime.c_records import Record, record
from src.ops.runtime.packing import bind
import my_peaks

@record(kernel="my_peaks", call=my_peaks.MyPeaks)
class MyPeaksArgs(Record):
    pass

struct, library = Path("my_peaks_struct.h"), Path("my_peaks.so").resolve()
struct.write_text('#include "runtime/abi.h"\\n' + MyPeaksArgs.in_cpp())
pool = SOURCES / "runtime/pool.cpp"
subprocess.run(
    ["c++", *FLAGS, "-O1", "-Werror", "-shared", f"-I{SOURCES}", "-include", struct,
     "my_peaks.cpp", pool, "-o", library],
    check=True,
)
kernel = bind(ctypes.CDLL(str(library)).slipstream_my_peaks, MyPeaksArgs)
for case in my_peaks.MY_PEAKS.cases:
    args = my_peaks.MY_PEAKS.build("cpu", **case)
    expected = args[0].abs().amax(dim=1)
    assert torch.equal(my_peaks.my_peaks(*args), expected)
    assert torch.equal(kernel(*args), expected)
    assert my_peaks.MY_PEAKS.cost(*args).bytes > 0
"""


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are built on Linux")
def test_the_op_of_the_page_and_its_kernel_compute_the_same(tmp_path: Path) -> None:
    declaration, entry = _blocks("python")
    (kernel,) = _blocks("cpp")
    assert "MY_PEAKS: OpTests(" in entry
    (tmp_path / "my_peaks.py").write_text(declaration)
    (tmp_path / "my_peaks.cpp").write_text(kernel)
    code = f"import sys; sys.path[:0] = [{str(CHECKOUT)!r}, {str(tmp_path)!r}]\n{CHECKED}"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
