"""Compiles the Triton kernels for an sm_90 GPU, which needs no GPU; exits non-zero on failure.

A program of its own, so that another test's TRITON_INTERPRET cannot reach it.
"""

import inspect
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from src.ops.attention import cached_rows_triton as codes
from src.ops.attention import decode_schedule_triton as decode_schedule
from src.ops.attention import latent_attention_triton as latent_attention
from src.ops.attention import latent_expanded_triton as latent_expanded
from src.ops.attention import paged_attention_triton as paged_attention
from src.ops.attention import paged_decode_triton as paged_decode
from src.ops.attention import rotate_and_cache_triton as rotate_and_cache
from src.ops.attention.spec import ALL_AHEAD
from src.ops.drafts import accept_drafts_triton as accept_drafts
from src.ops.drafts import look_up_triton as look_up
from src.ops.projections import experts_triton as experts
from src.ops.projections import linear_triton as linear
from src.ops.projections import lora_triton as lora
from src.ops.sampling import gumbel_argmax_triton as gumbel_argmax
from src.ops.sampling import mass_threshold_triton as mass_threshold
from src.ops.states import causal_convolution_triton as causal_convolution
from src.ops.states import linear_recurrence_triton as linear_recurrence
from src.ops.tuning import decode_shape, of_capability, packed_rows, prefill_shape

HOPPER = GPUTarget("cuda", 90, 32)
# Of a multiprocessor, and what each program takes of it beside its own.
SHARED_MEMORY, RESERVED = 228 * 1024, 1024
POINTERS = {
    "block_tables": "*i32",
    "query_start_loc": "*i32",
    "seq_lens": "*i32",
    "schedule": "*i32",
    "starts": "*i32",
    "place": "*i32",
    "shared": "*i32",
    "members_of": "*i32",
    "slot_mapping": "*i64",
    "partial_out": "*fp32",
    "partial_lse": "*fp32",
    "logits": "*fp32",
    "expansion": "*i32",
    "state_out": "*fp32",
    "state_lse": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "temperatures": "*fp32",
    "chunk_scores": "*fp32",
    "chunk_tokens": "*i64",
    "tokens": "*i64",
    "scale_log2": "fp32",
    "rope_table": "*fp32",
    "sinks": "*fp32",
    "eps": "fp32",
    "order": "*i64",
    "ends": "*i32",
    "weights": "*fp32",
    "ids": "*i64",
    "scales": "*fp32",
    "offsets": "*fp32",
    "values": "*fp32",
    "shares": "*fp64",
    "thresholds": "*fp32",
}
ABSENT = ("scales", "offsets", "columns")
UNNORMED = {"q_norm": None, "k_norm": None}
CACHED = (
    *("query", "key", "value", "key_cache", "value_cache", "out", "q_norm", "k_norm"),
    *("hidden", "gate_up", "down", "bias", "activated", "results"),
    *("absorbed", "latent", "cache", "merged", "x", "weight", "to"),
    *("vectors", "made"),
)


def compile_for_hopper(kernel, dtype, warps, stages, pointers=POINTERS, **constants) -> int:
    """Shared memory of the compiled kernel in bytes; ``pointers`` are further types."""
    options = {"num_warps": warps, "num_stages": stages, "pointers": POINTERS | pointers}
    compiled = compiled_for_hopper(kernel, dtype, constants, **options)
    return int(compiled.metadata.shared)


def compiled_for_hopper(kernel, dtype, constants, pointers=POINTERS, **options):
    signature, divisible = {}, {}
    for index, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name] = "constexpr"
            continue
        given = f"*{dtype}" if name in CACHED else "i32"
        if constants.get("SORT") and name in ("key_cache", "value_cache"):
            given = "*i8"
        signature[name] = pointers.get(name, given)
        # As the launcher does with torch's tensors and with strides that are multiples of 16.
        if signature[name].startswith("*") or name.endswith("_stride"):
            divisible[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=divisible)
    compiled = triton.compile(source, target=HOPPER, options=options)
    assert compiled.asm["ptx"]
    return compiled


def rotation() -> None:
    for dtype, head_dim, normed, sort in (
        ("bf16", 128, True, 0),
        ("fp32", 72, False, 0),
        ("fp16", 64, False, 0),
        ("bf16", 128, True, 1),
        ("bf16", 64, False, 2),
    ):
        compiled = compiled_for_hopper(
            rotate_and_cache._rotate_and_cache_kernel,
            dtype,
            rotate_and_cache.constants(head_dim, 32)
            | ({} if normed else UNNORMED)
            | {"SORT": sort},
            **rotate_and_cache.OPTIONS,
        )
        if sort:
            continue  # a division is made of fused products
        # Rounded products, as torch's own, are not fused with the sums that they go into.
        assert "fma" not in compiled.asm["ptx"], (dtype, head_dim)


