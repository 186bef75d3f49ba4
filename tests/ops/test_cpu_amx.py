"""The AMX path of paged attention on a CPU without AMX, its instructions emulated."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from src.ops import PAGED_ATTENTION
from src.ops.cpu import build
from src.ops.cpu.library import _bind_attention
from tests.ops.comparison import attention_matches, copied

Attention = Callable[..., Any]

MACHINE = build.cpu_flags()
needs_avx2 = pytest.mark.skipif(
    not build.LEVELS[1].needs <= MACHINE, reason="the emulation is compiled for AVX2"
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Attention:
    library = tmp_path_factory.mktemp("amx") / "amx.so"
    command = [
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-fno-math-errno"),
        *("-fno-trapping-math", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread", "-w"),
        *("-Wno-psabi", "-mavx2", "-mfma", "-mf16c"),
        *("-include", str(Path(__file__).with_name("emulated_amx.h"))),
        *(str(Path(build.__file__).with_name("attention.cpp")), "-o", str(library)),
    ]
    subprocess.run(command, check=True)
    return _bind_attention(ctypes.CDLL(str(library)))


@needs_avx2
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
@pytest.mark.parametrize("window", [0, 1, 65])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 1)])
def test_equals_the_reference(
    emulated: Attention, head_dim: int, window: int, heads: tuple[int, int]
) -> None:
    args = PAGED_ATTENTION.build(
        "cpu",
        # A chunk, a prompt of several steps and items, decode of one and of several splits.
        rows=((40, 150), (290, 290), (1, 700), (5, 33), (1, 1), (0, 5)),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        sliding_window=window,
        block_size=16 if window else 7,
        padding=1,
        dtype=torch.bfloat16,
    )
    attention_matches(emulated, args)


@needs_avx2
def test_rounding_adds_less_than_the_result_has(emulated: Attention) -> None:
    args = PAGED_ATTENTION.build("cpu", rows=((300, 600),), dtype=torch.bfloat16)
    exact = copied(tuple(x.float() if _is_bfloat16(x) else x for x in args))
    PAGED_ATTENTION.reference(*exact)
    emulated(*args)
    rounded = (exact[9].bfloat16().float() - exact[9]).square().mean().sqrt()
    assert (args[9].float() - exact[9]).square().mean().sqrt() < 1.5 * rounded


@needs_avx2
def test_a_chunk_gives_the_bits_of_the_whole_prompt(emulated: Attention) -> None:
    whole = PAGED_ATTENTION.build("cpu", rows=((300, 300),), dtype=torch.bfloat16, num_heads=6)
    cached = copied(whole)
    emulated(*whole)
    for begin, end in ((0, 128), (128, 130), (130, 300)):
        out = torch.empty_like(whole[9][begin:end])
        emulated(
            *(x[begin:end] for x in cached[:3]),
            *cached[3:6],
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            cached[8][begin:end],
            out,
            *cached[10:12],
            end - begin,
            end,
        )
        if end - begin > 2:  # two tokens are split over the keys, which rounds elsewhere
            assert torch.equal(out.view(torch.int16), whole[9][begin:end].view(torch.int16))
        else:
            torch.testing.assert_close(out, whole[9][begin:end], rtol=1e-2, atol=1e-2)


def _is_bfloat16(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16
