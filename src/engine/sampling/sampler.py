"""From raw logits to one token per row, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from src.core.outputs import TokenLogprobs
from src.engine.devices.transfer import upload
from src.engine.sampling.logits import add_bias, ban, ban_completions, keep_only, penalize
from src.engine.sampling.logprobs import LogprobTensors, gather_logprobs
from src.engine.sampling.selection import Selection
from src.engine.sampling.state import SEED, TEMPERATURE, SamplingState
from src.ops import gumbel_argmax
from src.ops.sampling.gumbel_argmax import NO_TOKEN, sound_rows


@dataclass(frozen=True)
class SampleBatch:
    """What is sampled in one step.

    Attributes
    ----------
    rows
        [S] row of each entry. A row that verifies drafts has several, at positions in order.
    positions
        [S] position in its sequence of the token to be sampled; ``prompt_len`` for the first one.
    positions_s
        [S] int64, the same on the device, if the caller has it there already.
    mask
        [S, V] float32 on the device, to be added: 0, or -inf for what may never be chosen.
    forced
        Entries for which the mask allows one token, which is chosen whatever they ask for.
    guesses
        Whether the tokens are guesses of what a row says, of logits that are not the model's. Then
        no request ends where none can be drawn.
    """

    rows: Sequence[int]
    positions: Sequence[int]
    positions_s: Tensor | None = None
    mask: Tensor | None = None
    forced: Sequence[int] = ()
    guesses: bool = False


@dataclass(frozen=True)
class SampleOutput:
    """Tokens of one step, on the device until `to_host`.

    Attributes
    ----------
    token_ids
        [S] int64, in the batch's order; -1 where the logits allow no choice.
    logprobs
        Of the entries ``scored``, if there are any.
    scored, top_counts
        Entries that asked for log-probabilities, and for how many of the likeliest tokens.
    """

    token_ids: Tensor
    logprobs: LogprobTensors | None
    scored: Sequence[int]
    top_counts: Sequence[int]

    def to_host(self) -> SampleOutput:
        """Start the copy to (pinned) host memory; on CUDA it is complete after a later event."""
        return replace(
            self,
            token_ids=self.token_ids.to("cpu", non_blocking=True),
            logprobs=self.logprobs.to_host() if self.logprobs else None,
        )

    def logprob_lists(self) -> list[TokenLogprobs | None]:
        """One entry per sampled token, ``None`` where not asked for; after the copy-out."""
        lists: list[TokenLogprobs | None] = [None] * len(self.token_ids)
        if self.logprobs is not None:
            scores = self.logprobs.to_lists(self.top_counts)
            for entry, score in zip(self.scored, scores, strict=True):
                lists[entry] = score
        return lists


class Sampler:
    """Applies every sampling parameter, in a fixed order, and draws.

    The order: raw log-probabilities; the grammar's masks; allowed_token_ids; bad_words; min_tokens;
    logit_bias; repetition, frequency and presence penalties; logits processors; tokens that must
    come; temperature; top_n_sigma; min_p; top_k; typical_p; top_p; Gumbel-max. See
    docs/sampling.md.

    Nothing is carried from one call to the next but what the state's rows hold, so a row's token is
    a function of its logits, its tokens, its parameters and its position.
    """

    def __init__(self, state: SamplingState) -> None:
        self.state = state
        self._selection: Selection | None = None
        self._key: tuple[int, list[int]] | None = None
        # Of the last batch given to `only_draws`: whether its rows need no more than a draw as soon
        # as end tokens are allowed, and (entry, first position at which they are allowed).
        self._draws = False
        self._end_positions: list[tuple[int, int]] = []
        self._draws_key: tuple[int, list[int]] | None = None

    def vacate(self, row: int) -> None:
        """Drop the row's parameters. No step may name the row until it is installed again."""
        self.state.vacate(row)
        if self._key is not None and row in self._key[1]:
            self._selection = self._key = None

    def only_draws(self, batch: SampleBatch) -> bool:
        """Whether `draw` is enough for these rows."""
        key = (self.state.version, list(batch.rows))
        if self._draws_key != key:
            params = self.state.params(batch.rows)
            self._draws = all(row.only_draws for row in params)
            self._end_positions = [
                (entry, row.first_end_position)
                for entry, row in enumerate(params)
                if row.end_ids is not None
            ]
            self._draws_key = key
        return (
            self._draws
            and batch.mask is None
            and all(batch.positions[entry] >= first for entry, first in self._end_positions)
        )

    def draw(self, logits: Tensor, rows_s: Tensor, positions_s: Tensor) -> Tensor:
        """Draw one token id per entry, [S] int64, by temperature and seed only.

        Once the state is flushed it needs nothing from the host, so it can be captured.

        Parameters
        ----------
        logits
            [S, V] float32, not changed.
        rows_s, positions_s
            [S] int64: row, and position of the token to be sampled.
        """
        self.state.flush()
        floats, ints = self.state.tables
        temperatures = floats[:, TEMPERATURE][rows_s].float()
        return gumbel_argmax(logits, ints[:, SEED][rows_s], positions_s, temperatures)

    def sample(self, logits: Tensor, batch: SampleBatch, tokens: Tensor) -> SampleOutput:
        """Choose one token per entry of the batch. Does not synchronize with the device.

        A row gives -1 if its logits are invalid (a NaN, a +inf, or only -inf), or if its parameters
        leave no logit above -inf. Its request cannot go on.

        Parameters
        ----------
        logits
            [S, V] float32, contiguous; overwritten if a row asks for more than a temperature.
        tokens
            [max_num_rows, max_model_len] int32: (row, position) -> token id, valid below the
            position to be sampled.
        """
        selection = self._select(batch.rows)
        positions_s = batch.positions_s
        if positions_s is None:
            positions_s = upload(batch.positions, torch.int64, self.state.device)
        end_ban = selection.end_ban(batch.positions) if selection.end_bans else None

        # Checked here, because the changes below may hide NaN and inf from `gumbel_argmax`.
        is_sound = None
        if selection.changes_logits or batch.mask is not None:
            is_sound = sound_rows(logits)
        raw = None
        if selection.scored:
            entries = selection.scored_entries
            if entries is not None:
                raw = logits[entries]
            elif selection.changes_logits or end_ban or batch.mask is not None:
                raw = logits.clone()
            else:
                raw = logits
        if batch.mask is not None:
            logits += batch.mask
        if selection.allowed:
            keep_only(logits, selection.allowed.entries, selection.allowed.targets)
        if selection.banned:
            ban(logits, selection.banned.targets)
        if selection.bad_sequences:
            ban_completions(logits, selection.bad_sequences, positions_s, tokens)
        if end_ban:
            ban(logits, end_ban.targets)
        if selection.bias and selection.bias_values is not None:
            add_bias(logits, selection.bias.targets, selection.bias_values)
        if selection.penalties:
            longest = max(batch.positions[entry] for entry in selection.penalized)
            penalize(logits, selection.penalties, positions_s, tokens, longest)
        for group in selection.processed:
            assert is_sound is not None, "processors change logits"
            group.apply(
                logits, batch.positions, positions_s, tokens, is_sound, guesses=batch.guesses
            )
        if batch.forced and batch.mask is not None:
            forced_s = upload(batch.forced, torch.int64, self.state.device)
            logits.index_copy_(0, forced_s, batch.mask.index_select(0, forced_s))
        _truncate(logits, selection)

        token_ids = gumbel_argmax(logits, selection.seeds, positions_s, selection.temperatures)
        if is_sound is not None:
            token_ids = token_ids.masked_fill_(is_sound.logical_not_(), NO_TOKEN)
        logprobs = None
        if raw is not None:
            entries = selection.scored_entries
            # Log-probabilities of a row without a token are not read.
            chosen = (token_ids if entries is None else token_ids[entries]).clamp(min=0)
            logprobs = gather_logprobs(raw, chosen, max(selection.top_counts))
        return SampleOutput(token_ids, logprobs, selection.scored, selection.top_counts)

    def _select(self, rows: Sequence[int]) -> Selection:
        key = (self.state.version, list(rows))
        if self._selection is None or self._key != key:
            self._selection = Selection(self.state, rows)
            self._key = key
        return self._selection


def _truncate(logits: Tensor, selection: Selection) -> None:
    for part in selection.truncated:
        if part.entries is None:
            part.apply(logits, part.rows)
        else:
            asking = logits[part.entries]
            part.apply(asking, part.rows)
            logits[part.entries] = asking
