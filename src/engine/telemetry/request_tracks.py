"""Unfinished completions and the last ended ones, as the timeline shows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

from src.core.views import RequestTrack
from src.engine.requests.streams import Choice


class RequestTracks:
    """A ring buffer of ended completions, and the unfinished ones.

    Parameters
    ----------
    living
        Key -> unfinished completion; the caller maintains it.
    capacity
        Number of ended completions to keep.
    """

    def __init__(self, living: Mapping[int, Choice], capacity: int) -> None:
        self._living = living
        self._ended: deque[RequestTrack] = deque(maxlen=capacity)

    def ended(self, choice: Choice) -> None:
        """Keep the record of an ended completion, without its text and its error."""
        if self._ended.maxlen:
            self._ended.append(_track(choice))

    def choices(self, limit: int) -> list[Choice]:
        """The first ``limit`` unfinished completions."""
        return list(islice(self._living.values(), limit))

    def tracks(self, limit: int) -> tuple[list[RequestTrack], int]:
        """Ended and the first ``limit`` unfinished ones, and how many unfinished are left out."""
        living = [_track(choice) for choice in self.choices(limit)]
        return [*self._ended, *living], len(self._living) - len(living)

    def __len__(self) -> int:
        return len(self._living)


def _track(choice: Choice) -> RequestTrack:
    record, request = choice.record, choice.request
    # Lists are copied, because they may grow while another thread encodes the track.
    return RequestTrack(
        key=request.key,
        request_id=choice.request_id,
        index=choice.index,
        prompt_tokens=len(request.prompt_token_ids),
        max_tokens=request.max_tokens,
        arrival=record.arrival,
        queued=record.queued,
        admitted=record.admitted[:],
        preempted=record.preempted[:],
        chunks=record.chunks[:],
        cached_tokens=record.cached_tokens,
        first_token=record.first_token,
        last_token=record.last_token,
        num_tokens=record.num_tokens,
        drafted=record.drafted,
        accepted=record.accepted,
        ended=record.ended,
        finish_reason=record.finish_reason,
        trace_id=record.trace_id,
        task=request.task,
    )