def compile_attention(
    head_dim: int,
    window: int,
    size: int,
    dtype: str,
    group: int,
    cap: float = 0.0,
    chunk: int = 0,
    ahead: int = 0,
    sort: int = 0,
    **unused: None,
) -> None:
    common = {
        **unused,
        "SORT": sort,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 64,
        "GROUP": group,
        "D": head_dim,
    }
    # Of a long prompt, and of a batch that large tiles would leave half empty.
    for tile, keys, warps, stages in {prefill_shape(90, head_dim, size, n) for n in (4096, 64)}:
        prefill = compile_for_hopper(
            paged_attention._prefill_kernel, dtype, warps, stages,
            FEWEST=2, M=tile, N=keys, WINDOW=window, CHUNK=chunk, AHEAD=ahead, CAP=cap, **common,
        )  # fmt: skip
        assert prefill + RESERVED <= SHARED_MEMORY, (head_dim, dtype, prefill)
    shape, packed = decode_shape(90, head_dim, size), packed_rows(group)
    pack = {"MEMBERS": packed // group, "M": packed}
    decode = compile_for_hopper(
        paged_decode._decode_kernel, dtype, shape.warps, shape.stages,
        N=shape.tile, WINDOW=window, CHUNK=chunk, CAP=cap, **pack, **common,
    )  # fmt: skip
    # All programs of the persistent grid are on their multiprocessors at the same time.
    assert shape.programs * (decode + RESERVED) <= SHARED_MEMORY, (head_dim, dtype, decode)
    del common["BLOCK_SIZE"], common["SORT"]
    compile_for_hopper(
        paged_decode._merge_kernel, dtype, 1, 1, PIECES=paged_decode._MERGED, **pack, **common
    )


def compile_experts(size: int, dtype: str) -> None:
    for crowd in (experts._FEW, experts._MANY, experts._MANY_IN_GROUPS):
        tile = of_capability(experts._TILES, 90, (crowd, size))
        sizes = {"M": tile.pairs, "N": tile.outputs, "K": tile.inputs, "E": 128, "RUN": 32}
        sizes |= {"scales": None, "offsets": None, "columns": None, "KIND": 0}
        plain = {"bias": None}
        silu = {"ACTIVATION": 0, "ALPHA": 1.0, "LIMIT": 0.0, "weights": None}
        clamped = {"ACTIVATION": 2, "ALPHA": 1.702, "LIMIT": 7.0}
        if crowd != experts._MANY:
            compile_packed_experts(size, dtype, tile, sizes, silu)
        if crowd == experts._MANY_IN_GROUPS:
            continue
        for kernel, more in (
            (experts._gate_up_kernel, plain | silu),
            (experts._gate_up_kernel, clamped),
            (experts._down_kernel, plain),
            (experts._down_kernel, {}),
        ):
            shared = compile_for_hopper(kernel, dtype, tile.warps, tile.stages, **sizes, **more)
            assert shared + RESERVED <= SHARED_MEMORY, (kernel, dtype, crowd, shared)
    for more in ({}, {"weights": None}):
        compile_for_hopper(experts._combine_kernel, dtype, 4, 1, BLOCK=experts._COMBINED, **more)


def compile_packed_experts(size: int, dtype: str, tile, sizes, silu) -> None:
    """Levels of 8 bits, float8, levels of 4 bits with offsets and an order, and e2m1."""
    pointers = {"columns": "*i32"}
    without = {"offsets": None, "columns": None}
    for kernel, weight, more in (
        (experts._gate_up_kernel, "gate_up", silu),
        (experts._down_kernel, "down", {}),
    ):
        for kind, group, held, absent in (
            (1, 16, "*i8", without),
            (1, 4096, "*fp8e4nv", without),
            (2, 128, "*u8", {}),
            (3, 32, "*u8", without),
        ):
            given = {name: value for name, value in sizes.items() if name not in ABSENT}
            given |= {"KIND": kind, "K": linear.step_of(group, size)} | absent | more
            types = pointers | {weight: held} | ({"scales": "*u8"} if kind == 3 else {})
            shared = compile_for_hopper(kernel, dtype, tile.warps, tile.stages, types, **given)
            assert shared + RESERVED <= SHARED_MEMORY, (kernel, dtype, tile, kind, shared)


def compile_latents(size: int, dtype: str) -> None:
    tile = latent_attention.tile_of(90, size, 512, 64)
    shape = {"HEADS": 128, "NOPE": 128, "ROPE": 64, "RANK": 512, "BLOCK_SIZE": 64}
    shared = compile_for_hopper(
        latent_attention._attend_kernel, dtype, tile.warps, tile.stages,
        M=tile.packed, N=tile.keys, R=512, P=64, **shape,
    )  # fmt: skip
    assert shared + RESERVED <= SHARED_MEMORY, (dtype, shared)
    compile_for_hopper(latent_attention._merge_kernel, dtype, 1, 1, RANK=512, R=512)
    compile_for_hopper(latent_attention._write_kernel, dtype, 4, 1, BLOCK=1024)
    sizes = {"M": latent_attention._PROJECTED, "N": 64, "K": 32}
    compile_for_hopper(
        latent_attention._project_kernel, dtype, 4, 3, INPUTS=128, OUTPUTS=512, **sizes
    )
    expanded = latent_expanded.tile_of(90, size, D=128, P=64, V=128)
    del shape["BLOCK_SIZE"]
    shared = compile_for_hopper(
        latent_expanded._attend_kernel, dtype, expanded.warps, expanded.stages,
        VALUE=128, M=expanded.tokens, N=expanded.keys, D=128, P=64, V=128, **shape,
    )  # fmt: skip
    assert shared + RESERVED <= SHARED_MEMORY, (dtype, shared)
    compile_for_hopper(latent_expanded._gather_kernel, dtype, 4, 1, BLOCK_SIZE=64, BLOCK=1024)


def compile_large_latents() -> None:
    """Vectors and heads larger than DeepSeek's, for which the measured tiles would be too large."""
    rank, rope = 448, 128
    tile = latent_attention.tile_of(90, 2, rank, rope)
    shared = compile_for_hopper(
        latent_attention._attend_kernel, "bf16", tile.warps, tile.stages,
        M=tile.packed, N=tile.keys, R=512, P=128,
        HEADS=128, NOPE=128, ROPE=rope, RANK=rank, BLOCK_SIZE=64,
    )  # fmt: skip
    assert shared + RESERVED <= SHARED_MEMORY, shared
    expanded = latent_expanded.tile_of(90, 2, D=256, P=64, V=256)
    shared = compile_for_hopper(
        latent_expanded._attend_kernel, "bf16", expanded.warps, expanded.stages,
        HEADS=128, NOPE=192, ROPE=64, RANK=512, VALUE=256,
        M=expanded.tokens, N=expanded.keys, D=256, P=64, V=256,
    )  # fmt: skip
    assert shared + RESERVED <= SHARED_MEMORY, shared


def compile_linears(size: int, dtype: str) -> None:
    for tile in (linear._FEW, linear._MANY):
        for group, offsets in ((32, {}), (128, {"offsets": None}), (4096, {"offsets": None})):
            for weight in ("*u8", "*i8", "*fp8e4nv"):
                shared = compile_for_hopper(
                    linear._linear_kernel, dtype, tile.warps, tile.stages,
                    IS_INT4=weight == "*u8", RUN=32, M=tile.tokens, N=tile.outputs,
                    K=linear.step_of(group, size), **({"bias": None} | offsets),
                    pointers={"weight": weight, "tokens": "i32"},
                )  # fmt: skip
                assert shared + RESERVED <= SHARED_MEMORY, (dtype, tile, group, weight, shared)


def compile_loras(dtype: str) -> None:
    """Of a projection of queries, keys and values, whatever the rank."""
    ranks = {"ranks": "*i32", "starts": "*i32", "slots": "*i64", "tokens": "i32"}
    matrices = dict.fromkeys(("base", "down", "up"), f"*{dtype}")
    for room in (8, 64, 256):
        shape = {"parts": 3, "room": room, "padded": max(16, room), "block_t": lora._TOKENS}
        for kernel, size in ((lora._project, "block_k"), (lora._expand, "block_n")):
            shared = compile_for_hopper(
                kernel, dtype, 4, 3, **shape, **{size: 64},
                pointers={**ranks, **matrices, "inner": "*fp32"},
            )  # fmt: skip
            assert shared + RESERVED <= SHARED_MEMORY, (kernel, dtype, room, shared)


def compile_recurrences(dtype: str) -> None:
    """The gated delta rule of Qwen3-Next, the scan of Mamba-2 as Granite has it, LFM2's inputs."""
    kept, lists = {"states": f"*{dtype}"}, {"slots": "*i64"}
    for kernel, choices in (
        (causal_convolution._convolve_kernel, ({"SILU": True}, {"SILU": False})),
        (causal_convolution._keep_kernel, ({},)),
    ):
        sizes = {"TAPS": 4, "BLOCK": causal_convolution._CHANNELS}
        for choice in choices:
            compile_for_hopper(kernel, dtype, 4, 1, pointers=kept | lists, **sizes, **choice)
    numbers = dict.fromkeys(("decay", "factor", "skip", "states"), "*fp32")
    for key_dim, dim, delta in ((128, 128, True), (128, 64, False), (256, 64, False)):
        compiled = compiled_for_hopper(
            linear_recurrence._recurrence_kernel,
            dtype,
            linear_recurrence.constants(key_dim, dim)
            | {"DELTA": delta, "NORMALIZES": delta}
            | ({"skip": None} if delta else {}),
            pointers=POINTERS | numbers | lists | {"tokens": "i32"},
            num_warps=4,
        )
        # What a program keeps of a state stays in registers.
        assert not re.search(r"st\.local|ld\.local", compiled.asm["ptx"]), (dtype, key_dim, dim)


def compile_thresholds() -> None:
    """Of top-p, of typical-p and of top-k."""
    for within_one, absent in ((True, {}), (False, {}), (False, {"weights": None})):
        compile_for_hopper(
            mass_threshold._threshold_kernel,
            "fp32",
            mass_threshold.WARPS,
            1,
            WITHIN_ONE=within_one,
            PIVOTS=mass_threshold.PIVOTS,
            BLOCK=mass_threshold.BLOCK,
            **absent,
        )


def compile_drafts() -> None:
    """Of matches of one token, of three and of four or more; a few drafts, and many."""
    integers = ("tokens", "lengths", "wanted", "places", "matches", "out", "counts", "known")
    pointers = POINTERS | dict.fromkeys((*integers, "drafts", "kept"), "*i32")
    pointers |= {"rows": "*i64", "sampled": "*i64"}
    for few in (1, 3, 4):
        constants = {"FEW": few, "BLOCK": look_up.BLOCK}
        compile_for_hopper(look_up._find_kernel, "bf16", 8, 1, pointers, **constants)
    compile_for_hopper(look_up._follow_kernel, "bf16", 4, 1, pointers)
    for width in (1, 8, 32):
        compile_for_hopper(accept_drafts._accept_kernel, "bf16", 1, 1, pointers, WIDTH=width)


def main() -> None:
    compile_drafts()
    for dtype in ("bf16", "fp16", "fp32"):
        compile_recurrences(dtype)
    compile_latents(2, "bf16")
    compile_latents(4, "fp32")
    compile_large_latents()
    compile_attention(128, 0, 2, "bf16", 4, sinks=None)
    compile_attention(128, 128, 2, "bf16", 8, cap=30.0)
    compile_attention(256, 4096, 2, "bf16", 2, cap=50.0, sinks=None)
    compile_attention(64, 512, 2, "fp16", 8, sinks=None)
    compile_attention(256, 0, 2, "bf16", 2, sinks=None)
    compile_attention(128, 0, 2, "bf16", 5, chunk=8192, sinks=None)
    compile_attention(64, 0, 2, "bf16", 1, ahead=ALL_AHEAD, sinks=None)
    compile_attention(64, 65, 4, "fp32", 1, ahead=64, sinks=None)
    compile_attention(256, 0, 4, "fp32", 1, sinks=None)
    for sort in (1, 2):
        compile_attention(128, 0, 2, "bf16", 4, sort=sort, sinks=None)
        compile_attention(256, 4096, 2, "bf16", 2, cap=50.0, sort=sort)
        compile_attention(128, 0, 2, "fp32", 4, sort=sort, sinks=None)
        codes_shape = {"SORT": sort, "HEAD_DIM": 128, "HEADS": 8, "D": 128}
        compile_for_hopper(codes._write_codes_kernel, "bf16", 4, 1, **codes_shape)
    compile_for_hopper(paged_attention._write_cache_kernel, "bf16", 4, 1, BLOCK=1024)
    schedule = {"MEMBERS": 4, "ROWS": decode_schedule._FEWEST_ROWS}
    compile_for_hopper(
        decode_schedule._pack_kernel,
        "bf16",
        4,
        1,
        LEAST=4,
        CHUNK=decode_schedule._CHUNK,
        **schedule,
    )
    compile_for_hopper(decode_schedule._starts_kernel, "bf16", 4, 1, **schedule)
    compile_for_hopper(gumbel_argmax._chunk_kernel, "fp32", 4, 1, BLOCK=gumbel_argmax.GROUPS)
    compile_for_hopper(gumbel_argmax._merge_kernel, "fp32", 1, 1, BLOCK=64)
    compile_thresholds()
    for size, dtype in ((2, "bf16"), (2, "fp16"), (4, "fp32")):
        compile_experts(size, dtype)
        compile_linears(size, dtype)
        compile_loras(dtype)
    rotation()
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
