"""The structs of the CPU kernels' C interface. `abi_records.h` is written from them.

A kernel that computes an op is given what the op's record says, see `struct_fields`. Pointers are
to memory of the CPU. `dtype` is a `DType` of `abi.h`, `threads` how many threads a kernel may use;
flags are 0 or 1.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

from src.ops.attention import spec as attention_spec
from src.ops.attention.call import PagedAttention
from src.ops.attention.latent_attention import LatentAttention
from src.ops.projections.experts import Experts
from src.ops.projections.linear import Linear
from src.ops.projections.lora import Lora
from src.ops.runtime.c_records import (
    Record,
    digest,
    float64,
    int64,
    int64_array,
    pointer,
    record,
    records,
)
from src.ops.sampling.gumbel_argmax import GumbelArgmax
from src.ops.states.causal_convolution import CausalConvolution
from src.ops.states.linear_recurrence import LinearRecurrence

HEADER: Final = Path(__file__).with_name("abi_records.h")

MAX_READS: Final = 8
"""Step tensors that an instruction reads at most: kMaxTokenInputs."""
MAX_WRITES: Final = 8
"""Step tensors that an instruction writes at most: kMaxResults."""
MAX_DIMS: Final = 3
"""Dimensions of a token argument at most: kMaxDims."""


@record(value=attention_spec.AttentionSpec)
class AttentionSpec(Record):
    """Modifiers of a layer's scores, in the order in which they are applied; 0 or null for none.

    A soft cap is cap * tanh(score / cap). A token sees `window` keys up to its own, those of its
    own `chunk` of so many tokens, and `ahead` keys behind its own. Sinks, [num_heads], are logits
    that take part in the denominator only.
    """


@record(
    kernel="paged_attention",
    call=PagedAttention,
    names={"block_table_stride": "block_tables_stride"},
)
class AttentionArgs(Record):
    """Attention over a paged cache. Strides are in elements.

    Heads lie head_dim apart, and the last dimension is contiguous. Rows of a cache of codes have
    head_dim + 4 bytes. If it is `deterministic`, results must not depend on how a row's tokens are
    cut into calls.
    """

    spec: int = pointer("const AttentionSpec*")
    cache_kind: int = int64("a CacheKind")
    value_dim: int = int64(
        "0, or how many leading elements of a key are its value, if key_cache is value_cache too. "
        "Elements of `out` behind as many mean nothing then."
    )


@record(
    kernel="latent_attention",
    call=LatentAttention,
    names={"block_table_stride": "block_tables_stride"},
)
class LatentArgs(Record):
    """Latent attention. Strides are in elements.

    The cache has one vector per token: `rank` numbers from which the projections `up` make a key of
    `nope` numbers and a value of `value` numbers for each head, and `rope` rotated numbers that
    belong to the keys of all heads.
    """

    spec: int = pointer("const AttentionSpec*", "only the scale counts")


@record(kernel="gumbel_argmax", call=GumbelArgmax)
class GumbelArgs(Record):
    """Draws a token for each row of logits."""


@record(kernel="linear", call=Linear)
class LinearArgs(Record):
    """A projection; `kind` is a DType or a WeightKind."""


@record(kernel="experts", call=Experts)
class ExpertsArgs(Record):
    """A layer of experts, whose matrices are stacked.

    Kinds are as in LinearArgs, and so is each matrix of a stack. `activation` is an Activation;
    `alpha` and `limit` are those of kClampedSwiglu. If it `weighs_inputs`, weights are factors of x
    instead of the results. An order says which input an expert's weights in each column are for.
    """


@record(kernel="lora", call=Lora, names={"chosen": "slots", "slots": "num_slots"})
class LoraArgs(Record):
    """Updates of a projection's results; see `ops.lora`. All matrices have one dtype."""


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


@record(
    kernel="convolution",
    call=CausalConvolution,
    names={"starts": "query_start_loc", "state_stride": "states_stride"},
)
class ConvolutionArgs(Record):
    """A causal convolution. Strides are in elements.

    Rows have their tokens behind one another; those behind the last are padding.
    """


@record(
    kernel="recurrence",
    call=LinearRecurrence,
    names={"starts": "query_start_loc", "state_stride": "states_stride"},
)
class RecurrenceArgs(Record):
    """A linear recurrence. Strides are in elements, rows as in ConvolutionArgs."""


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
        "[length]: from token ids (tensor 0), positions (1), slots of adapters (2) and own inputs",
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
    own_inputs: int = int64("step inputs of the model's own")
    first_own: int = int64("number of the first one's tensor; the others follow")
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

    All but `constraints` are [rows, words]; bit v % 32 of word v / 32 stands for token v.
    """

    masks: int = pointer("uint32_t*", "tokens that a row's grammar allows")
    ends: int = pointer("const uint32_t*", "tokens that end its output")
    allowed: int = pointer("const uint32_t*", "tokens of which its output may consist")
    constraints: int = pointer(
        "const uint8_t*",
        "[rows], a RowConstraint: none; `allowed` counts; also, output must not end yet",
    )
    rows: int = int64()
    words: int = int64()


@record()
class LastGrammarStep(Record):
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
        "// Written by `python -m src.ops.runtime.abi` from abi.py; change that file instead.\n"
        "// Included by abi.h alone.\n"
        "#pragma once\n\n"
        f"#define SLIPSTREAM_ABI {ABI}\n\n{_declarations()}\n{functions}"
    )


if __name__ == "__main__":
    HEADER.write_text(header())
    sys.stdout.write(f"{HEADER}\n")
