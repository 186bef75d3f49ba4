"""Logits processors: changes of the logits that plugins bring and requests ask for by name.

Nothing is carried from one step to the next. A processor gets the tokens so far of each row, so the
result does not depend on when a row came, what was preempted, and which step is in flight.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from src.engine.sampling.logits import BANNED
from src.ops.sampling.gumbel_argmax import sound_rows

logger = logging.getLogger(__name__)

# As of penalties: finite logits stay above banned tokens.
_LARGEST = 9.9999994e29

A = TypeVar("A", bound=msgspec.Struct)


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a processor that takes none."""


class ProcessedRows(Generic[A]):
    """The rows of one step that ask for a processor, n of them.

    Attributes
    ----------
    arguments
        [n] what each row's request gave, as the processor's type.
    gathered
        What `LogitsProcessor.gather` made of them.
    lengths
        [n] int64 on the device: tokens of prompt and output so far.
    prompt_lens
        [n] int64 on the device: tokens of the prompt.
    """

    def __init__(
        self,
        arguments: Sequence[A],
        gathered: Any,
        rows: Tensor,
        lengths: Tensor,
        prompt_lens: Tensor,
        tokens: Tensor,
        longest: int,
    ) -> None:
        self.arguments = arguments
        self.gathered = gathered
        self.lengths = lengths
        self.prompt_lens = prompt_lens
        self._rows = rows
        self._tokens = tokens
        self._longest = longest

    @functools.cached_property
    def tokens(self) -> Tensor:
        """[n, L] int32 on the device: the tokens so far; what is behind a row's length is void."""
        return self._tokens.index_select(0, self._rows)[:, : self._longest]


class LogitsProcessor(Generic[A]):
    """Changes the logits of the rows that ask for it, all rows of a step at once.

    One object serves a whole engine, on its device thread. A row's result must be a function of
    that row alone: its logits, its tokens and its arguments. Then the text of a seeded request is
    the same in any batch.

    Attributes
    ----------
    name
        What requests call it.
    arguments
        The type of its arguments: a frozen ``msgspec.Struct``, whose types and bounds are checked
        before `check`.
    """

    name: ClassVar[str]
    arguments: ClassVar[type[msgspec.Struct]] = NoArguments

    def check(self, arguments: A, vocab_size: int) -> None:
        """Refuse arguments by a ``ValueError``, whose text the client reads. On the event loop."""

    def gather(self, arguments: Sequence[A], vocab_size: int, device: torch.device) -> Any:
        """Make what `apply` needs of the rows' arguments, such as tensors on the device.

        It is called when other rows sample than in the step before, not in each step.
        """

    def apply(self, logits: Tensor, rows: ProcessedRows[A]) -> None:
        """Change ``logits`` [n, V] float32 in place, without waiting for the device."""
        raise NotImplementedError


