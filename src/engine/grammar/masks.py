"""Token masks of rows, one bit per token: grammars combined with requests' other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from src.core.plan import RowFailure
from src.core.step_message import DeviceRequest
from src.engine.devices.transfer import upload
from src.engine.sampling.per_params import PerParams
from src.ops.build.kernels import kernel_library

_BITS = 32
# Constraints of a request besides its grammar; the kernel library's values (abi.h): none, some, or
# some with `ignore_eos`.
_UNCONSTRAINED, _ALLOWED_TOKENS, _MAY_NOT_END = range(3)


# [256, 8] float32: byte of a mask -> the values to add to the logits of its eight tokens.
_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


@dataclass(frozen=True)
class RowMasks:
    """The masks of one batch. They are valid until the batch's tokens are followed.

    Attributes
    ----------
    table
        [R, W] int32 on the host: bit ``v % 32`` of word ``v // 32`` is set if token ``v`` may be
        sampled.
    rows
        Per entry of the batch: its row of ``table``; -1 if it is unconstrained.
    added
        [S, V] float32, the masks as values to add to logits on the CPU, if that was asked for.
    failures
        Of rows whose grammar cannot go on. These are unconstrained.
    forced
        Entries that have one token to choose, whatever else their requests want.
    """

    table: Tensor
    rows: Sequence[int]
    added: np.ndarray | None
    failures: Sequence[RowFailure]
    forced: Sequence[int] = ()

    def to(self, device: torch.device, vocab_size: int) -> Tensor:
        """[S, V] float32 on the device: 0 for allowed tokens, -inf for others."""
        if self.added is not None:
            return torch.from_numpy(self.added)
        # Uploaded as one bit per token.
        packed = packed_masks(self.table.numpy(), self.rows).view(np.uint8)
        return unpacked(upload(packed, torch.uint8, device), vocab_size)


class MaskTable:
    """The masks of all rows, restricted by the requests' other parameters.

    End tokens are in a grammar's mask where the output may end. With ``ignore_eos`` they stay only
    if no other token is allowed. If ``allowed_token_ids`` excludes all other tokens, an output that
    may end gets its end tokens back.

    Parameters
    ----------
    max_num_rows
        R, rows.
    vocab_size
        V, width of the logits.

    Attributes
    ----------
    vocab_size
        V, as given.
    table, masks
        [R, W] int32, see `RowMasks`; the same memory as a tensor and as an array.
    """

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        shape = (max_num_rows, -(-vocab_size // _BITS))
        self.table = torch.zeros(shape, dtype=torch.int32)
        self.masks: np.ndarray = self.table.numpy()
        # [R, W] int32: tokens that end the output, and allowed tokens.
        self._ends = np.zeros(shape, np.int32)
        self._allowed = np.zeros(shape, np.int32)
        # [R] uint8: `_UNCONSTRAINED`, or what of the above counts.
        self._constraints = np.zeros(max_num_rows, np.uint8)
        self._packed_allowed = PerParams(lambda p: self._packed(p.allowed_token_ids or ()))
        self._compiled: Callable[[Sequence[int]], Sequence[int] | None] | None = None

    def install(self, row: int, request: DeviceRequest) -> None:
        """Give ``row`` to a request."""
        params = request.params
        self._ends[row] = self._packed(request.end_token_ids)
        # The model's own end tokens are in the grammar's masks already.
        if not (params.ignore_eos or params.allowed_token_ids or params.stop_token_ids):
            self._constraints[row] = _UNCONSTRAINED
            return
        self._constraints[row] = _MAY_NOT_END if params.ignore_eos else _ALLOWED_TOKENS
        is_free = params.allowed_token_ids is None
        self._allowed[row] = -1 if is_free else self._packed_allowed(params)

    def force(self, row: int, token_id: int) -> None:
        """``row`` may sample this token and no other."""
        self.masks[row] = self.only(token_id)

    def only(self, token_id: int) -> np.ndarray:
        """The mask of this token and no other, [W] int32."""
        mask = np.zeros(self.masks.shape[1], np.int32)
        # The highest bit is the sign.
        mask[token_id // _BITS] = np.uint32(1 << token_id % _BITS).astype(np.int32)
        return mask

    def allows(self, row: int, token_id: int) -> bool:
        """Whether ``row`` may sample this token."""
        return bool(self.masks[row, token_id // _BITS] >> token_id % _BITS & 1)

    def check_size(self, vocab_size: int) -> None:
        """Raise ValueError unless ``vocab_size`` is the width of these masks."""
        if vocab_size != self.vocab_size:
            raise ValueError(f"expected masks of {self.vocab_size} tokens, got {vocab_size}")

    def ends(self, row: int, token_id: int) -> bool:
        """Whether a token ends the output of a row."""
        return bool(self._ends[row, token_id // _BITS] >> token_id % _BITS & 1)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Masks, end tokens, allowed tokens and kinds of constraints, for the kernel library."""
        return self.masks, self._ends, self._allowed, self._constraints

    def restrict(self, rows: Sequence[int]) -> Sequence[int] | None:
        """Restrict the masks of these rows by their requests' other parameters, in place.

        Returns per row whether its mask allows any token; ``None`` if all of them do.
        """
        library = kernel_library()
        if library is None:
            return self.restrict_by_numpy(rows)
        if self._compiled is None:
            self._compiled = library.bind_masks(*self.arrays)
        return self._compiled(rows)

    def restrict_by_numpy(self, rows: Sequence[int]) -> Sequence[int] | None:
        """Like `restrict`, without the kernel library."""
        chosen = [row for row in rows if self._constraints[row] != _UNCONSTRAINED]
        given, ends, allowed = self.masks[chosen], self._ends[chosen], self._allowed[chosen]
        may_end = (given & ends).any(1, keepdims=True)
        others = given & ~ends & allowed
        # If other tokens are allowed: no end tokens with `ignore_eos`, else the allowed end tokens.
        kept = np.where(self._constraints[chosen, None] == _MAY_NOT_END, 0, allowed)
        ends &= np.where(others.any(1, keepdims=True), kept, -1)
        self.masks[chosen] = others | np.where(may_end, ends, 0)
        possible: np.ndarray = np.any(self.masks[list(rows)], axis=1)
        return None if bool(possible.all()) else possible.tolist()

    def added(self, rows: Sequence[int]) -> np.ndarray:
        """See `RowMasks`."""
        return added_masks(packed_masks(self.masks, rows), self.vocab_size)

    def _packed(self, token_ids: Iterable[int]) -> np.ndarray:
        """[W] int32: a bit for each token."""
        bits = np.zeros(self.masks.shape[1] * _BITS, np.uint8)
        bits[[token_id for token_id in token_ids if token_id < self.vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def packed_masks(table: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """[S, W] int32: rows of a table, and all ones for -1."""
    packed: np.ndarray = table[list(rows)]
    packed[[entry for entry, row in enumerate(rows) if row < 0]] = -1
    return packed


def added_masks(packed: np.ndarray, vocab_size: int) -> np.ndarray:
    """[S, V] float32, 0 for a bit and -inf for none, from [S, W] int32, lowest bits first."""
    # Many times faster than indexing.
    added = np.take(_ADDENDS, packed.view(np.uint8), axis=0)  # [S, 4 W, 8]
    return added.reshape(len(packed), -1)[:, :vocab_size]


def unpacked(packed: Tensor, vocab_size: int) -> Tensor:
    """Like `added_masks` on any device, from [S, B] uint8."""
    # Not made from a list, because on CUDA that is a copy from the host, which waits.
    weights = torch.ones(8, dtype=torch.uint8, device=packed.device)
    weights = weights << torch.arange(8, dtype=torch.uint8, device=packed.device)
    barred = ((packed[:, :, None] & weights) == 0).flatten(1)[:, :vocab_size]
    return torch.zeros(barred.shape, device=packed.device).masked_fill_(barred, -torch.inf)
