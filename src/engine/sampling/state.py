"""Sampling parameters of every row: flags and lengths on the host, numbers on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from src.core.logits_processors import typed_arguments
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.devices import transfer
from src.engine.devices.transfer import upload
from src.engine.sampling.logits import BadWords
from src.engine.sampling.per_params import PerParams
from src.engine.sampling.processors import LogitsProcessor, Processors
from src.engine.sampling.truncation import OFF, numbers_of

# Columns of the device tables.
TEMPERATURE, PRESENCE, FREQUENCY, REPETITION = range(4)
# The others are those of truncation.COLUMNS.
TRUNCATION = slice(4, 4 + len(OFF))
_NUM_FLOATS = TRUNCATION.stop
SEED, TOP_K = range(2)

_NOBODY = DeviceRequest(key=-1, prompt_len=0, params=SamplingParams(temperature=0.0))


@dataclass(frozen=True)
class RowParams:
    """One request's parameters, resolved for the sampler.

    Attributes
    ----------
    temperature
        0 for greedy.
    top_k
        0 when off: not asked for, at least the vocabulary's size, or greedy.
    truncation
        The numbers of `truncation.COLUMNS`.
    first_end_position
        End tokens are banned at positions below this one.
    end_ids, allowed_ids, banned_ids, bias_ids, bias_values
        On the device, [*] int64 and [*] float32 (values), or ``None``. ``banned_ids`` are bad words
        of one token.
    bad_words
        Bad words of two tokens or more, on the device.
    processors
        Logits processors and their arguments, in the request's order.
    logprobs
        Number of likeliest tokens to report beside the chosen one; ``None``: no report.
    """

    prompt_len: int
    seed: int
    temperature: float
    top_k: int
    truncation: tuple[float, ...]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    first_end_position: int
    end_ids: Tensor | None
    allowed_ids: Tensor | None
    banned_ids: Tensor | None
    bias_ids: Tensor | None
    bias_values: Tensor | None
    bad_words: BadWords | None
    processors: Sequence[tuple[LogitsProcessor[Any], Any]]
    logprobs: int | None

    @property
    def counts_output(self) -> bool:
        """Whether penalties need the tokens of the output."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def penalizes(self) -> bool:
        """Whether any penalty is on."""
        return self.counts_output or self.repetition_penalty != 1.0

    def goes_by_positions(self, least: int) -> bool:
        """Whether the host must know the positions that are sampled, from ``least`` on."""
        is_banned = self.end_ids is not None and least < self.first_end_position
        return is_banned or bool(self.processors)

    @property
    def only_draws(self) -> bool:
        """Whether it needs no more than a temperature and a seed, apart from `min_tokens`."""
        ids = (self.allowed_ids, self.banned_ids, self.bias_ids)
        truncates = self.top_k != 0 or self.truncation != OFF
        return (
            not truncates
            and not self.penalizes
            and self.bad_words is None
            and not self.processors
            and self.logprobs is None
            and all(each is None for each in ids)
        )


