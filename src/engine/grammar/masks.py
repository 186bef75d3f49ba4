"""What rows may sample, a bit per token: what grammars allow, and what requests want besides."""

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
from src.ops.cpu.build import kernel_library

_BITS = 32
# What a request wants besides its grammar, as numbers of the kernel library (abi.h).
_NO_WISH, _HAS_WISH, _GOES_ON = range(3)


# [256, 8] float32: what is added to the logits of eight tokens by the bits of their byte.
_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


@dataclass(frozen=True)
class RowMasks:
    """What one batch may sample. It holds until its tokens are followed.

    Attributes
    ----------
    table
        [R, W] int32 on the host: bit ``v % 32`` of word ``v // 32`` says that token ``v`` may be
        sampled.
    rows
        Of each entry of the batch, its row of ``table``; -1 where it may sample anything.
    added
        [S, V] float32, the same to be added to logits on the CPU, if that was asked for.
    failures
        Of rows whose grammar cannot go on; they may sample anything.
    forced
        Entries that have one token to choose, whatever else their requests want.
    """

    table: Tensor
    rows: Sequence[int]
    added: np.ndarray | None
    failures: Sequence[RowFailure]
    forced: Sequence[int] = ()

    def to(self, device: torch.device, vocab_size: int) -> Tensor:
        """[S, V] float32 on the device: 0 for what may be sampled, -inf for what may not."""
        if self.added is not None:
            return torch.from_numpy(self.added)
        # A bit per token on the way.
        packed = packed_masks(self.table.numpy(), self.rows).view(np.uint8)
        return unpacked(upload(packed, torch.uint8, device), vocab_size)


class MaskTable:
    """The masks of all rows, and what brings their requests' other wishes into them.

    End tokens are in a grammar's mask where the output may end. With ``ignore_eos`` they are left
    only where nothing else is; where ``allowed_token_ids`` leaves nothing, an output that may end
    ends.

    Parameters
    ----------
    max_num_rows
        R, rows.
    vocab_size
        V, width of the logits.

    Attributes
    ----------
    table, masks
        [R, W] int32, as of :class:`RowMasks`; one memory, seen as a tensor and as an array.
    """

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        shape = (max_num_rows, -(-vocab_size // _BITS))
        self.table = torch.zeros(shape, dtype=torch.int32)
        self.masks: np.ndarray = self.table.numpy()
        # [R, W] int32 and [R] uint8: tokens that end the output, and that it may consist of.
        self._ends = np.zeros(shape, np.int32)
        self._allowed = np.zeros(shape, np.int32)
        self._wishes = np.zeros(max_num_rows, np.uint8)
        self._packed_allowed = PerParams(lambda p: self._packed(p.allowed_token_ids or ()))
        self._compiled: Callable[[Sequence[int]], Sequence[int] | None] | None = None

    def install(self, row: int, request: DeviceRequest) -> None:
        """``row`` is this request's from now on."""
        params = request.params
        self._ends[row] = self._packed(request.end_token_ids)
        # The model's own end tokens are in the grammar's masks already.
        if not (params.ignore_eos or params.allowed_token_ids or params.stop_token_ids):
            self._wishes[row] = _NO_WISH
            return
        self._wishes[row] = _GOES_ON if params.ignore_eos else _HAS_WISH
        is_free = params.allowed_token_ids is None
        self._allowed[row] = -1 if is_free else self._packed_allowed(params)

    def force(self, row: int, token_id: int) -> None:
        """``row`` may sample this token and no other."""
        mask = self.masks[row]
        mask.fill(0)
        # The highest bit is the sign.
        mask[token_id // _BITS] = np.uint32(1 << token_id % _BITS).astype(np.int32)

    def check_size(self, vocab_size: int) -> None:
        """Raise ValueError unless masks of so many tokens fit."""
        if vocab_size != self._vocab_size:
            raise ValueError(f"expected masks of {self._vocab_size} tokens, got {vocab_size}")

    def ends(self, row: int, token_id: int) -> bool:
        """Whether a token ends the output of a row."""
        return bool(self._ends[row, token_id // _BITS] >> token_id % _BITS & 1)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Masks, ends, allowed and wishes, as the kernel library wants them."""
        return self.masks, self._ends, self._allowed, self._wishes

    def restrict(self, rows: Sequence[int]) -> Sequence[int] | None:
        """Bring the wishes of these rows into their masks, in place.

        Returns whether anything is possible, of each; ``None`` if something is in all of them.
        """
        library = kernel_library()
        if library is None:
            return self.restrict_by_numpy(rows)
        if self._compiled is None:
            self._compiled = library.bind_masks(*self.arrays)
        return self._compiled(rows)

    def restrict_by_numpy(self, rows: Sequence[int]) -> Sequence[int] | None:
        """The same without a compiler."""
        chosen = [row for row in rows if self._wishes[row] != _NO_WISH]
        given, ends, allowed = self.masks[chosen], self._ends[chosen], self._allowed[chosen]
        may_end = (given & ends).any(1, keepdims=True)
        others = given & ~ends & allowed
        # Where there is something else: no end at all, or those that are allowed themselves.
        kept = np.where(self._wishes[chosen, None] == _GOES_ON, 0, allowed)
        ends &= np.where(others.any(1, keepdims=True), kept, -1)
        self.masks[chosen] = others | np.where(may_end, ends, 0)
        possible: np.ndarray = np.any(self.masks[list(rows)], axis=1)
        return None if bool(possible.all()) else possible.tolist()

    def added(self, rows: Sequence[int]) -> np.ndarray:
        """See :class:`RowMasks`."""
        return added_masks(packed_masks(self.masks, rows), self._vocab_size)

    def _packed(self, token_ids: Iterable[int]) -> np.ndarray:
        """[W] int32: a bit for each token."""
        bits = np.zeros(self.masks.shape[1] * _BITS, np.uint8)
        bits[[token_id for token_id in token_ids if token_id < self._vocab_size]] = 1
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
    """The same on any device, from [S, B] uint8."""
    # Not from a list: on CUDA that copies it from the host, and waits.
    weights = torch.ones(8, dtype=torch.uint8, device=packed.device)
    weights = weights << torch.arange(8, dtype=torch.uint8, device=packed.device)
    barred = ((packed[:, :, None] & weights) == 0).flatten(1)[:, :vocab_size]
    return torch.zeros(barred.shape, device=packed.device).masked_fill_(barred, -torch.inf)
