"""The texts of one call of `AsyncEngine.embed`, until all of them have their vectors."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypedDict, cast

import msgspec

from src.core.adapter import Adapter
from src.core.errors import (
    DeadlineExceededError,
    GenerationError,
    InvalidRequestError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    SlipstreamError,
)
from src.core.outputs import Delta, Embedding, FinishReason
from src.core.records import RequestRecord
from src.core.request import Pooling
from src.core.sampling_params import SamplingParams
from src.core.task import Task
from src.engine.requests.embedder import Embedder, Text, TextIds
from src.engine.requests.prompts import RequestOptions
from src.engine.requests.prompts import check_options as check_option_types
from src.engine.requests.submission import Submission
from src.engine.requests.text_work import chars_of_time
from src.observability.tracing import RequestTrace

if TYPE_CHECKING:
    from src.engine.loop import EngineLoop
    from src.engine.scheduling.scheduler import Scheduler
    from src.engine.scheduling.waiting import Reservation
    from src.engine.startup import EngineParts

# Texts of one call that wait or run at the same time, at most: a step has work enough. Queueing
# them takes a few milliseconds. Many calls have fewer each, see `Reservation.share`.
_WINDOW: Final = 64
# Texts of a call that are tokenized together, and their characters: some ten milliseconds of a
# thread. A longer text is alone.
_BATCH_TEXTS: Final = 64
_BATCH_CHARS: Final = 16_384
IDS_PER_CHAR: Final = 4
"""Token ids that are read in the time that tokenizing one character takes."""
# Numbers of a result beyond which a thread finishes it.
_INLINE_NUMBERS: Final = 65_536
_NUMBER: Final = 4  # bytes


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
    trace
        The trace that they belong to; ``None`` if that trace is not sampled. Without this option
        they get their own, if requests are traced.
    """

    request_id: str | None
    priority: int
    timeout: float | None
    cache_salt: str
    tenant: str
    lora: str | None
    trace: RequestTrace | None


