"""A whole step of compiled code in one call of the kernel library (`step.cpp`).

From the rows' tokens to the tokens that are drawn runs no Python: a small model's step is otherwise
mostly that, and the interpreter lock is free meanwhile.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from src.ops.cpu.compiled import COMPILED_FAILED, Bound, Caller, stolen
from src.ops.cpu.kernel_library import DTYPES, raise_status

_CONTEXT: Final = struct.Struct("@10P17qd").pack  # StepContext


@dataclass(frozen=True)
class StepRows:
    """Where a step finds its rows; every tensor has a row per first index, on the CPU.

    Attributes
        tokens: int32 [R, L], position to token id; a negative one was never produced.
        block_tables: int32 [groups, R, max_blocks], the last contiguous; positions whose block is
            negative are not written.
        temperatures: float64 [R], of any stride; see `gumbel_argmax`.
        seeds: int64 [R], of any stride.
        vocab_size: Tokens are below it.
    """

    tokens: Tensor
    block_tables: Tensor
    temperatures: Tensor
    seeds: Tensor
    vocab_size: int


@dataclass(frozen=True)
class StepCalls:
    """The compiled functions of a step, with their weights.

    Attributes
        layers: The first region, the middle one for each layer but one, the last. The first takes
            token ids and positions and returns query, key, value and residual; a middle one takes
            attention output, residual and positions and returns the same; the last takes attention
            output and residual and returns the hidden states.
        head: Takes hidden states [S, H] and returns float32 logits [S, V].
    """

    layers: Sequence[Bound]
    head: Bound

    def fail(self, status: int) -> None:
        """Raise what a status says; of compiled code only the one that failed knows why."""
        for call in (*self.layers, self.head):
            if call.has_failed:
                call.fail(status)
        self.head.fail(status)


@dataclass(frozen=True)
class StepAttention:
    """What the attention of all layers is told.

    Attributes
        key_caches, value_caches: Per layer, [num_blocks, block_size, num_kv_heads, head_dim].
        groups: Per layer, whose block tables are its.
        sliding_windows: Per layer, in tokens; 0 is the whole context.
        num_heads: Of the queries.
        scale: Factor on query-key products.
        deterministic: As of [`paged_attention`][src.ops.paged_attention.paged_attention].
    """

    key_caches: Sequence[Tensor]
    value_caches: Sequence[Tensor]
    groups: Sequence[int]
    sliding_windows: Sequence[int]
    num_heads: int
    scale: float
    deterministic: bool = False


class MaskGate:
    """Where a step waits for the masks of its rows, before it draws. Opened once, by any thread."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._gate: int | None = caller.new_gate()
        if self._gate is None:
            raise MemoryError("no memory for the masks of a step")

    def __del__(self) -> None:
        if self._gate is not None:
            self._caller.delete_gate(self._gate)

    @property
    def address(self) -> int:
        """Of the gate, as the kernel library knows it."""
        assert self._gate is not None
        return self._gate

    def open(self, masks: Tensor, rows: Sequence[int]) -> None:
        """Let the step go on.

        Parameters
            masks: int32 [R, W], contiguous; bit `v % 32` of word `v // 32` says that token v may
                be drawn. They stay as they are until the step has drawn.
            rows: Row of `masks` of each that samples; a negative one may draw anything.
        """
        try:
            numbers = array("q", rows)
        except BaseException:
            self.fail()
            raise
        address, count = numbers.buffer_info()
        is_valid = masks.dtype == torch.int32 and masks.is_contiguous()
        # No words are too few: the step fails, and does not wait for ever.
        words = masks.shape[1] if is_valid and max(rows, default=-1) < len(masks) else 0
        status = self._caller.open_gate(self.address, masks.data_ptr(), words, address, count)
        if status:
            raise_status(status)

    def fail(self) -> None:
        """Let the step fail: there are no masks."""
        self._caller.open_gate(self.address, None, 0, None, 0)


