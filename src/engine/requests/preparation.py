"""A request on its way into the waiting queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from src.core.outputs import FinishReason
from src.core.request import Request
from src.core.sampling_params import SamplingParams
from src.engine.requests.prompts import Prompt, RequestBuilder, RequestOptions

if TYPE_CHECKING:
    from src.engine.scheduling.scheduler import Scheduler


class Preparation:
    """Has a prompt tokenized and its grammar compiled, while the request has time and is wanted.

    Its deadline and an abort end it as they end a request that waits. Work that a thread has begun
    goes on there, for nobody.

    Parameters
    ----------
    params, options
        Of the request; they are checked.

    Attributes
    ----------
    ended
        Why it is not to be queued; ``None`` as long as it is.
    tokenized
        When its prompt was, or when it ended.
    """

    def __init__(
        self,
        builder: RequestBuilder,
        scheduler: Scheduler,
        params: SamplingParams,
        options: RequestOptions,
    ) -> None:
        self.arrival = self.tokenized = time.monotonic()
        self.ended: FinishReason | None = None
        self._builder = builder
        self._scheduler = scheduler
        self._params = params
        self._options = options
        self._prompt_token_ids: list[int] = []
        self._limit = asyncio.timeout(options.get("timeout"))

    async def requests(self, prompt: Prompt) -> list[Request]:
        """One request per completion; where it has :attr:`ended`, with what was known by then.

        Raises
        ------
        InvalidRequestError, PromptTooLongError
            The request cannot be served as it is.
        QueueFullError
            The queue has no room for it, whatever else is to be found out about it.
        """
        try:
            async with self._limit:
                requests = await self._prepare(prompt)
            if self.ended is None:
                return requests
        except TimeoutError:
            if not self._limit.expired():
                raise
            self.ended = self.ended or FinishReason.DEADLINE
        if not self._prompt_token_ids:
            self.tokenized = time.monotonic()
        return self._builder.unprepared(
            self._prompt_token_ids,
            self._params,
            arrival=self.arrival,
            priority=self._options.get("priority", 0),
        )

    def abort(self) -> None:
        """End it. Does nothing after the end."""
        if self.ended is None and not self._limit.expired():
            self.ended = FinishReason.ABORT
            # Its time is over now.
            self._limit.reschedule(0.0)

    async def _prepare(self, prompt: Prompt) -> list[Request]:
        options, builder, queue = self._options, self._builder, self._scheduler
        # A full queue refuses at once. Token ids cost as little as to look, and may be too many
        # for any queue.
        if not _is_token_ids(prompt):
            queue.check_queue(self._params.n, self._params.n)
        token_ids = await builder.tokenize(prompt, options.get("chat"))
        self._prompt_token_ids, self.tokenized = token_ids, time.monotonic()
        builder.max_tokens(len(token_ids), self._params)
        # Others may have filled it meanwhile, and a grammar takes longer than all the rest.
        queue.check_queue(self._params.n, self._params.n * len(token_ids))
        return await builder.requests(
            token_ids,
            self._params,
            arrival=self.arrival,
            priority=options.get("priority", 0),
            timeout=options.get("timeout"),
            cache_salt=options.get("cache_salt", ""),
        )


def _is_token_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int)
