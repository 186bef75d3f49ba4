"""`LLM`: the synchronous interface for offline batches."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from src.core.config import Config
from src.core.errors import QueueFullError, RequestAbortedError
from src.core.outputs import (
    Classification,
    Embedding,
    Encoding,
    FinishReason,
    GenerationResult,
    Score,
)
from src.core.sampling_params import SamplingParams
from src.core.task import Task
from src.engine.client import AsyncEngine
from src.engine.engine_thread import EngineThread
from src.engine.requests.embedder import Text
from src.engine.requests.prompts import ChatMessage, ChatOptions, Prompt
from src.engine.requests.submission import Submission

Params = SamplingParams | Sequence[SamplingParams] | None

# Seconds after which a full queue is tried again, even if no request of the batch has ended.
_PATIENCE = 0.05


class LLM:
    """An engine in its own thread, for programs without an event loop.

    ::

        with LLM("configs/demo.toml") as llm:
            for result in llm.generate(["Once upon a time", "One day"], SamplingParams(n=2)):
                print(result.text)

    ``config`` is what `AsyncEngine.open` takes. The constructor returns when the model is ready. An
    unclosed LLM is released when nothing refers to it any more, or when the process ends. Several
    threads may use the same LLM.

    Raises
    ------
    ConfigError, ModelLoadError
        With one readable reason.
    """

    def __init__(self, config: Config | str | Path | None = None) -> None:
        self._thread = EngineThread(config)
        self.engine = self._thread.engine
        # At the end of the process the thread closes itself, see `engine_thread`.
        weakref.finalize(self, self._thread.stop).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the model, its memory and its threads."""
        self._thread.close()

    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
        params: Params = None,
        *,
        lora: str | None = None,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Complete one prompt or many, batched; results are in the prompts' order.

        Parameters
        ----------
        prompts
            A text or token ids, or a sequence of either.
        params
            For all prompts, or one for each; ``None``: the checkpoint's own defaults.
        lora
            Name of the adapter that they are computed with; ``None``: the model alone.
        progress
            Whether to show a progress bar. ``None``: if standard error is a terminal.

        Raises
        ------
        InvalidRequestError
            For the first prompt that cannot be served; the others are aborted.
        KeyboardInterrupt
            After Ctrl-C; all prompts are aborted.
        """
        many = [prompts] if _is_single(prompts) else list(prompts)
        return self._thread.call(self._run, many, params, None, lora, progress)

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        dimensions: int | None = None,
        truncate: int | None = None,
        prompt_name: str | None = None,
        lora: str | None = None,
    ) -> list[Embedding]:
        """The vectors of one text or many, in their order; arguments as of `AsyncEngine.embed`."""
        many = [texts] if _is_single(texts) else list(texts)
        asked = partial(
            self.engine.embed,
            dimensions=dimensions,
            truncate=truncate,
            prompt_name=prompt_name,
            lora=lora,
        )
        return self._thread.call(self._in_batches, asked, many)

    def classify(
        self,
        texts: Text | Sequence[Prompt],
        *,
        use_activation: bool = True,
        truncate: int | None = None,
        lora: str | None = None,
    ) -> list[Classification]:
        """What a classifier says of one text or many; arguments as of `AsyncEngine.classify`."""
        many = [texts] if _is_single(texts) else list(texts)
        asked = partial(
            self.engine.classify, use_activation=use_activation, truncate=truncate, lora=lora
        )
        return self._thread.call(self._in_batches, asked, many)

    def score(
        self,
        pairs: Sequence[tuple[Prompt, Prompt]],
        *,
        use_activation: bool = True,
        truncate: int | None = None,
        max_tokens_per_doc: int | None = None,
        lora: str | None = None,
    ) -> list[Score]:
        """How well the texts of each pair match; arguments as of `AsyncEngine.score`."""
        asked = partial(
            self.engine.score,
            use_activation=use_activation,
            truncate=truncate,
            max_tokens_per_doc=max_tokens_per_doc,
            lora=lora,
        )
        return self._thread.call(self._in_batches, asked, list(pairs))

    def encode(
        self,
        texts: Text | Sequence[Prompt],
        *,
        task: Task,
        use_activation: bool | None = None,
        truncate: int | None = None,
        lora: str | None = None,
    ) -> list[Encoding]:
        """What the model gives for one text or many; arguments as of `AsyncEngine.encode`."""
        many = [texts] if _is_single(texts) else list(texts)
        asked = partial(
            self.engine.encode,
            task=task,
            use_activation=use_activation,
            truncate=truncate,
            lora=lora,
        )
        return self._thread.call(self._in_batches, asked, many)

    async def _in_batches(
        self, asked: Callable[[list[Any]], Awaitable[list[Any]]], texts: list[Any]
    ) -> list[Any]:
        """The results of texts, of few at a time, so that the queue holds them."""
        made: list[Any] = []
        section = self.engine.config.scheduler
        # One call may take half of what may wait.
        most_tokens = section.max_waiting_tokens // 2
        for some in _batches(texts, section.max_waiting_requests, most_tokens):
            made += await asked(some)
        return made

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora: str | None = None,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Answer one conversation or many; otherwise as `generate`."""
        many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        options = ChatOptions(tools=tools)
        return self._thread.call(self._run, many, params, options, lora, progress)

    async def _run(
        self,
        prompts: list[Any],
        params: Params,
        chat: ChatOptions | None,
        lora: str | None,
        progress: bool | None,
    ) -> list[GenerationResult]:
        each = self._params_of_each(params, len(prompts))
        hidden = not sys.stderr.isatty() if progress is None else not progress
        batch = _Batch(self.engine, chat, lora)
        with tqdm(total=len(prompts), unit="request", disable=hidden) as bar:

            async def one(prompt: Prompt, params: SamplingParams | None) -> GenerationResult:
                result = await batch.generate(prompt, params)
                bar.update()
                return result

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(one(prompt, params))
                        for prompt, params in zip(prompts, each, strict=True)
                    ]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    @staticmethod
    def _params_of_each(params: Params, count: int) -> list[SamplingParams | None]:
        if params is None or isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ValueError(f"expected one SamplingParams or {count} of them, got {len(params)}")
        return list(params)