class SamplingState:
    """Per-row sampling parameters, one slot per row, and on the device one more for padding.

    Everything that the host needs for its decisions is kept on the host, so that it never reads
    from the device. Device writes are staged, and flushed by the next gather, on the step's stream.

    Parameters
    ----------
    max_num_rows
        Number of rows, ``max_num_seqs``.
    vocab_size
        Width of the logits.
    processors
        The logits processors that requests may name.
    """

    def __init__(
        self,
        max_num_rows: int,
        vocab_size: int,
        device: torch.device,
        processors: Processors | None = None,
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self._params: list[RowParams | None] = [None] * max_num_rows
        # Row -> its numbers in the device tables, float64 [F] and int64 [2].
        self._staged: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # Cached, because there may be as many ids as the vocabulary has.
        self._allowed_ids = PerParams(lambda params: self._ids(params.allowed_token_ids or ()))
        # Cached, because there may be thousands of tokens, which all completions of a prompt share.
        self._bad_words = PerParams(self._resolve_bad_words)
        self._known_processors = processors or {}
        self._processors = PerParams(self._resolve_processors)
        self._version = 0
        # [max_num_rows + 1, F] float64: row -> the columns named above; padding is greedy
        self._floats = torch.full(
            (max_num_rows + 1, _NUM_FLOATS), math.nan, dtype=torch.float64, device=device
        )
        self._floats[max_num_rows].zero_()
        # [max_num_rows + 1, 2] int64: row -> the columns named above
        self._ints = torch.zeros((max_num_rows + 1, 2), dtype=torch.int64, device=device)
        floats, ints = transfer.host_view(self._floats), transfer.host_view(self._ints)
        self._host = None if floats is None or ints is None else (floats, ints)

    @property
    def version(self) -> int:
        """Grows whenever a row gets new parameters."""
        return self._version

    def install(self, row: int, request: DeviceRequest, prompt_len: int) -> None:
        """Give ``row`` to ``request``; nothing of its former owner remains.

        ``prompt_len`` is in tokens, without output tokens of a resumed request.
        """
        self._put(row, self._resolve(request, prompt_len))

    def neutralize(self, row: int) -> None:
        """Make ``row`` greedy, without any other parameter, until it is installed again.

        For a row whose request could not be installed, since steps in flight still name it.
        """
        self._put(row, self._resolve(_NOBODY, 0))

    def vacate(self, row: int) -> None:
        """Drop the parameters of ``row``. No step may name it until it is installed again."""
        self._params[row] = None
        self._staged.pop(row, None)

    def _put(self, row: int, params: RowParams) -> None:
        # A value that does not fit the table's dtype fails here, for this row only, not in `flush`.
        numbers = _numbers(params)
        self._params[row] = params
        self._staged[row] = numbers
        self._version += 1

    def params(self, rows: Sequence[int]) -> list[RowParams]:
        """Parameters of each row.

        Raises
        ------
        LookupError
            A row was never installed.
        """
        found = []
        for row in rows:
            params = self._params[row]
            if params is None:
                raise LookupError(f"row {row} samples, but no request was installed in it")
            found.append(params)
        return found

    def gather(self, rows_s: Tensor) -> tuple[Tensor, Tensor]:
        """Device numbers of the rows ``rows_s`` [S] int64: [S, F] float64 and [S, 2] int64."""
        self.flush()
        return self._floats[rows_s], self._ints[rows_s]

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The device tables that `gather` reads: float64 [R + 1, F] and int64 [R + 1, 2]."""
        return self._floats, self._ints

    def flush(self) -> None:
        """Write staged rows to the device, so that `gather` has nothing to write."""
        if not self._staged:
            return
        floats, ints = zip(*self._staged.values(), strict=True)
        self._write(list(self._staged), np.stack(floats), np.stack(ints))
        self._staged = {}

    def _write(self, rows: list[int], floats: np.ndarray, ints: np.ndarray) -> None:
        if self._host is not None:
            host_floats, host_ints = self._host
            host_floats[rows], host_ints[rows] = floats, ints
            return
        rows_s = upload(rows, torch.int64, self.device)
        self._floats[rows_s] = upload(floats, torch.float64, self.device)
        self._ints[rows_s] = upload(ints, torch.int64, self.device)

    def _resolve(self, request: DeviceRequest, prompt_len: int) -> RowParams:
        params = request.params
        samples = not params.is_greedy
        # Ids outside of the logits are ignored.
        bias = {
            token_id: value
            for token_id, value in (params.logit_bias or {}).items()
            if 0 <= token_id < self.vocab_size
        }
        bad_words = request.bad_words_token_ids
        banned_ids, longer = self._bad_words(params, bad_words) if bad_words else (None, None)
        return RowParams(
            prompt_len=prompt_len,
            seed=request.seed,
            temperature=params.temperature if samples else 0.0,
            top_k=params.top_k if samples and 0 < params.top_k < self.vocab_size else 0,
            truncation=numbers_of(params),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            first_end_position=prompt_len + params.min_tokens,
            # Sorted, because the order of a set is not deterministic.
            end_ids=self._ids(sorted(request.end_token_ids)) if params.min_tokens else None,
            # With a grammar these are in its masks already, which know where the output may end.
            allowed_ids=self._allowed_ids(params)
            if params.allowed_token_ids and request.grammar is None
            else None,
            banned_ids=banned_ids,
            bias_ids=self._ids(bias),
            bias_values=self._values(bias.values()),
            bad_words=longer,
            processors=self._processors(params) if params.logits_processors else (),
            logprobs=params.logprobs,
        )

    def _ids(self, ids: Iterable[int]) -> Tensor | None:
        # A model may have end tokens that are outside of its logits.
        inside = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return upload(inside, torch.int64, self.device) if inside else None

    def _resolve_processors(
        self, params: SamplingParams
    ) -> Sequence[tuple[LogitsProcessor[Any], Any]]:
        named = [(self._known_processors[call.name], call) for call in params.logits_processors]
        return [(processor, typed_arguments(call, processor)) for processor, call in named]

    def _resolve_bad_words(
        self, params: SamplingParams, given: Sequence[tuple[int, ...]]
    ) -> tuple[Tensor | None, BadWords | None]:
        """Ids of bad words of one token, and the longer ones."""
        # Empty and repeated words have no effect.
        words = [word for word in dict.fromkeys(given) if word]
        single = self._ids(word[0] for word in words if len(word) == 1)
        longer = [word for word in words if len(word) > 1 and 0 <= word[-1] < self.vocab_size]
        if not longer:
            return single, None
        prefixes = np.full((len(longer), max(map(len, longer)) - 1), -1, np.int32)
        for prefix, word in zip(prefixes, longer, strict=True):
            prefix[1 - len(word) :] = word[:-1]
        last = upload([word[-1] for word in longer], torch.int64, self.device)
        return single, BadWords(upload(prefixes, torch.int32, self.device), last)

    def _values(self, values: Iterable[float]) -> Tensor | None:
        array = np.fromiter(values, np.float32)
        return upload(array, torch.float32, self.device) if len(array) else None


def _numbers(params: RowParams) -> tuple[np.ndarray, np.ndarray]:
    """Columns of the device tables, in their order: float64 [F] and int64 [2]."""
    floats = (
        params.temperature,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        *params.truncation,
    )
    return np.array(floats, np.float64), np.array((params.seed, params.top_k), np.int64)
