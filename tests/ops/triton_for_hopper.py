"""Compiles the Triton kernels for an sm_90 GPU, which needs no GPU; exits non-zero on failure.

A program of its own, so that another test's TRITON_INTERPRET cannot reach it.
"""

import inspect
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from src.ops.triton import gumbel_argmax, paged_attention

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "block_tables": "*i32",
    "query_start_loc": "*i32",
    "seq_lens": "*i32",
    "slot_mapping": "*i64",
    "partial_out": "*fp32",
    "partial_lse": "*fp32",
    "logits": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "temperatures": "*fp32",
    "chunk_scores": "*fp32",
    "chunk_tokens": "*i64",
    "tokens": "*i64",
    "scale_log2": "fp32",
}
CACHED = ("query", "key", "value", "key_cache", "value_cache", "out")


def compile_for_hopper(kernel, dtype, warps, stages, **constants) -> int:
    """Shared memory of the compiled kernel in bytes."""
    signature = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = f"*{dtype}" if name in CACHED else POINTERS.get(name, "i32")
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=HOPPER, options=options)
    assert compiled.asm["ptx"]
    return int(compiled.metadata.shared)


def main() -> None:
    shared_limit = 227 * 1024
    for head_dim, window, size, dtype in ((128, 0, 2, "bf16"), (256, 1024, 4, "fp32")):
        common = {"HEAD_DIM": head_dim, "BLOCK_SIZE": 64, "GROUP": 4, "WINDOW": window}
        common |= {"D": head_dim, "N": 64 if head_dim <= 128 else 32}
        tile, warps, stages = paged_attention.prefill_shape(head_dim, size, 4096)
        prefill = compile_for_hopper(
            paged_attention._prefill_kernel, dtype, warps, stages, FEWEST=2, M=tile, **common
        )
        split, stages = paged_attention.KV_SPLIT, paged_attention.decode_stages(size)
        decode = compile_for_hopper(
            paged_attention._decode_kernel, dtype, 4, stages, M=16, SPLIT=split, **common
        )
        assert max(prefill, decode) <= shared_limit, (head_dim, dtype, prefill, decode)
    compile_for_hopper(paged_attention._write_cache_kernel, "bf16", 4, 1, BLOCK=1024)
    compile_for_hopper(
        paged_attention._merge_kernel, "bf16", 1, 1, HEAD_DIM=80, WINDOW=0, SPLIT=512, D=128
    )
    compile_for_hopper(gumbel_argmax._chunk_kernel, "fp32", 4, 1, BLOCK=gumbel_argmax.GROUPS)
    compile_for_hopper(gumbel_argmax._merge_kernel, "fp32", 1, 1, BLOCK=64)
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
