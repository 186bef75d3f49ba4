"""The structs of the CPU kernels' C interface. `abi_records.h` is written from them.

Pointers are to memory of the CPU. `dtype` is a `DType` of `abi.h`, `threads` how many threads a
kernel may use; flags are 0 or 1.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

from src.ops.cpu.records import (
    Record,
    digest,
    float32,
    float64,
    int64,
    int64_array,
    pointer,
    record,
    records,
)

HEADER: Final = Path(__file__).with_name("abi_records.h")

MAX_READS: Final = 8
"""Step tensors that an instruction reads at most: kMaxTokenInputs."""
MAX_WRITES: Final = 8
"""Step tensors that an instruction writes at most: kMaxResults."""
MAX_DIMS: Final = 3
"""Dimensions of a token argument at most: kMaxDims."""


@record()
class AttentionSpec(Record):
    """Modifiers of a layer's scores, in the order in which they are applied."""

    scale: float = float32("factor")
    cap: float = float32("cap * tanh(score / cap); 0 for none")
    window: int = int64("keys that a token sees, itself included; 0 for all")
    chunk: int = int64("a token sees keys of its own chunk of so many tokens; 0 for no chunks")
    sinks: int = pointer(
        "const float*", "[num_heads], a logit that takes part in the denominator only; or null"
    )


@record(kernel="paged_attention")
class AttentionArgs(Record):
    """Attention over a paged cache. Strides are in elements.

    Heads lie head_dim apart, and the last dimension is contiguous.
    """

    query: int = pointer("const void*", "[tokens, num_heads, head_dim]")
    key: int = pointer("const void*", "[tokens, num_kv_heads, head_dim]")
    value: int = pointer("const void*", "[tokens, num_kv_heads, head_dim]")
    key_cache: int = pointer(
        "void*",
        "[num_blocks, block_size, num_kv_heads, head_dim] contiguous; of codes, head_dim + 4 bytes",
    )
    value_cache: int = pointer("void*", "same")
    block_tables: int = pointer("const int32_t*", "[rows, block_table_stride]")
    query_start_loc: int = pointer("const int32_t*", "[rows + 1]")
    seq_lens: int = pointer("const int32_t*", "[rows]")
    slot_mapping: int = pointer("const int64_t*", "[tokens]")
    out: int = pointer("void*", "[tokens, num_heads, head_dim] contiguous")
    spec: int = pointer("const AttentionSpec*")
    query_stride: int = int64()
    key_stride: int = int64()
    value_stride: int = int64()
    block_table_stride: int = int64()
    tokens: int = int64()
    rows: int = int64()
    num_heads: int = int64()
    num_kv_heads: int = int64()
    head_dim: int = int64()
    num_blocks: int = int64()
    block_size: int = int64()
    max_blocks: int = int64()
    dtype: int = int64()
    threads: int = int64()
    deterministic: int = int64(
        "whether results must not depend on how a row's tokens are cut into calls"
    )
    cache_kind: int = int64("a CacheKind")
    value_dim: int = int64(
        "0, or how many leading elements of a key are its value, if key_cache is value_cache too. "
        "Elements of `out` behind as many mean nothing then."
    )


@record(kernel="latent_attention")
class LatentArgs(Record):
    """Latent attention. Strides are in elements.

    The cache has one vector per token: `rank` numbers from which the projections `up` make a key of
    `nope` numbers and a value of `value` numbers for each head, and `rope` rotated numbers that
    belong to the keys of all heads.
    """

    query: int = pointer(
        "const void*", "[tokens, heads, nope + rope], contiguous but for its tokens"
    )
    latent: int = pointer("const void*", "[tokens, rank + rope]")
    cache: int = pointer("void*", "[num_blocks, block_size, rank + rope] contiguous")
    up: int = pointer("const void*", "[heads, nope + value, rank] contiguous")
    block_tables: int = pointer("const int32_t*", "[rows, block_table_stride]")
    query_start_loc: int = pointer("const int32_t*", "[rows + 1]")
    seq_lens: int = pointer("const int32_t*", "[rows]")
    slot_mapping: int = pointer("const int64_t*", "[tokens]")
    out: int = pointer("void*", "[tokens, heads, value] contiguous")
    spec: int = pointer("const AttentionSpec*", "only the scale counts")
    query_stride: int = int64()
    latent_stride: int = int64()
    block_table_stride: int = int64()
    tokens: int = int64()
    rows: int = int64()
    heads: int = int64()
    nope: int = int64()
    rope: int = int64()
    rank: int = int64()
    value: int = int64()
    num_blocks: int = int64()
    block_size: int = int64()
    max_blocks: int = int64()
    dtype: int = int64()
    threads: int = int64()
    deterministic: int = int64("as in AttentionArgs")


