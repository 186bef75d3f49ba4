"""The texts of one call of `AsyncEngine.embed`, until all of them have their vectors."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypedDict, cast

from src.core.adapter import Adapter
from src.core.errors import (
    DeadlineExceededError,
    GenerationError,
    InvalidRequestError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
)
from src.core.outputs import Delta, Embedding, FinishReason
from src.core.request import Pooling, Request
from src.core.sampling_params import SamplingParams
from src.core.task import Task
from src.engine.requests.embedder import Embedder, Text
from src.engine.requests.prompts import RequestOptions
from src.engine.requests.prompts import check_options as check_option_types
from src.engine.requests.submission import Submission

if TYPE_CHECKING:
    from src.engine.loop import EngineLoop
    from src.engine.scheduling.scheduler import Scheduler
    from src.engine.startup import EngineParts

# Texts of one call that wait or run at the same time: a step has work enough, and the queue has
# room for others. Queueing them takes a few milliseconds.
_WINDOW: Final = 64


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
    cache_salt
        Prefix-cache entries are shared only between requests with the same salt.
    tenant
        Whose request it is.
    lora
        Name of the adapter that they are computed with; ``None`` is the model alone.
    """

    request_id: str | None
    priority: int
    timeout: float | None
    cache_salt: str
    tenant: str
    lora: str | None


