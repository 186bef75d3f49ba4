"""Prepares a request before it enters the waiting queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from src.core.adapter import Adapter
from src.core.outputs import FinishReason
from src.core.request import Request
from src.core.sampling_params import SamplingParams
from src.engine.requests.predictions import TOKEN_BYTES
from src.engine.requests.prompts import Prompt, RequestBuilder, RequestOptions

if TYPE_CHECKING:
    from src.engine.scheduling.scheduler import Scheduler


class Preparation:
    """Tokenizes a prompt and compiles its grammar, until the request's deadline or its abort.

    The deadline and an abort end it as they end a waiting request. Work that a thread has begun
    still runs to its end there, and its result is dropped.

    Parameters
    ----------
    params, options
        Of the request; already checked.
    adapter
        The adapter that it is computed with, if any.

    Attributes
    ----------
    ended
        Why the request ended before it was queued; ``None`` if it did not.
    tokenized
        When its prompt was tokenized, or when it ended before that.
    """

    def __init__(
        self,
        builder: RequestBuilder,
        scheduler: Scheduler,
        params: SamplingParams,
        options: RequestOptions,
        adapter: Adapter | None = None,
    ) -> None:
        self._adapter = adapter
        self.arrival = self.tokenized = time.monotonic()
        self.ended: FinishReason | None = None
        self._builder = builder
        self._scheduler = scheduler
        self._params = params
        self._options = options
        self._prompt_token_ids: list[int] = []
        self._limit = asyncio.timeout(options.get("timeout"))

    async def requests(self, prompt: Prompt) -> list[Request]:
        """One request per completion. If it has `ended`, they may lack the prompt's tokens.

        Raises
        ------
        InvalidRequestError, PromptTooLongError
            The request cannot be served as it is.
        QueueFullError
            The waiting queue has no room for it.
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
        """End the preparation. Does nothing after the end."""
        if self.ended is None and not self._limit.expired():
            self.ended = FinishReason.ABORT
            # Makes the timeout expire now.
            self._limit.reschedule(0.0)

    async def _prepare(self, prompt: Prompt) -> list[Request]:
        options, builder, queue = self._options, self._builder, self._scheduler
        tenant = options.get("tenant", "")
        # A full queue refuses before the prompt is tokenized. Token ids need no tokenizing, so for
        # them the check below is soon enough; it also knows how many there are.
        if not _is_token_ids(prompt):
            queue.check_queue(self._params.n, self._params.n, tenant)
        token_ids = await builder.tokenize(prompt, options.get("chat"), tenant)
        self._prompt_token_ids, self.tokenized = token_ids, time.monotonic()
        builder.max_tokens(len(token_ids), self._params)
        # Checked again, because others may have filled the queue meanwhile, and compiling a grammar
        # takes longer than everything else.
        count = self._params.n
        queue.check_queue(count, count * len(token_ids), tenant)
        prediction = await builder.prediction(options.get("prediction"), self._params, tenant)
        if prediction:
            # All completions share it.
            with_it = count * len(token_ids) + len(prediction) // TOKEN_BYTES
            queue.check_queue(count, with_it, tenant)
        return await builder.requests(
            token_ids,
            self._params,
            arrival=self.arrival,
            priority=options.get("priority", 0),
            timeout=options.get("timeout"),
            cache_salt=options.get("cache_salt", ""),
            tenant=tenant,
            adapter=self._adapter,
            step_inputs=options.get("step_inputs"),
            prediction=prediction,
        )


def _is_token_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int)