@record(kernel="gumbel_argmax")
class GumbelArgs(Record):
    """Draws a token for each row of logits."""

    logits: int = pointer("const float*", "[rows, vocab_size], rows logits_stride apart")
    seeds: int = pointer("const int64_t*", "[rows]")
    positions: int = pointer("const int64_t*", "[rows]")
    temperatures: int = pointer("const float*", "[rows]")
    tokens: int = pointer("int64_t*", "[rows]")
    rows: int = int64()
    vocab_size: int = int64()
    logits_stride: int = int64()
    threads: int = int64()


@record(kernel="linear")
class LinearArgs(Record):
    """A projection."""

    x: int = pointer("const void*", "[tokens, inputs], rows x_stride apart")
    weight: int = pointer(
        "const void*",
        "[outputs, inputs] contiguous; four bits: [outputs, inputs / 2]. In strips of 64 outputs "
        "(the last one is padded): int8 [strips, inputs / 4, 64, 4], int4 [strips, inputs / 8, 64, "
        "4], bfloat16 [strips, inputs / 2, 64, 2].",
    )
    scales: int = pointer(
        "const void*",
        "int8 with group 0: [outputs]; otherwise [outputs, inputs / group], in strips "
        "[strips, inputs / group, 64]",
    )
    bias: int = pointer("const void*", "[outputs] of x's dtype, or null")
    out: int = pointer("void*", "[tokens, outputs] contiguous, of x's dtype")
    offsets: int = pointer(
        "const void*",
        "of groups, like `scales`: a weight is level * scale - offset; null for zeros",
    )
    tokens: int = int64()
    inputs: int = int64()
    outputs: int = int64()
    x_stride: int = int64()
    dtype: int = int64()
    kind: int = int64("a DType or a WeightKind")
    group: int = int64()
    threads: int = int64()
    group_dtype: int = int64("of scales and offsets of groups: kFloat32, kBFloat16 or kPowers")


@record(kernel="experts")
class ExpertsArgs(Record):
    """A layer of experts.

    Each has a matrix of gate and up, [2 * intermediate, hidden], and one of down,
    [hidden, intermediate]. Experts are stacked; each is laid out like `weight` and `scales` of
    LinearArgs.
    """

    x: int = pointer("const void*", "[tokens, hidden], rows x_stride apart")
    gate_up: int = pointer("const void*")
    down: int = pointer("const void*")
    gate_up_scales: int = pointer("const void*")
    down_scales: int = pointer("const void*")
    weights: int = pointer("const float*", "[tokens, chosen]")
    ids: int = pointer("const int64_t*", "[tokens, chosen]; an invalid expert number adds nothing")
    out: int = pointer("void*", "[tokens, hidden] contiguous, of x's dtype")
    tokens: int = int64()
    hidden: int = int64()
    intermediate: int = int64()
    experts: int = int64()
    chosen: int = int64()
    x_stride: int = int64()
    dtype: int = int64()
    gate_up_kind: int = int64("as in LinearArgs")
    gate_up_group: int = int64()
    down_kind: int = int64()
    down_group: int = int64()
    activation: int = int64("an Activation")
    threads: int = int64()
    gate_up_bias: int = pointer("const void*", "[experts, 2 * intermediate] of x's dtype, or null")
    down_bias: int = pointer("const void*", "[experts, hidden] of x's dtype, or null")
    alpha: float = float64("of kClampedSwiglu")
    limit: float = float64("of kClampedSwiglu")
    weighs_inputs: int = int64("whether `weights` are factors of x instead of the results")
    gate_up_offsets: int = pointer("const void*", "like the scales, or null")
    down_offsets: int = pointer("const void*")
    gate_up_group_dtype: int = int64("as in LinearArgs")
    down_group_dtype: int = int64()
    gate_up_order: int = pointer(
        "const int32_t*",
        "[experts, inputs]: which input an expert's weights in each column are for; null: in order",
    )
    down_order: int = pointer("const int32_t*")


@record(kernel="adapt")
class AdaptArgs(Record):
    """Updates of a projection's results; see `ops.adapt`. All matrices have one dtype."""

    base: int = pointer("const void*", "[tokens, outputs] contiguous")
    x: int = pointer("const void*", "[tokens, inputs], rows x_stride apart")
    down: int = pointer("const void*", "[slots, parts * room, inputs] contiguous")
    up: int = pointer("const void*", "[slots, room, outputs] contiguous")
    ranks: int = pointer("const int32_t*", "[slots, parts]")
    starts: int = pointer("const int32_t*", "[parts + 1]")
    chosen: int = pointer("const int64_t*", "[tokens], slots; negative for none")
    out: int = pointer("void*", "[tokens, outputs] contiguous")
    tokens: int = int64()
    inputs: int = int64()
    outputs: int = int64()
    x_stride: int = int64()
    slots: int = int64()
    parts: int = int64()
    room: int = int64()
    dtype: int = int64()
    threads: int = int64()


