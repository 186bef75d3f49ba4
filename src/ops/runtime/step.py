"""A whole step of compiled code in one call of the kernel library (`step.cpp`).

No Python runs between reading the rows' tokens and sampling the next ones. In a small model's step
Python would take most of the time. The GIL is released meanwhile.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from src.ops.attention.spec import AttentionSpec
from src.ops.runtime import abi
from src.ops.runtime.abi import MAX_READS, MAX_WRITES, Instruction, StepContext
from src.ops.runtime.c_records import Record
from src.ops.runtime.calls import DTYPES, raise_status
from src.ops.runtime.calls import address_of as address_of_tensor
from src.ops.runtime.compiled import COMPILED_FAILED, Bound, Caller, stolen

MAX_STEP_TENSORS: Final = 16
# Fields of the C++ side's RowStep.
_NUMBERS_OF_ROW: Final = 5

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class StepRows:
    """The tensors from which a step reads its rows; all on the CPU, R rows.

    Attributes
    ----------
    tokens
        int32 [R, L], position -> token id; negative if not produced yet.
    block_tables
        int32 [groups, R, max_blocks], last dimension contiguous. Positions in a block with a
        negative number are not written.
    temperatures
        float64 [R], any stride; see `gumbel_argmax`.
    seeds
        int64 [R], any stride.
    vocab_size
        Token ids are below it.
    adapter_slots
        int32 [R], contiguous: the slot of each row's adapter; None for no adapters.
    """

    tokens: Tensor
    block_tables: Tensor
    temperatures: Tensor
    seeds: Tensor
    vocab_size: int
    adapter_slots: Tensor | None = None


class StepMixer(NamedTuple):
    """A layer's mixer as an instruction: a function of `step_mixers.cpp` and its constants.

    Attributes
    ----------
    function
        Name of the function's kind.
    record
        The struct that the function takes.
    holds
        What the struct points to.
    width
        Elements per token of the output.
    group
        Index of the group of layers whose block tables it uses; None: it uses none.
    block_size
        Tokens of a block of those tables.
    """

    function: str
    record: Record
    holds: tuple[Any, ...]
    width: int
    group: int | None = None
    block_size: int | None = None


def constants(kind: type[AnyRecord], **fields: int) -> AnyRecord:
    """A kernel's arguments of which only those are set that are the same in every step.

    Raises
    ------
    TypeError
        A field is not one of the record's.
    """
    if unknown := fields.keys() - kind.declared.keys():
        raise TypeError(f"{kind.__name__} has no {sorted(unknown)}")
    return kind(**fields)


def layer_spec(spec: AttentionSpec) -> Record:
    """A layer's `AttentionSpec` in the memory layout of the C++ side; keep it and `spec`.

    Raises
    ------
    ValueError
        Sinks are not contiguous in host memory.
    """
    return abi.AttentionSpec.of(spec)


class StepInstruction(NamedTuple):
    """One entry of a step's program; step tensors have numbers.

    Attributes
    ----------
    computes
        A compiled function, which takes the tensors that are read and returns those that are
        written; or a mixer.
    reads, writes
        Numbers of tensors.
    last_reads
        Those of `reads` that no later instruction reads.
    """

    computes: Bound | StepMixer
    reads: Sequence[int]
    writes: Sequence[int]
    last_reads: frozenset[int]


@dataclass(frozen=True)
class StepProgram:
    """From token ids (tensor 0), positions (1) and slots of adapters (2), int64 [T], to logits.

    Behind these come the model's own inputs, int64 [T] each.

    Attributes
    ----------
    instructions
        In order; at least one is a mixer that uses block tables.
    hidden
        Number of the hidden states' tensor, which the last instruction writes.
    kept
        Tensors that are read after the last mixer, except its own output. They are reduced to the
        rows of sampled tokens there, so their rows must be contiguous.
    head
        Takes hidden states [S, H] and returns float32 logits [S, V].
    dtype
        Of the model.
    deterministic
        As in `paged_attention`.
    own_inputs
        Numbers of the tensors of the model's own inputs.
    """

    instructions: Sequence[StepInstruction]
    hidden: int
    kept: frozenset[int]
    head: Bound
    dtype: torch.dtype
    deterministic: bool
    own_inputs: range = range(0)

    @property
    def mixers(self) -> list[StepMixer]:
        """All mixers, in order."""
        computed = (each.computes for each in self.instructions)
        return [one for one in computed if isinstance(one, StepMixer)]

    @property
    def calls(self) -> list[Bound]:
        """All compiled functions, in order; the last one is the head."""
        computed = (each.computes for each in self.instructions)
        return [*(one for one in computed if isinstance(one, Bound)), self.head]

    def fail(self, status: int) -> None:
        """Raise the error of a status; if compiled code failed, that function has the message."""
        for call in self.calls:
            if call.has_failed:
                call.fail(status)
        self.head.fail(status)


def takes_program(num_tensors: int, most_reads: int, most_writes: int) -> bool:
    """Whether a program with these numbers of tensors, reads and writes fits the C++ structs."""
    return num_tensors <= MAX_STEP_TENSORS and most_reads <= MAX_READS and most_writes <= MAX_WRITES


class MaskGate:
    """A step waits here for the masks of its rows before it samples. Any thread opens it, once."""

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
        """Address of the gate in the kernel library."""
        assert self._gate is not None
        return self._gate

    def open(self, masks: Tensor, rows: Sequence[int]) -> None:
        """Let the step go on.

        Parameters
        ----------
        masks
            int32 [R, W], contiguous; bit `v % 32` of word `v // 32` says that token v may be
            sampled. They must not change until the step has sampled.
        rows
            For each sampling row, its row of `masks`, or a negative number for no mask.
        """
        try:
            numbers = array("q", rows)
        except BaseException:
            self.fail()
            raise
        address, count = numbers.buffer_info()
        is_valid = masks.dtype == torch.int32 and masks.is_contiguous()
        # Invalid masks open the gate with 0 words: the step then fails instead of waiting forever.
        words = masks.shape[1] if is_valid and max(rows, default=-1) < len(masks) else 0
        status = self._caller.open_gate(self.address, masks.data_ptr(), words, address, count)
        if status:
            raise_status(status)

    def fail(self) -> None:
        """Make the step fail, because there are no masks."""
        self._caller.open_gate(self.address, None, 0, None, 0)


class CompiledStep:
    """A step from rows to tokens, in one call. One thread at a time may call it.

    Raises
    ------
    ValueError
        No mixer of the program uses block tables, or they differ in block size; or a group lacks
        block tables.
    """

    def __init__(self, caller: Caller, program: StepProgram, rows: StepRows) -> None:
        mixers = program.mixers
        groups = {each.group for each in mixers if each.group is not None}
        sizes = {each.block_size for each in mixers if each.block_size is not None}
        if not groups:
            raise ValueError("expected a program that attends")
        if len(sizes) != 1:
            raise ValueError("expected blocks of one length")
        if not all(0 <= group < len(rows.block_tables) for group in groups):
            raise ValueError("expected block tables for every group")
        self._step: Any = caller.step
        self._caller = caller
        self._program = program
        instructions = (Instruction * len(program.instructions))(
            *(_instruction(each, caller) for each in program.instructions)
        )
        # Keeps alive what the context points to.
        self._holds = (caller, program, rows, instructions)
        last = max(
            number
            for number, each in enumerate(program.instructions)
            if isinstance(each.computes, StepMixer)
        )
        self._context = StepContext(
            program=ctypes.addressof(instructions),
            head=program.head.address,
            tokens=rows.tokens.data_ptr(),
            block_tables=rows.block_tables.data_ptr(),
            temperatures=rows.temperatures.data_ptr(),
            seeds=rows.seeds.data_ptr(),
            adapter_slots=address_of_tensor(rows.adapter_slots),
            length=len(program.instructions),
            last_mixer=last,
            kept=_bits(program.kept),
            hidden=program.hidden,
            own_inputs=len(program.own_inputs),
            first_own=program.own_inputs.start,
            rows=len(rows.tokens),
            token_stride=rows.tokens.stride(0),
            groups=len(rows.block_tables),
            group_stride=rows.block_tables.stride(0),
            block_table_stride=rows.block_tables.stride(1),
            temperature_stride=rows.temperatures.stride(0),
            seed_stride=rows.seeds.stride(0),
            vocab_size=rows.vocab_size,
            block_size=sizes.pop(),
            mixed_width=max(each.width for each in mixers),
            dtype=DTYPES[program.dtype],
            torch_dtype=caller.dtype_codes[program.dtype],
            torch_index_dtype=caller.dtype_codes[torch.int64],
            threads=caller.num_threads,
            deterministic=program.deterministic,
        )

    def gate(self) -> MaskGate:
        """A gate for the masks of one step."""
        return MaskGate(self._caller)

    def draw(
        self,
        steps: Iterable[int],
        num_samples: int,
        gate: MaskGate | None = None,
        *,
        wants_hidden: bool = False,
        own: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute and sample by temperature and seed: token ids [S] int64, also stored in the rows.

        With them the hidden states [S, H] that they were sampled from, if wanted.

        Parameters
        ----------
        steps
            For each row in turn: row, first position, number of tokens, and after how many of the
            last ones a token is sampled: 0, 1, or more where the last ones are drafts; and whether
            it verifies drafts, see `paged_attention`.
        num_samples
            Number of sampled tokens.
        gate
            Provides the masks; the step waits for it once it has logits. None: no masks.
        wants_hidden
            Whether hidden states are wanted; of a step that samples nothing there are none.
        own
            The model's own inputs, contiguous int64 [own inputs, T]; None: zeros.

        Raises
        ------
        ValueError
            A row lacks tokens or blocks for the step, or the masks do not fit its rows.
        MemoryError
            A kernel lacks memory for intermediate results.
        CompiledCodeError
            Compiled code failed.
        """
        # Not `torch.empty`: it would release the GIL and have to wait for it again.
        token_ids = torch.from_numpy(np.empty(num_samples, dtype=np.int64))
        hidden = (ctypes.c_void_p * 1)() if wants_hidden and num_samples else None
        self._call(array("q", steps), 0, token_ids.data_ptr(), hidden, None, gate, own)
        return token_ids, None if hidden is None else stolen(hidden)[0]

    def compute(
        self,
        steps: Iterable[int],
        num_samples: int,
        *,
        wants_hidden: bool,
        own: np.ndarray | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute without sampling: hidden states [T, H], if wanted, and float32 logits [S, V].

        Other arguments and errors are those of `draw`.
        """
        hidden = (ctypes.c_void_p * 1)() if wants_hidden else None
        logits = (ctypes.c_void_p * 1)() if num_samples else None
        self._call(array("q", steps), 0, None, hidden, logits, own=own)
        return (
            None if hidden is None else stolen(hidden)[0],
            None if logits is None else stolen(logits)[0],
        )

    def try_out(self, num_tokens: int) -> Tensor:
        """Compute padding tokens, which belong to no row and are written nowhere: [T, H]."""
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
        own: np.ndarray | None = None,
    ) -> None:
        address, length = steps.buffer_info()
        if own is not None:
            expected = len(self._program.own_inputs), sum(steps[2::_NUMBERS_OF_ROW])
            if own.shape != expected or own.dtype != np.int64 or not own.flags.c_contiguous:
                raise ValueError(f"expected own inputs int64 {expected}, got {own.shape}")
        status = self._step(
            *(self._context, address, length // _NUMBERS_OF_ROW, padding),
            None if own is None else own.ctypes.data,
            *(None if gate is None else gate.address, token_ids, hidden, logits),
        )
        if status == COMPILED_FAILED:
            self._program.fail(status)
        if status:
            raise_status(status)


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


def _instruction(step: StepInstruction, caller: Caller) -> Instruction:
    computes = step.computes
    if isinstance(computes, Bound):
        run, record = caller.step_call, computes.address
    else:
        run, record = caller.step_function(computes.function), computes.record.address
    return Instruction(
        run=run,
        record=record,
        num_reads=len(step.reads),
        num_writes=len(step.writes),
        reads=(ctypes.c_int64 * MAX_READS)(*step.reads),
        writes=(ctypes.c_int64 * MAX_WRITES)(*step.writes),
        last_reads=_bits(
            place for place, number in enumerate(step.reads) if number in step.last_reads
        ),
    )
