"""Runs the Triton kernels in Triton's interpreter against the references; exits non-zero if not.

A program of its own, because TRITON_INTERPRET must be set before triton is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.runtime.interpreter as interpreter

from src.ops import GUMBEL_ARGMAX, PAGED_ATTENTION
from src.ops.triton import gumbel_argmax, paged_attention
from tests.ops.comparison import attention_matches

ATTENTION_CASES = [
    {"dtype": torch.float32, "head_dim": 24, "padding": 2},
    {"dtype": torch.float32, "head_dim": 64, "num_heads": 6, "num_kv_heads": 2, "block_size": 5},
    {"dtype": torch.float32, "sliding_window": 7, "head_dim": 16, "padding": 1},
    {"dtype": torch.float16, "head_dim": 40},
    {"rows": ((90, 130), (1, 1100), (0, 3)), "head_dim": 16},
    {"rows": ((1, 1100), (1, 513), (1, 1)), "head_dim": 16, "sliding_window": 600},
    {"rows": ((0, 3),), "padding": 2},
    # Captured steps: padding last, and the bound of any row.
    {"rows": ((1, 1), (1, 1100), (0, 0), (0, 0)), "padding": 2, "longest": 4096, "head_dim": 16},
    {"rows": ((0, 0), (0, 0)), "padding": 2, "longest": 4096, "head_dim": 16},
    {"rows": ((5, 33), (1, 130)), "padding": 10, "longest": 4096, "head_dim": 16},
    {"rows": ((1, 100), (3, 40), (1, 1), (90, 130)), "head_dim": 16, "deterministic": True},
]


_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope) -> None:
    # Triton 3.6's interpreter takes int() of a one-element array, which NumPy 2.4 refuses.
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_with_index


def main() -> None:
    for case in ATTENTION_CASES:
        attention_matches(paged_attention.run, PAGED_ATTENTION.build("cpu", **case))
    for case in GUMBEL_ARGMAX.cases:
        args = GUMBEL_ARGMAX.build("cpu", **case)
        expected, got = GUMBEL_ARGMAX.reference(*args), gumbel_argmax.run(*args)
        assert torch.equal(expected, got), (case, expected, got)
    logits = torch.tensor([[-torch.inf] * 5, [1.0, torch.nan, 2.0, 2.0, 0.0]])
    words = torch.zeros(2, dtype=torch.int64)
    assert gumbel_argmax.run(logits, words, words, torch.tensor([1.0, 0.0])).tolist() == [0, 2]
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