class EmbeddingRun:
    """Prepares texts, queues all of them or none, and collects their vectors.

    Parameters
    ----------
    dimensions, truncate, adds_special_tokens, prompt_name
        See `AsyncEngine.embed`.

    Attributes
    ----------
    adapter
        What the texts are computed with; set it before they are queued.
    """

    task: ClassVar[Task] = "embed"
    """What each text asks for."""
    field: ClassVar[str] = "input"
    """What errors call the texts."""

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
        self.adapter: Adapter | None = None
        self._embedder: Embedder | None = None
        self._token_ids: list[list[int]] = []
        # Those that were queued; the first ``_ended`` of them have their vectors.
        self._submissions: list[Submission] = []
        self._ended = 0
        self._parts: EngineParts | None = None
        self._loop: EngineLoop | None = None

    @property
    def lora(self) -> str | None:
        """Name of the adapter that is asked for."""
        return self._options.get("lora")

    def check_options(self) -> None:
        """Refuse options of wrong names or types.

        Raises
        ------
        TypeError
            An option's name is unknown.
        """
        if unknown := self._options.keys() - EmbeddingOptions.__annotations__.keys():
            names = ", ".join(EmbeddingOptions.__annotations__)
            raise TypeError(f"{self.task} has no option {min(unknown)!r}; there are {names}")
        check_option_types(None, cast(RequestOptions, self._options))

    async def prepare(
        self, embedder: Embedder | None, scheduler: Scheduler, texts: Sequence[Text]
    ) -> None:
        """Check everything else, and tokenize the texts; an error names the text by its index."""
        if embedder is None:
            raise InvalidRequestError(
                "this model does not embed: what it can do is generate", param="model"
            )
        self._embedder = embedder
        self._check(embedder)
        checked: RequestOptions = {
            "priority": self._options.get("priority", 0),
            "timeout": self._options.get("timeout"),
            "cache_salt": self._options.get("cache_salt", ""),
            "tenant": (tenant := self._options.get("tenant", "")),
        }
        embedder.check_options(SamplingParams(max_tokens=1), checked)
        if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
            raise InvalidRequestError(
                f"{self.field} must be a list of texts, got {type(texts).__name__}",
                param=self.field,
            )
        if not texts:
            raise InvalidRequestError(f"{self.field} must not be an empty list", param=self.field)
        # A full queue refuses before anything is tokenized.
        scheduler.check_queue(1, 1, tenant)
        for index, text in enumerate(texts):
            try:
                ids = await self._tokens(embedder, text, tenant)
            except RequestError as error:
                raise self._named(error, index if len(texts) > 1 else None) from None
            self._token_ids.append(ids)
            # Others get the event loop between two texts.
            await asyncio.sleep(0)

    def _check(self, embedder: Embedder) -> None:
        """Refuse options that hold for all texts."""
        embedder.check(self._dimensions, self._truncate, self._prompt_name)

    async def _tokens(self, embedder: Embedder, text: Text, tenant: str) -> list[int]:
        """The token ids of a text."""
        return await embedder.tokens(
            text,
            adds_special_tokens=self._adds,
            truncate=self._truncate,
            prompt_name=self._prompt_name,
            tenant=tenant,
        )

    def queue(self, parts: EngineParts, loop: EngineLoop) -> None:
        """Queue the first texts; the others follow as these end.

        Raises
        ------
        QueueFullError
            There is no room for one.
        """
        self._parts, self._loop = parts, loop
        self._queue_more(least=1)

    def _queue_more(self, least: int = 0) -> None:
        """Queue further texts, as many as may be under way; ``least`` of them or an error."""
        assert self._embedder is not None
        assert self._parts is not None
        assert self._loop is not None
        parts, loop = self._parts, self._loop
        first = len(self._submissions)
        for ids in self._token_ids[first : self._ended + self._window()]:
            request = self._request(parts, len(self._submissions), ids)
            submission = Submission(loop, parts.tokenizer, self.request_id, [request])
            try:
                submission.start()
            except QueueFullError:
                if len(self._submissions) < first + least:
                    raise
                # Those that are queued make room.
                return
            self._submissions.append(submission)

    def _window(self) -> int:
        """How many texts wait or run at the same time."""
        return _WINDOW

    def _pooling(self) -> Pooling:
        """Which hidden states make a result."""
        assert self._embedder is not None
        return self._embedder.recipe.pooling

    def _types(self, index: int) -> bytes:
        """The kinds of a text's tokens, see `RequestBuilder.pooled`."""
        return b""

    def _request(self, parts: EngineParts, index: int, ids: list[int]) -> Request:
        return parts.builder.pooled(
            ids,
            self._pooling(),
            arrival=self._arrival,
            priority=self._options.get("priority", 0),
            timeout=self._options.get("timeout"),
            cache_salt=self._options.get("cache_salt", ""),
            tenant=self._options.get("tenant", ""),
            task=self.task,
            adapter=self.adapter,
            token_types=self._types(index),
        )

    async def vectors(self) -> list[Any]:
        """Wait for the results of all texts; an error of one text ends the others."""
        try:
            made: list[Any] = []
            while len(made) < len(self._token_ids):
                made.append(await self._vector(len(made)))
                self._ended = len(made)
                all_ended = self._ended == len(self._submissions)
                self._queue_more(least=int(all_ended and self._ended < len(self._token_ids)))
            return made
        finally:
            self.abort()

    async def _vector(self, index: int) -> Any:
        assert self._embedder is not None
        submission = self._submissions[index]
        await submission.wait_end()
        last: Delta | None = None
        try:
            async for delta in submission:
                last = delta
        except GenerationError as error:
            raise self._named(error, index if len(self._token_ids) > 1 else None) from None
        if last is None or last.vector is None:
            if last is not None and last.finish_reason is FinishReason.DEADLINE:
                raise DeadlineExceededError("the request's deadline passed before its vectors")
            raise RequestAbortedError(f"request {self.request_id} was aborted")
        return self._made(last.vector, last)

    def _made(self, numbers: bytes, last: Delta) -> Any:
        """The result of a text, from the numbers that a step has given."""
        assert self._embedder is not None
        return Embedding(
            request_id=self.request_id,
            vector=self._embedder.vector(numbers, self._dimensions),
            prompt_tokens=last.usage.prompt_tokens,
            cached_tokens=last.usage.cached_tokens,
        )

    def abort(self) -> None:
        """Abort the texts that have no vector yet. Does nothing after the end."""
        for submission in self._submissions:
            submission.abort()

    def _named(self, error: RequestError, index: int | None) -> RequestError:
        """The error of a text, which says which of several it is."""
        if index is not None:
            error.message = f"{self.field}[{index}]: {error.message}"
            error.args = (error.message,)
        if error.param in (None, "prompt"):
            error.param = self.field
        return error