class CompiledStep:
    """Rows to tokens, in one call. One thread at a time may call it."""

    def __init__(
        self,
        caller: Caller,
        calls: StepCalls,
        attention: StepAttention,
        rows: StepRows,
    ) -> None:
        keys, values = attention.key_caches, attention.value_caches
        layers = len(keys)
        if len(calls.layers) != layers + 1:
            raise ValueError(f"expected one call more than layers, got {len(calls.layers)}")
        if not all(kv.is_contiguous() for kv in (*keys, *values)):
            raise ValueError("expected contiguous caches")
        if len({kv.shape for kv in (*keys, *values)}) != 1:
            raise ValueError("expected caches of one shape in all layers")
        if not all(0 <= group < len(rows.block_tables) for group in attention.groups):
            raise ValueError("expected block tables for every layer's group")
        num_blocks, block_size, num_kv_heads, head_dim = keys[0].shape
        self._step: Any = caller.step
        self._caller = caller
        self._calls = calls
        tables = (
            (ctypes.c_void_p * (layers + 1))(*[call.address for call in calls.layers]),
            (ctypes.c_void_p * layers)(*[kv.data_ptr() for kv in keys]),
            (ctypes.c_void_p * layers)(*[kv.data_ptr() for kv in values]),
            (ctypes.c_int64 * layers)(*attention.sliding_windows),
            (ctypes.c_int64 * layers)(*attention.groups),
        )
        addresses = [ctypes.addressof(table) for table in tables]
        called, key_table, value_table, windows, groups = addresses
        # What the context points at.
        self._holds = (caller, calls, attention, rows, tables)
        self._context = _CONTEXT(
            called,
            calls.head.address,
            key_table,
            value_table,
            windows,
            groups,
            rows.tokens.data_ptr(),
            rows.block_tables.data_ptr(),
            rows.temperatures.data_ptr(),
            rows.seeds.data_ptr(),
            layers,
            len(rows.tokens),
            rows.tokens.stride(0),
            len(rows.block_tables),
            rows.block_tables.stride(0),
            rows.block_tables.stride(1),
            rows.temperatures.stride(0),
            rows.seeds.stride(0),
            rows.vocab_size,
            attention.num_heads,
            num_kv_heads,
            head_dim,
            num_blocks,
            block_size,
            DTYPES[keys[0].dtype],
            caller.num_threads,
            attention.deterministic,
            attention.scale,
        )

    def gate(self) -> MaskGate:
        """For the masks of one step."""
        return MaskGate(self._caller)

    def draw(self, steps: Iterable[int], num_samples: int, gate: MaskGate | None = None) -> Tensor:
        """Compute, and draw by temperature and seed: token ids [S] int64, also in their rows.

        Parameters
            steps: Row, first position, number of tokens, and 1 if the token behind them is drawn,
                of each row in turn.
            num_samples: Rows that sample.
            gate: Whoever opens it says what they may sample; waited for once there are logits.

        Raises
            ValueError: A row has not what the step needs, or the masks are not of these rows.
            MemoryError: There is no room for what a kernel computes on the way.
            CompiledCodeError: Compiled code failed.
        """
        # By torch itself the interpreter lock would be given away, and be waited for.
        token_ids = torch.from_numpy(np.empty(num_samples, dtype=np.int64))
        self._call(array("q", steps), 0, token_ids.data_ptr(), None, None, gate)
        return token_ids

    def compute(
        self, steps: Iterable[int], num_samples: int, *, wants_hidden: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute, and draw nothing: hidden states [T, H], if wanted, and float32 logits [S, V].

        Other arguments and errors as of `draw`.
        """
        hidden = (ctypes.c_void_p * 1)() if wants_hidden else None
        logits = (ctypes.c_void_p * 1)() if num_samples else None
        self._call(array("q", steps), 0, None, hidden, logits)
        return (
            None if hidden is None else stolen(hidden)[0],
            None if logits is None else stolen(logits)[0],
        )

    def try_out(self, num_tokens: int) -> Tensor:
        """Compute tokens of no row, which are written nowhere: hidden states [T, H]."""
        hidden = (ctypes.c_void_p * 1)()
        self._call(array("q"), num_tokens, None, hidden, None)
        return stolen(hidden)[0]

    def _call(
        self,
        steps: array[int],
        padding: int,
        token_ids: int | None,
        hidden: Any,
        logits: Any,
        gate: MaskGate | None = None,
    ) -> None:
        address, length = steps.buffer_info()
        status = self._step(
            *(self._context, address, length // 4, padding),
            *(None if gate is None else gate.address, token_ids, hidden, logits),
        )
        if status == COMPILED_FAILED:
            self._calls.fail(status)
        if status:
            raise_status(status)
