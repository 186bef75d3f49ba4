"""The texts of one call of `AsyncEngine.embed`, until all of them have their vectors."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from src.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RequestAbortedError,
    RequestError,
)
from src.core.outputs import Delta, Embedding, FinishReason
from src.core.sampling_params import SamplingParams
from src.engine.requests.embedder import Embedder, Text
from src.engine.requests.prompts import RequestOptions
from src.engine.requests.submission import Submission

if TYPE_CHECKING:
    from src.engine.loop import EngineLoop
    from src.engine.scheduling.scheduler import Scheduler
    from src.engine.startup import EngineParts


class EmbeddingOptions(TypedDict, total=False):
    """Options beside the texts; they are those of `RequestOptions`.

    Attributes
    ----------
    request_id
        The caller's id for it, used by ``AsyncEngine.abort``; generated if not given.
    priority
        Smaller goes first, under ``scheduler.policy = "priority"``.
    timeout
        Seconds after its arrival at which it ends without vectors.
    tenant
        Whose request it is.
    """

    request_id: str | None
    priority: int
    timeout: float | None
    tenant: str


class EmbeddingRun:
    """Prepares texts, queues all of them or none, and collects their vectors.

    Parameters
    ----------
    dimensions, truncate, adds_special_tokens, prompt_name
        See `AsyncEngine.embed`.
    """

    def __init__(
        self,
        dimensions: int | None,
        truncate: int | None,
        adds_special_tokens: bool,
        prompt_name: str | None,
        options: EmbeddingOptions,
    ) -> None:
        self.request_id = options.get("request_id") or uuid.uuid4().hex
        self._arrival = time.monotonic()
        self._dimensions = dimensions
        self._truncate = truncate
        self._adds = adds_special_tokens
        self._prompt_name = prompt_name
        self._options = options
        self._embedder: Embedder | None = None
        self._token_ids: list[list[int]] = []
        self._submissions: list[Submission] = []

    async def prepare(
        self, embedder: Embedder | None, scheduler: Scheduler, texts: Sequence[Text]
    ) -> None:
        """Check everything, and tokenize the texts; an error names the text by its index."""
        if embedder is None:
            raise InvalidRequestError(
                "this model does not embed: what it can do is generate", param="model"
            )
        self._embedder = embedder
        embedder.check(self._dimensions, self._truncate, self._prompt_name)
        checked: RequestOptions = {
            "priority": self._options.get("priority", 0),
            "timeout": self._options.get("timeout"),
            "tenant": (tenant := self._options.get("tenant", "")),
        }
        embedder.check_options(SamplingParams(max_tokens=1), checked)
        if not texts:
            raise InvalidRequestError("input must not be an empty list", param="input")
        # A full queue refuses before anything is tokenized.
        scheduler.check_queue(len(texts), len(texts), tenant)
        for index, text in enumerate(texts):
            try:
                ids = await embedder.tokens(
                    text,
                    adds_special_tokens=self._adds,
                    truncate=self._truncate,
                    prompt_name=self._prompt_name,
                    tenant=tenant,
                )
            except RequestError as error:
                raise _named(error, index if len(texts) > 1 else None) from None
            self._token_ids.append(ids)
            # Others get the event loop between two texts.
            await asyncio.sleep(0)
        scheduler.check_queue(len(texts), sum(map(len, self._token_ids)), tenant)

    def queue(self, parts: EngineParts, loop: EngineLoop) -> None:
        """Queue all texts at once."""
        assert self._embedder is not None
        for ids in self._token_ids:
            request = parts.builder.pooled(
                ids,
                self._embedder.recipe.pooling,
                arrival=self._arrival,
                priority=self._options.get("priority", 0),
                timeout=self._options.get("timeout"),
                tenant=self._options.get("tenant", ""),
            )
            self._submissions.append(Submission(loop, parts.tokenizer, self.request_id, [request]))
        for submission in self._submissions:
            submission.start()

    async def vectors(self) -> list[Embedding]:
        """Wait for all vectors; an error of one text ends the others."""
        try:
            return [await self._vector(submission) for submission in self._submissions]
        finally:
            self.abort()

    async def _vector(self, submission: Submission) -> Embedding:
        assert self._embedder is not None
        await submission.wait_end()
        last: Delta | None = None
        async for delta in submission:
            last = delta
        if last is None or last.vector is None:
            if last is not None and last.finish_reason is FinishReason.DEADLINE:
                raise DeadlineExceededError("the request's deadline passed before its vectors")
            raise RequestAbortedError(f"request {self.request_id} was aborted")
        return Embedding(
            request_id=self.request_id,
            vector=self._embedder.vector(last.vector, self._dimensions),
            prompt_tokens=last.usage.prompt_tokens,
            cached_tokens=last.usage.cached_tokens,
        )

    def abort(self) -> None:
        """Abort the texts that have no vector yet. Does nothing after the end."""
        for submission in self._submissions:
            submission.abort()


def _named(error: RequestError, index: int | None) -> RequestError:
    """The error of a text, which says which of several it is."""
    if index is not None:
        error.message = f"input[{index}]: {error.message}"
        error.args = (error.message,)
    if error.param in (None, "prompt"):
        error.param = "input"
    return error