@record(kernel="quantize")
class QuantizeArgs(Record):
    """Rounds weights to int8 by row, or to int4 by group."""

    weight: int = pointer("const void*", "[rows, inputs] contiguous, finite")
    values: int = pointer("void*", "like `weight` of LinearArgs, for `kind`")
    scales: int = pointer(
        "void*", "int8: float [rows]; int4: bfloat16 [rows, inputs / group], also in strips"
    )
    offsets: int = pointer("void*", "int4: like `scales`")
    rows: int = int64()
    inputs: int = int64()
    dtype: int = int64()
    kind: int = int64()
    group: int = int64()
    threads: int = int64()


@record(kernel="lay_out")
class LayOutArgs(Record):
    """Packs rows of bfloat16 as kBFloat16Strips, in place."""

    weight: int = pointer("void*", "[strips * 64, 2 * words] contiguous")
    strips: int = int64()
    words: int = int64()
    threads: int = int64()


@record(kernel="convolution")
class ConvolutionArgs(Record):
    """A causal convolution. Strides are in elements.

    Rows have their tokens behind one another; those behind the last are padding.
    """

    x: int = pointer("const void*", "[tokens, channels], rows x_stride apart")
    weight: int = pointer("const void*", "[taps, channels] contiguous; all of one dtype")
    bias: int = pointer("const void*", "[channels], or null")
    states: int = pointer("void*", "[num_slots, taps - 1, channels], slots state_stride apart")
    slots: int = pointer("const int64_t*", "[rows]")
    starts: int = pointer("const int32_t*", "[rows + 1]")
    out: int = pointer("void*", "[tokens, channels] contiguous")
    x_stride: int = int64()
    state_stride: int = int64()
    tokens: int = int64()
    rows: int = int64()
    channels: int = int64()
    taps: int = int64()
    num_slots: int = int64()
    silu: int = int64("whether SiLU follows")
    dtype: int = int64()
    threads: int = int64()


@record(kernel="recurrence")
class RecurrenceArgs(Record):
    """A linear recurrence. Strides are in elements, rows as in ConvolutionArgs."""

    query: int = pointer("const void*", "[tokens, key_heads, key_dim], tokens query_stride apart")
    key: int = pointer("const void*", "the same, key_stride")
    value: int = pointer("const void*", "[tokens, heads, dim], tokens value_stride apart")
    decay: int = pointer("const float*", "[tokens, heads] contiguous")
    factor: int = pointer("const float*", "[tokens, heads] contiguous")
    skip: int = pointer("const float*", "[heads], or null")
    states: int = pointer("float*", "[num_slots, heads, key_dim, dim], slots state_stride apart")
    slots: int = pointer("const int64_t*", "[rows]")
    starts: int = pointer("const int32_t*", "[rows + 1]")
    out: int = pointer("void*", "[tokens, heads, dim] contiguous")
    query_stride: int = int64()
    key_stride: int = int64()
    value_stride: int = int64()
    state_stride: int = int64()
    tokens: int = int64()
    rows: int = int64()
    key_heads: int = int64()
    heads: int = int64()
    key_dim: int = int64()
    dim: int = int64()
    num_slots: int = int64()
    dtype: int = int64()
    delta: int = int64()
    normalizes: int = int64()
    threads: int = int64()


@record()
class BoundInput(Record):
    """An argument of a compiled function: a weight, or a tensor whose first dimension is tokens."""

    handle: int = pointer("Handle", "a weight; null for a token argument")
    dtype: int = int64("torch's number; this and the fields below are for token arguments only")
    dims: int = int64()
    sizes: ctypes.Array[ctypes.c_int64] = int64_array("kMaxDims", MAX_DIMS, "sizes[0] is unused")


@record()
class AttentionLayer(Record):
    """A layer's attention in a step."""

    attention: int = pointer(
        "const AttentionArgs*", "with the layer's constants, and its part of the KV cache"
    )
    group: int = int64("index of the group of layers whose block tables it uses")


@record()
class LatentLayer(Record):
    """A layer's latent attention in a step."""

    attention: int = pointer("const LatentArgs*", "as in AttentionLayer")
    group: int = int64("as in AttentionLayer")


