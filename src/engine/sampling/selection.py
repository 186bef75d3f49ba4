"""The sampling parameters of one batch, gathered once and kept while the same rows sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from src.engine.devices.transfer import upload
from src.engine.sampling.logits import BadSequences, Penalties
from src.engine.sampling.processors import ProcessorGroup
from src.engine.sampling.state import (
    FREQUENCY,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TRUNCATION,
    RowParams,
    SamplingState,
)
from src.engine.sampling.truncation import Path, Truncation, path_of

_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class EntryIds:
    """Token ids of some entries: ``entries`` [n] and flat ``targets`` [m], int64 on the device."""

    entries: Tensor
    targets: Tensor


@dataclass(frozen=True)
class TruncatedRows:
    """Entries with one kind of truncation; ``entries`` [n] int64, or ``None`` for all."""

    entries: Tensor | None
    rows: Truncation
    apply: Path


class Selection:
    """The resolved sampling parameters of a batch's rows, in the batch's order.

    Attributes
    ----------
    seeds, temperatures
        [S] int64 and float32, on the device.
    allowed, banned, bias, bias_values, bad_sequences, penalties, truncated
        Changes that some entries ask for; ``None`` or empty if none does.
    penalized
        Entries with penalties, on the host.
    processed
        Logits processors and their rows, in the order in which they are applied.
    end_bans
        (entry, first position at which end tokens may be chosen, their ids on the device).
    scored, top_counts
        Entries that want log-probabilities, on the host, and how many of the likeliest tokens;
        ``scored_entries`` [n] int64 is the same on the device, ``None`` for the whole batch.
    changes_logits
        Whether anything but the end bans may change the logits.
    """

    def __init__(self, state: SamplingState, rows: Sequence[int]) -> None:
        self._state = state
        params = state.params(rows)
        rows_s = self._upload(rows)
        floats, ints = state.gather(rows_s)
        self.seeds = ints[:, SEED].contiguous()
        self.temperatures = floats[:, TEMPERATURE].float()

        self.allowed = self._entry_ids(
            [(entry, row.allowed_ids) for entry, row in enumerate(params)]
        )
        self.banned = self._entry_ids([(entry, row.banned_ids) for entry, row in enumerate(params)])
        self.bias = self._entry_ids([(entry, row.bias_ids) for entry, row in enumerate(params)])
        self.bias_values = (
            torch.cat([row.bias_values for row in params if row.bias_values is not None])
            if self.bias
            else None
        )
        self.bad_sequences = self._bad_sequences(params, rows)
        self.end_bans = [
            (entry, row.first_end_position, row.end_ids)
            for entry, row in enumerate(params)
            if row.end_ids is not None
        ]
        self._end_ban_key: tuple[int, ...] = ()
        self._end_ban: EntryIds | None = None
        self.penalized = [entry for entry, row in enumerate(params) if row.penalizes]
        self.penalties = self._penalties(params, rows_s, floats)
        self.processed = self._processed(params, rows)
        self.truncated = self._truncated(params, floats, ints)
        self.changes_logits = any(
            part is not None
            for part in (self.allowed, self.banned, self.bias, self.bad_sequences, self.penalties)
        ) or bool(self.truncated or self.processed)

        self.scored = [entry for entry, row in enumerate(params) if row.logprobs is not None]
        self.top_counts = [params[entry].logprobs or 0 for entry in self.scored]
        self.scored_entries = self._some(self.scored, len(params))

    def end_ban(self, positions: Sequence[int]) -> EntryIds | None:
        """End tokens that may not be chosen at these positions (host, one per entry)."""
        active = tuple(
            entry for entry, first_position, _ in self.end_bans if positions[entry] < first_position
        )
        if active != self._end_ban_key:
            self._end_ban_key = active
            self._end_ban = self._entry_ids(
                [(entry, ids) for entry, _, ids in self.end_bans if entry in active]
            )
        return self._end_ban

    def _upload(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return upload(values, torch.int64, self._state.device)

    def _some(self, entries: list[int], total: int) -> Tensor | None:
        return None if len(entries) in (0, total) else self._upload(entries)

    def _entry_ids(self, asked: list[tuple[int, Tensor | None]]) -> EntryIds | None:
        given = [(entry, ids) for entry, ids in asked if ids is not None]
        if not given:
            return None
        width = self._state.vocab_size
        targets = torch.cat([ids + entry * width for entry, ids in given])
        return EntryIds(self._upload([entry for entry, _ in given]), targets)

    def _bad_sequences(self, params: list[RowParams], rows: Sequence[int]) -> BadSequences | None:
        width = self._state.vocab_size
        asking = [(entry, row.bad_words) for entry, row in enumerate(params) if row.bad_words]
        if not asking:
            return None
        longest = max(words.prefixes.shape[1] for _, words in asking)
        prefixes = torch.cat(
            [
                pad(words.prefixes, (longest - words.prefixes.shape[1], 0), value=-1)
                for _, words in asking
            ]
        )
        entries = [entry for entry, _ in asking]
        # [3, n] int64: what BadSequences names
        packed = self._upload(
            [rows[entry] for entry in entries]
            + entries
            + [params[entry].prompt_len for entry in entries]
        ).view(3, -1)
        counts = [len(words.last) for _, words in asking]
        return BadSequences(
            prefixes,
            prefixes < 0,
            torch.cat([words.last + entry * width for entry, words in asking]),
            self._upload(np.repeat(np.arange(len(counts)), counts)),
            *packed,
        )

    def _penalties(
        self, params: list[RowParams], rows_s: Tensor, floats: Tensor
    ) -> Penalties | None:
        if not self.penalized:
            return None
        packed = self._upload(
            self.penalized + [params[entry].prompt_len for entry in self.penalized]
        ).view(2, -1)
        entries, prompt_lens = packed
        numbers = floats[entries].float()
        # Any penalty over 0 is valid. In float32 it must not become 0 or inf, whose products with
        # inf and 0 are NaN.
        repetition = numbers[:, REPETITION, None].clamp(_SMALLEST, _LARGEST)
        return Penalties(
            entries=entries,
            rows=rows_s[entries],
            prompt_lens=prompt_lens,
            presence=numbers[:, PRESENCE, None],
            frequency=numbers[:, FREQUENCY, None],
            repetition=repetition,
            counts_output=any(params[entry].counts_output for entry in self.penalized),
        )

    def _processed(self, params: list[RowParams], rows: Sequence[int]) -> list[ProcessorGroup]:
        """Batches per processor; a row that names several gets them in the order of its request."""
        groups: list[ProcessorGroup] = []
        for turn in range(max(len(row.processors) for row in params) if params else 0):
            asking: dict[str, list[int]] = {}
            for entry, row in enumerate(params):
                if turn < len(row.processors):
                    asking.setdefault(row.processors[turn][0].name, []).append(entry)
            for entries in asking.values():
                named = [params[entry].processors[turn] for entry in entries]
                # Each is [n] int64.
                entries_s, rows_s, prompt_lens_s = self._upload(
                    entries
                    + [rows[entry] for entry in entries]
                    + [params[entry].prompt_len for entry in entries]
                ).view(3, -1)
                arguments = [given for _, given in named]
                of_row = {rows[entry]: place for place, entry in reversed([*enumerate(entries)])}
                firsts = sorted(of_row.values())
                groups.append(
                    ProcessorGroup(
                        named[0][0], arguments, entries, entries_s, rows_s, prompt_lens_s, firsts
                    )
                )
        return groups

    def _truncated(
        self, params: list[RowParams], floats: Tensor, ints: Tensor
    ) -> list[TruncatedRows]:
        paths: dict[Path, list[int]] = {}
        for entry, row in enumerate(params):
            path = path_of(row.top_k, row.truncation)
            if path is not None:
                paths.setdefault(path, []).append(entry)
        truncated = []
        for path, entries in paths.items():
            some = self._some(entries, len(params))
            numbers, integers = (floats, ints) if some is None else (floats[some], ints[some])
            rows = Truncation.of(
                numbers[:, TEMPERATURE].float(),
                integers[:, TOP_K],
                numbers[:, TRUNCATION],
                [(params[entry].top_k, params[entry].truncation) for entry in entries],
            )
            truncated.append(TruncatedRows(some, rows, path))
        return truncated