class EmbeddingRun:
    """Prepares texts, queues all of them or none, and collects their vectors.

    What a text asks for, how it becomes token ids, and what is made of the numbers that a step
    gives, are methods that other runs override (`task_runs`).

    Parameters
    ----------
    dimensions, truncate, adds_special_tokens, prompt_name, normalize
        See `AsyncEngine.embed`.

    Attributes
    ----------
    adapter
        What the texts are computed with; set it before they are queued.
    trace
        The trace that they belong to; the same.
    first
        The record of the text that was queued first.
    max_values
        Numbers that all results may have together; ``None``: any.
    on_counted
        Called with how many numbers all results have, once that is known, before anything is
        computed. It may raise.
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
        normalize: bool | None,
        options: EmbeddingOptions,
    ) -> None:
        self.request_id = options.get("request_id") or os.urandom(16).hex()
        self._arrival = time.monotonic()
        self._dimensions = dimensions
        self._truncate = truncate
        self._adds = adds_special_tokens
        self._prompt_name = prompt_name
        self._normalizes = normalize
        self._options = options
        self.adapter: Adapter | None = None
        self.trace: RequestTrace | None = None
        self.first: RequestRecord | None = None
        self.max_values: int | None = None
        self.on_counted: Callable[[int], None] | None = None
        self._num_values = 0
        # Characters of what is put before each text.
        self._prompt_chars = 0
        self._embedder: Embedder | None = None
        self._parts: EngineParts | None = None
        self._loop: EngineLoop | None = None
        # Told when all texts are queued.
        self._on_queued: Callable[[], None] | None = None
        self._aborted = False
        # Ends the preparation at the deadline, or at an abort; ``None`` where none is under way.
        self._limit: asyncio.Timeout | None = None
        self._num_texts = 0
        # Key of its first request; the queue knows by it which ones belong together.
        self._call: int | None = None
        # Token ids of the texts that are not queued yet, int32: a list takes eight times as much.
        self._left: deque[array[int]] = deque()
        # Text -> how many of its first tokens are left out of what is pooled.
        self._unpooled = array("i")
        self._reservation: Reservation | None = None
        # Those that are queued and have no vectors yet, in the order of the texts.
        self._open: deque[Submission] = deque()

    @property
    def options(self) -> EmbeddingOptions:
        """What it was asked for with."""
        return self._options

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
        """Check everything else, and tokenize the texts; an error names the text by its index.

        The deadline and an abort end it. What a thread has begun still runs to its end there, and
        its result is dropped.

        Raises
        ------
        DeadlineExceededError
            The deadline passed.
        RequestAbortedError
            `abort` was called.
        """
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
                f"{self.field} must be a list, got {type(texts).__name__}", param=self.field
            )
        if not texts:
            raise InvalidRequestError(f"{self.field} must not be an empty list", param=self.field)
        # A full queue refuses before anything is tokenized.
        scheduler.check_queue(1, 1, tenant)
        self._num_texts = len(texts)
        self._reservation = scheduler.reservation(tenant)
        if len(texts) > 1:
            self._reservation.check_further()
        timeout = self._options.get("timeout")
        left = None if timeout is None else max(0.0, self._arrival + timeout - time.monotonic())
        self._limit = limit = asyncio.timeout(left)
        try:
            async with limit:
                await self._read(embedder, self._reservation, texts, tenant)
        except TimeoutError:
            if not limit.expired():
                raise
            self._check_wanted()
            raise DeadlineExceededError(
                "the request's deadline passed before its texts were tokenized"
            ) from None
        finally:
            self._limit = None

    async def _read(
        self, embedder: Embedder, reservation: Reservation, texts: Sequence[Text], tenant: str
    ) -> None:
        """Tokenize the texts, and count their tokens."""
        start = 0
        while start < len(texts):
            batch, chars = self._batch(texts, start)
            if self._is_rendered(batch[0]):
                try:
                    made = [await self._rendered(embedder, batch[0], tenant)]
                    self._unpooled.append(0)
                except RequestError as error:
                    raise self._named(error, start) from None
            else:
                made, fault = await embedder.beside(
                    tenant, chars, self._tokens_of_batch, embedder, batch
                )
                if fault is not None:
                    try:
                        raise self._named(fault, start + len(made)) from None
                    finally:
                        # The error has this frame.
                        del fault
            for ids in made:
                self._add_values(self._values(len(ids)))
                reservation.add(len(ids))
                self._left.append(ids)
            start += len(made)
            # Others get the event loop between two batches.
            await asyncio.sleep(0)
            self._check_wanted()
        if self.on_counted is not None:
            self.on_counted(self._num_values)

    def _batch(self, texts: Sequence[Any], start: int) -> tuple[list[Any], int]:
        """The texts from ``start`` on that are tokenized together, and their characters."""
        batch: list[Any] = []
        chars = 0
        for index in range(start, min(start + _BATCH_TEXTS, len(texts))):
            text = texts[index]
            size = self._chars(text, texts[index - 1] if index else None)
            is_rendered = self._is_rendered(text)
            if batch and (is_rendered or chars + size > _BATCH_CHARS):
                break
            batch.append(text)
            chars += size
            if is_rendered:
                break
        return batch, chars

    def _tokens_of_batch(
        self, embedder: Embedder, batch: list[Any]
    ) -> tuple[list[array[int]], RequestError | None]:
        """The token ids of texts, and the error of the first one that is refused."""
        made: list[array[int]] = []
        for text in batch:
            try:
                ids = self._tokens(embedder, text)
                made.append(array("i", ids))
                self._unpooled.append(ids.num_unpooled if isinstance(ids, TextIds) else 0)
            except RequestError as error:
                # Its frames would hold the text.
                return made, error.with_traceback(None)
        return made, None

    def _chars(self, text: Any, before: Any = None) -> int:
        """How long it takes to tokenize a text that follows another one, in characters."""
        if isinstance(text, str):
            return chars_of_time(len(text)) + self._prompt_chars
        # What is no text is refused in its turn.
        return chars_of_time(len(text) // IDS_PER_CHAR if isinstance(text, Sequence) else 0)

    def _is_rendered(self, text: Any) -> bool:
        """Whether a text has to be rendered by a template before it can be tokenized."""
        return False

    async def _rendered(self, embedder: Embedder, text: Any, tenant: str) -> array[int]:
        """The token ids of a text that has to be rendered."""
        raise NotImplementedError

    def _check(self, embedder: Embedder) -> None:
        """Refuse options that hold for all texts."""
        embedder.check(self._dimensions, self._truncate, self._prompt_name)
        self._prompt_chars = len(embedder.prompt(self._prompt_name))

    def _tokens(self, embedder: Embedder, text: Any) -> list[int]:
        """The token ids of a text. A thread may call it, for one text at a time and in order."""
        return embedder.tokens(
            text,
            adds_special_tokens=self._adds,
            truncate=self._truncate,
            prompt_name=self._prompt_name,
        )

    def queue(self, parts: EngineParts, loop: EngineLoop, on_queued: Callable[[], None]) -> None:
        """Queue the first texts; the others follow as these end, and then ``on_queued`` is called.

        Raises
        ------
        QueueFullError
            There is no room for one. Once there was room for one, the others wait for theirs.
        RequestAbortedError
            `abort` was called.
        """
        self._parts, self._loop, self._on_queued = parts, loop, on_queued
        self._queue_more(begins=True)

    def _queue_more(self, *, begins: bool = False) -> None:
        """Queue further texts, as many as may be under way; to begin with, one or an error."""
        self._check_wanted()
        assert self._reservation is not None
        assert self._on_queued is not None
        while self._left and len(self._open) < self._window():
            ids = self._left[0].tolist()
            submission = self._submission(ids)
            self._reservation.take_off(len(ids))
            try:
                # Without this a full queue would end a request that is half done.
                submission.start(succeeds=not begins and not self._open)
            except SlipstreamError as error:
                self._reservation.restore(len(ids))
                if isinstance(error, QueueFullError) and self._open:
                    # Those that are queued make room.
                    return
                raise
            self._left.popleft()
            self._open.append(submission)
        if not self._left:
            self._on_queued()

    def _submission(self, ids: list[int]) -> Submission:
        assert self._embedder is not None
        assert self._parts is not None
        assert self._loop is not None
        index, pooling = self._num_texts - len(self._left), self._pooling()
        request = self._parts.builder.pooled(
            ids,
            pooling,
            arrival=self._arrival,
            priority=self._options.get("priority", 0),
            timeout=self._options.get("timeout"),
            cache_salt=self._options.get("cache_salt", ""),
            tenant=self._options.get("tenant", ""),
            task=self._asks(),
            adapter=self.adapter,
            token_types=self._types(index),
        )
        if pooling != "all" and self._unpooled[index]:
            request = msgspec.structs.replace(request, num_unpooled=self._unpooled[index])
        if self._num_texts > 1:
            if self._call is None:
                self._call = request.key
            request = msgspec.structs.replace(request, call=self._call)
        submission = Submission(self._loop, self._parts.tokenizer, self.request_id, [request])
        if self.first is None:
            self.first = submission.choices[0].record
        if self.trace is not None:
            for choice in submission.choices:
                choice.follow(self.trace)
        return submission

    def _values(self, num_tokens: int) -> int:
        """Numbers of the result of a text."""
        assert self._embedder is not None
        return self._dimensions or self._embedder.recipe.size

    def _add_values(self, count: int) -> None:
        self._num_values += count
        if self.max_values is not None and self._num_values > self.max_values:
            raise InvalidRequestError(
                f"the results have more than {self.max_values} numbers together: ask for fewer "
                "texts at once, or shorter ones",
                param=self.field,
            )

    def _window(self) -> int:
        """How many texts wait or run at the same time."""
        assert self._reservation is not None
        return min(_WINDOW, self._reservation.share)

    def _asks(self) -> Task:
        """The task of the requests."""
        return self.task

    def _pooling(self) -> Pooling:
        """Which hidden states make a result."""
        assert self._embedder is not None
        return self._embedder.recipe.pooling

    def _types(self, index: int) -> bytes:
        """The kinds of a text's tokens, see `RequestBuilder.pooled`."""
        return b""

    async def vectors(self) -> list[Any]:
        """Wait for the results of all texts; an error of one text ends the others."""
        made: list[Any] = []
        while self._open:
            made.append(await self._vector(len(made)))
            self._open.popleft()
            self._queue_more()
            # Where several have ended, nothing else above gives the event loop to others.
            await asyncio.sleep(0)
        return made

    async def _vector(self, index: int) -> Any:
        submission = self._open[0]
        await submission.wait_end()
        last: Delta | None = None
        try:
            async for delta in submission:
                last = delta
        except GenerationError as error:
            raise self._named(error, index) from None
        if last is None or last.vector is None:
            if last is not None and last.finish_reason is FinishReason.DEADLINE:
                raise DeadlineExceededError("the request's deadline passed before its vectors")
            raise RequestAbortedError(f"request {self.request_id} was aborted")
        if len(last.vector) <= _INLINE_NUMBERS * _NUMBER:
            return self._made(last.vector, last)
        assert self._embedder is not None
        # In the turns of short texts: it takes no longer than those.
        beside, tenant = self._embedder.beside, self._options.get("tenant", "")
        return await beside(tenant, _BATCH_CHARS, self._made, last.vector, last)

    def _made(self, numbers: bytes, last: Delta) -> Any:
        """The result of a text, from the numbers that a step has given."""
        assert self._embedder is not None
        return Embedding(
            request_id=self.request_id,
            numbers=self._embedder.vector(numbers, self._dimensions, self._normalizes),
            prompt_tokens=last.usage.prompt_tokens,
            cached_tokens=last.usage.cached_tokens,
        )

    def abort(self) -> None:
        """Abort the texts that have no vector yet. Does nothing after the end."""
        self._aborted = True
        self._left.clear()
        # Makes it expire now.
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0.0)
        if self._reservation is not None:
            self._reservation.close()
        for submission in self._open:
            submission.abort()

    def _check_wanted(self) -> None:
        if self._aborted:
            raise RequestAbortedError(f"request {self.request_id} was aborted")

    def _named(self, error: RequestError, index: int) -> RequestError:
        """The error of a text, which says which of several it is."""
        return named_error(error, self.field, index if self._num_texts > 1 else None)


def named_error(error: RequestError, field: str, index: int | None) -> RequestError:
    """An error that says which text of a field is at fault; ``None``: there is only one."""
    error.rename("prompt", field)
    if error.param is None:
        error.param = field
    if index is not None:
        error.message = f"{field}[{index}]: {error.message}"
        error.args = (error.message,)
    return error