class _Batch:
    """Submits prompts to an engine in order, as its waiting queue has room."""

    def __init__(self, engine: AsyncEngine, chat: ChatOptions | None, lora: str | None) -> None:
        self._engine = engine
        self._lora = lora
        self._chat = chat
        # Its holder is the next prompt to be queued. The later ones are not even tokenized yet.
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()

    async def generate(self, prompt: Prompt, params: SamplingParams | None) -> GenerationResult:
        async with contextlib.AsyncExitStack() as stack:
            async with self._turn:
                token_ids = await self._engine.tokenize(prompt, chat=self._chat)
                submission = await self._queue(stack, token_ids, params)
            result = await submission.result()
        self._ended.set()
        if any(c.finish_reason is FinishReason.ABORT for c in result.completions):
            raise RequestAbortedError(f"request {result.request_id} was aborted")
        return result

    async def _queue(
        self,
        stack: contextlib.AsyncExitStack,
        token_ids: list[int],
        params: SamplingParams | None,
    ) -> Submission:
        while True:
            self._ended.clear()
            submission = self._engine.submit(token_ids, params, lora=self._lora)
            try:
                return await stack.enter_async_context(submission)
            except QueueFullError:
                stats = self._engine.stats
                if not stats.num_running and not stats.num_waiting:
                    raise  # nothing will ever make room
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await self._ended.wait()


def _batches(texts: list[Any], most: int, most_tokens: int) -> Iterator[list[Any]]:
    """Pieces of at most ``most`` texts, all tokens of which may be held at the same time.

    A text hardly ever has more tokens than characters. One that has more than ``most_tokens`` is a
    piece by itself.
    """
    batch: list[Any] = []
    held = 0
    for text in texts:
        tokens = _size_of(text)
        if batch and (len(batch) == most or held + tokens > most_tokens):
            yield batch
            batch, held = [], 0
        batch.append(text)
        held += tokens
    if batch:
        yield batch


def _size_of(text: Any) -> int:
    """More tokens than a text, a list of token ids, or a pair of either, is likely to have."""
    if isinstance(text, tuple) and len(text) == 2 and not isinstance(text[0], int):
        return _size_of(text[0]) + _size_of(text[1])
    return len(text) if isinstance(text, Sized) else 1


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], int))