class ProcessorGroup:
    """The rows of a batch that ask for one processor, kept while the same rows sample.

    Parameters
    ----------
    processor, arguments
        The processor, and for each row what its request gave.
    entries
        Of the batch, on the host.
    entries_s, rows_s, prompt_lens_s
        [n] int64 on the device: entry in the batch, row, prompt length.
    firsts
        Which of the n are the first of their row. The others are behind drafts.
    """

    def __init__(
        self,
        processor: LogitsProcessor[Any],
        arguments: Sequence[Any],
        entries: Sequence[int],
        entries_s: Tensor,
        rows_s: Tensor,
        prompt_lens_s: Tensor,
        firsts: Sequence[int],
    ) -> None:
        self._firsts = firsts
        # Whether the log has it that drafts were left out.
        self._told = False
        self._processor = processor
        self._arguments = arguments
        self._entries = entries
        self._entries_s = entries_s
        self._rows_s = rows_s
        self._prompt_lens_s = prompt_lens_s
        # In a list of its own: None is a value.
        self._gathered: list[Any] = []

    def apply(
        self,
        logits: Tensor,
        positions: Sequence[int],
        positions_s: Tensor,
        tokens: Tensor,
        is_sound: Tensor,
        *,
        guesses: bool = False,
    ) -> None:
        """Let the processor change its rows of ``logits`` [S, V]; tokens that are banned stay so.

        A processor that raises an error ends the requests that asked for it, and no other. Where it
        raises one behind drafts only, these are wrong for all that anybody knows, and none ends.

        Parameters
        ----------
        positions, positions_s
            [S] position of the token to be sampled, on the host and on the device.
        tokens
            [max_num_rows, max_model_len] int32: (row, position) -> token id.
        is_sound
            [S] bool on the device; set to false for rows whose logits are no numbers afterwards.
        guesses
            Whether nothing ends where no token can be drawn, since all of them are guesses.
        """
        before = logits.index_select(0, self._entries_s)
        every = range(len(self._entries))
        try:
            after, sound = self._changed(before, every, positions, positions_s, tokens)
        except Exception as error:
            after, sound = before, torch.zeros_like(before[:, 0], dtype=torch.bool)
            own = () if guesses else self._firsts
            if own and len(own) < len(every):
                try:
                    changed = self._changed(before, own, positions, positions_s, tokens)
                except Exception as again:
                    self._log_failure(again)
                else:
                    self._log_drafts(error)
                    places = torch.tensor(own, device=logits.device)
                    after = before.index_copy(0, places, changed[0])
                    sound = sound.index_copy(0, places, changed[1])
            elif own:
                self._log_failure(error)
            else:
                self._log_drafts(error)
        # A token that was ruled out, by a grammar for example, is never brought back.
        bounded = torch.where(after == -torch.inf, after, after.clamp(-_LARGEST, _LARGEST))
        bounded = torch.where(before > BANNED, bounded, before)
        logits.index_copy_(0, self._entries_s, bounded)
        both = is_sound.index_select(0, self._entries_s) & sound
        is_sound.index_copy_(0, self._entries_s, both)

    def _changed(
        self,
        before: Tensor,
        places: Sequence[int],
        positions: Sequence[int],
        positions_s: Tensor,
        tokens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Of some of the n, logits [n', V] behind the processor, and whether they are sound [n'].

        ``before`` [n, V] are those of all n; they are not changed.
        """
        arguments, width = self._arguments, before.shape[1]
        entries_s, rows_s, prompt_lens_s = self._entries_s, self._rows_s, self._prompt_lens_s
        if len(places) == len(self._entries):
            if not self._gathered:
                self._gathered.append(self._processor.gather(arguments, width, before.device))
            gathered = self._gathered[0]
        else:
            some = torch.tensor(places, device=before.device)
            before = before.index_select(0, some)
            entries_s, rows_s, prompt_lens_s = entries_s[some], rows_s[some], prompt_lens_s[some]
            arguments = [arguments[place] for place in places]
            gathered = self._processor.gather(arguments, width, before.device)
        rows: ProcessedRows[Any] = ProcessedRows(
            arguments,
            gathered,
            rows_s,
            positions_s.index_select(0, entries_s),
            prompt_lens_s,
            tokens,
            max(positions[self._entries[place]] for place in places),
        )
        after = before.clone()
        self._processor.apply(after, rows)
        # With -inf for all tokens that are not banned, a banned one would be drawn. Where all are
        # banned before, the row goes on as it would without the processor.
        allowed = torch.where(before > BANNED, after, -torch.inf)
        return after, sound_rows(allowed) | (before.amax(1) <= BANNED)

    def _log_failure(self, error: Exception) -> None:
        logger.error(
            "the logits processor %s failed; %d completions that asked for it end",
            self._processor.name,
            len(self._firsts),
            exc_info=error,
        )

    def _log_drafts(self, error: Exception) -> None:
        """Say once that drafts of these rows are left out, as it happens in step after step."""
        if not self._told:
            self._told = True
            logger.warning(
                "the logits processor %s failed behind drafts, which are left out",
                self._processor.name,
                exc_info=error,
            )


Processors = Mapping[str, LogitsProcessor[Any]]
"""An engine's processors by their names."""