@record()
class RecurrenceLayer(Record):
    """A layer's convolution and recurrence in a step; a row's states are in the slot of its number.

    Queries, keys and values are parts of the channels that are convolved.
    """

    convolution: int = pointer("const ConvolutionArgs*", "with the layer's constants and states")
    recurrence: int = pointer("const RecurrenceArgs*", "the same")
    query: int = int64("number of the first channel of queries")
    key: int = int64("the same of keys")
    value: int = int64("the same of values")


@record()
class Instruction(Record):
    """One entry of a program: a function and its constants. Step tensors have numbers."""

    run: int = pointer("StepFunction*", "of a kind of mixer, or slipstream_step_call")
    record: int = pointer("const void*", "a record of the function's kind, or a Bound")
    num_reads: int = int64()
    num_writes: int = int64()
    reads: ctypes.Array[ctypes.c_int64] = int64_array("kMaxTokenInputs", MAX_READS)
    writes: ctypes.Array[ctypes.c_int64] = int64_array("kMaxResults", MAX_WRITES)
    last_reads: int = int64("bit i: no later instruction reads reads[i]")


@record()
class StepContext(Record):
    """Shared by all steps of an engine: its program, its KV cache and its rows."""

    program: int = pointer(
        "const Instruction*",
        "[length]: from token ids (tensor 0), positions (1) and slots of adapters (2)",
    )
    head: int = pointer("const Bound*", "hidden states to logits")
    tokens: int = pointer("int32_t*", "[rows, token_stride]: (row, position) -> token id")
    block_tables: int = pointer(
        "const int32_t*", "[groups, rows, block_table_stride], groups group_stride apart"
    )
    temperatures: int = pointer("const double*", "per row, temperature_stride apart")
    seeds: int = pointer("const int64_t*", "per row, seed_stride apart")
    adapter_slots: int = pointer("const int32_t*", "per row; or null, and tensor 2 is not given")
    length: int = int64("of the program")
    last_mixer: int = int64("index of its last mixer")
    kept: int = int64("bit i: tensor i is read after the last mixer, which does not write it")
    hidden: int = int64("number of the hidden states' tensor")
    rows: int = int64()
    token_stride: int = int64()
    groups: int = int64()
    group_stride: int = int64()
    block_table_stride: int = int64()
    temperature_stride: int = int64()
    seed_stride: int = int64()
    vocab_size: int = int64()
    block_size: int = int64()
    mixed_width: int = int64("elements per token of the widest output of a mixer")
    dtype: int = int64("of the model")
    torch_dtype: int = int64("torch's number of it")
    torch_index_dtype: int = int64("torch's number of int64")
    threads: int = int64()
    deterministic: int = int64()


@record()
class MaskArgs(Record):
    """Masks of rows and their requests' own constraints.

    All but `wishes` are [rows, words]; bit v % 32 of word v / 32 stands for token v.
    """

    masks: int = pointer("uint32_t*", "tokens that a row's grammar allows")
    ends: int = pointer("const uint32_t*", "tokens that end its output")
    allowed: int = pointer("const uint32_t*", "tokens of which its output may consist")
    wishes: int = pointer(
        "const uint8_t*",
        "[rows], a Wish: none; `allowed` counts; also, output must not end yet",
    )
    rows: int = int64()
    words: int = int64()


@record()
class LastMove(Record):
    """How the last of some grammar steps ended."""

    outcome: int = int64("an Outcome")
    seconds: float = float64("CPU time of this thread")


KERNELS: Final = tuple(each for each in records() if each.kernel)
"""Records of kernels. A level is used only if the self-check has a check for each and it passes."""


def _declarations() -> str:
    return "\n".join(each.in_cpp() for each in records())


ABI: Final = digest(_declarations())
"""What a library says of itself if it was built from the same records."""


def header() -> str:
    """The text of `abi_records.h`."""
    functions = "".join(
        f"typedef int {each.__name__.removesuffix('Args')}Function(const {each.__name__}*);\n"
        f"SLIPSTREAM_EXPORT {each.__name__.removesuffix('Args')}Function "
        f"slipstream_{each.kernel};\n"
        for each in KERNELS
    )
    return (
        "// Written by `python -m src.ops.cpu.abi` from abi.py; change that file instead.\n"
        "// Included by abi.h alone.\n"
        "#pragma once\n\n"
        f"#define SLIPSTREAM_ABI {ABI}\n\n{_declarations()}\n{functions}"
    )


if __name__ == "__main__":
    HEADER.write_text(header())
    sys.stdout.write(f"{HEADER}\n")
