"""The AMX path of paged attention on a CPU without AMX, its instructions emulated."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from src.ops import PAGED_ATTENTION
from src.ops.build import levels
from src.ops.runtime.kernel_library import bind_attention
from tests.ops.comparison import attention_matches, copied, in_chunks

Attention = Callable[..., Any]

MACHINE = levels.cpu_flags()
needs_avx2 = pytest.mark.skipif(
    not levels.LEVELS[1].needs <= MACHINE, reason="the emulation is compiled for AVX2"
)


@pytest.fixture(scope="module")
def emulated(emulated_amx: ctypes.CDLL) -> Attention:
    return bind_attention(emulated_amx.slipstream_paged_attention)


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
@pytest.mark.parametrize("head_dim", [72, 256])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "modifier", [{"cap": 2.0}, {"has_sinks": True}, {"cap": 30.0, "has_sinks": True}]
)
def test_equals_the_reference_with_modified_scores(
    emulated: Attention, head_dim: int, deterministic: bool, modifier: dict[str, Any]
) -> None:
    args = PAGED_ATTENTION.build(
        "cpu",
        rows=((40, 150), (290, 290), (1, 700), (5, 33), (1, 1), (0, 5), (1, 600)),
        prefixes={6: (2, 32)},
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        padding=1,
        dtype=torch.bfloat16,
        deterministic=deterministic,
        **modifier,
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
    got = in_chunks(emulated, cached, [0, 128, 130, 300])
    for begin, end in ((0, 128), (128, 130), (130, 300)):
        out = got[begin:end]
        if end - begin > 2:  # two tokens are split over the keys, which rounds elsewhere
            assert torch.equal(out.view(torch.int16), whole[9][begin:end].view(torch.int16))
        else:
            torch.testing.assert_close(out, whole[9][begin:end], rtol=1e-2, atol=1e-2)


@needs_avx2
@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_deterministic_chunks_of_any_size_give_the_bits_of_the_whole_prompt(
    emulated: Attention, head_dim: int, window: int, heads: tuple[int, int]
) -> None:
    whole = PAGED_ATTENTION.build(
        "cpu",
        rows=((530, 530),),
        dtype=torch.bfloat16,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        sliding_window=window,
        cap=2.0 if window else 0,
        has_sinks=window > 0,
        deterministic=True,
    )
    expected = in_chunks(emulated, copied(whole), [0, 530])
    # One and two tokens, around the ends of steps and splits; short chunks, long ones.
    bounds = [0, 1, 3, 20, 127, 128, 129, 140, 254, 256, 257, 300, 511, 512, 513, 514, 530]
    got = in_chunks(emulated, copied(whole), bounds)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


def _is_bfloat16(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16
