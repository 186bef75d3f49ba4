"""`LLM`: a synchronous front for offline batches."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import start_blocking_portal
from tqdm import tqdm

from src.core.config import Config
from src.core.outputs import GenerationResult
from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.engine.prompts import ChatMessage, ChatOptions, Prompt

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """An engine in a thread of its own, for programs without an event loop.

    ::

        with LLM("configs/demo.toml") as llm:
            for result in llm.generate(["Once upon a time", "One day"], SamplingParams(n=2)):
                print(result.text)

    ``config`` is what :meth:`AsyncEngine.open` takes. The constructor returns when the model is
    ready.

    Raises
    ------
    ConfigError, ModelLoadError
        With one readable reason.
    """

    def __init__(self, config: Config | str | Path | None = None) -> None:
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            self.engine = stack.enter_context(
                self._portal.wrap_async_context_manager(AsyncEngine.open(config))
            )
            self._resources = stack.pop_all()

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
        self._resources.close()

    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
        params: Params = None,
        *,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Complete one prompt or many, batched; results are in the order of the prompts.

        Parameters
        ----------
        prompts
            A text or token ids, or a sequence of either.
        params
            For all prompts, or one for each; without them the checkpoint's own defaults.
        progress
            Show a progress bar; by default when standard error is a terminal.

        Raises
        ------
        InvalidRequestError
            For the first prompt that cannot be served; the others are aborted.
        """
        many = [prompts] if _is_single(prompts) else list(prompts)
        return self._portal.call(self._run, many, params, None, progress)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool | None = None,
    ) -> list[GenerationResult]:
        """Answer one conversation or many; otherwise as :meth:`generate`."""
        many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        return self._portal.call(self._run, many, params, ChatOptions(tools=tools), progress)

    async def _run(
        self,
        prompts: list[Any],
        params: Params,
        chat: ChatOptions | None,
        progress: bool | None,
    ) -> list[GenerationResult]:
        each = self._params_of_each(params, len(prompts))
        # However long the batch, the waiting queue holds only what it may.
        most = max((p.n for p in each if p is not None), default=1)
        limit = asyncio.Semaphore(max(1, self.engine.config.scheduler.max_waiting_requests // most))
        hidden = not sys.stderr.isatty() if progress is None else not progress
        with tqdm(total=len(prompts), unit="request", disable=hidden) as bar:

            async def one(prompt: Prompt, params: SamplingParams | None) -> GenerationResult:
                async with limit:
                    result = await self.engine.generate(prompt, params, chat=chat)
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


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, str) or bool(prompts and isinstance(prompts[0], int))
