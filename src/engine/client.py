"""`AsyncEngine`: the engine's interface for asyncio programs and the HTTP server.

Importing this module is cheap. Torch and the model are loaded in a thread when the engine starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from src.core.config import Config
from src.core.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestAbortedError,
    ShuttingDownError,
    SlipstreamError,
    forget_locals,
)
from src.core.outputs import (
    Classification,
    Delta,
    Embedding,
    Encoding,
    FinishReason,
    GenerationResult,
    Score,
)
from src.core.sampling_params import SamplingParams
from src.core.settings import load_config
from src.core.status import (
    STARTUP_PHASES,
    EngineStats,
    EngineStatus,
    ModelInfo,
    Stall,
    served_names,
)
from src.core.task import Task
from src.core.version import VERSION
from src.engine.background_tasks import BackgroundTasks
from src.engine.loading import Loading
from src.engine.own_loop import OwnLoop
from src.engine.requests.adapters import Adapters
from src.engine.requests.admissions import Admission, Admissions
from src.engine.requests.embedder import Embedder, Text
from src.engine.requests.embedding_run import EmbeddingOptions, EmbeddingRun
from src.engine.requests.preparation import Preparation
from src.engine.requests.prompts import (
    ChatOptions,
    Prompt,
    RequestOptions,
    check_options,
    with_defaults,
)
from src.engine.requests.submission import Submission
from src.engine.requests.task_runs import (
    ENCODING_TASKS,
    CosineRun,
    LabelRun,
    PairRun,
    TokenLabelRun,
    TokenVectorRun,
    encoding_of,
)
from src.engine.telemetry.inspector import Inspector
from src.engine.telemetry.observed import Observed, ObservedRun
from src.engine.telemetry.observer import EngineObserver
from src.engine.telemetry.start_observer import StartObserver
from src.engine.telemetry.stats_line import stats_of
from src.engine.telemetry.timeline import Timeline
from src.observability.metrics import EngineMetrics
from src.observability.tracing import Telemetry
from src.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from src.engine.loop import EngineLoop
    from src.engine.startup import EngineParts

logger = logging.getLogger(__name__)

# Seconds to wait for the last step after all requests were aborted.
_ABORT_GRACE = 5.0
# The largest `retry_after` of a refused request, in seconds.
_MAX_RETRY_AFTER = 60.0


class AsyncEngine:
    """One model, served from the running event loop.

    ::

        async with AsyncEngine.open("configs/demo.toml") as engine:
            result = await engine.generate("Once upon a time", SamplingParams(max_tokens=32))
            async for delta in engine.stream([{"role": "user", "content": "Hello!"}]):
                print(delta.text, end="")

    The constructor starts nothing. `start` begins to load in the background, and `wait_ready` waits
    for it. `open` does both and closes at the end. All methods are for one event loop, the first
    that called any: others get `EventLoopError`.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or load_config()
        self._own_loop = OwnLoop()
        self._status = EngineStatus()
        self._parts: EngineParts | None = None
        self._loop: EngineLoop | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._startup_done = asyncio.Event()
        self._dead: asyncio.Future[BaseException] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._draining = False
        self._admissions = Admissions()
        section = self.config.observability
        self.metrics = EngineMetrics(
            served_names(self.config.model)[0], legacy_names=section.legacy_metrics
        )
        self.telemetry = Telemetry(section, served_names(self.config.model)[0], VERSION)
        self._observer = EngineObserver(self.metrics, section, self.telemetry)
        self.inspector = Inspector(self._observer, lambda: self._loaded, self._own_loop)
        self._background = BackgroundTasks(
            section,
            self.metrics,
            self._observer.progress,
            lambda: self.status,
            lambda: self.stats,
        )
        self._start = StartObserver(self.metrics, self.telemetry)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, config: Config | str | Path | None = None) -> AsyncIterator[AsyncEngine]:
        """Start an engine, wait until it is ready, and close it at the end.

        ``config`` is a TOML file or a whole configuration. Without one, ``SLIPSTREAM_CONFIG`` and
        the ``SLIPSTREAM_...`` variables apply. The default model is the bundled demo model.

        Raises
        ------
        ConfigError, ModelLoadError
            With one readable reason.
        """
        engine = cls(config if isinstance(config, Config) else load_config(config))
        engine.start()
        try:
            await engine.wait_ready()
            yield engine
        finally:
            await engine.close()

    # Life

    def start(self) -> None:
        """Begin to load, in the background of the running event loop.

        Raises
        ------
        RuntimeError
            The engine was closed. An engine can be opened only once.
        """
        if self._status.phase == "closed":
            raise RuntimeError("this engine was closed; open a new one")
        self._own_loop.enter()
        if self._main_task is None:
            self._dead = asyncio.get_running_loop().create_future()
            self._start.begin()
            self._set_status("importing", STARTUP_PHASES["importing"], "importing torch")
            self._background.start()
            self._main_task = asyncio.create_task(self._main(), name="slipstream-engine")

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until requests are admitted.

        Raises
        ------
        NotReadyError
            It takes longer than ``timeout`` seconds.
        ConfigError, ModelLoadError
            Loading failed.
        """
        self._own_loop.enter()
        try:
            async with asyncio.timeout(timeout):
                await self._startup_done.wait()
        except TimeoutError:
            raise self._status.not_ready() from None
        self._check_admits()

    @property
    def status(self) -> EngineStatus:
        """Phase, progress and, after a failure, the reason."""
        return self._status

    @property
    def stall(self) -> Stall | None:
        """Describes a stall: work is pending and no step completes. ``None`` if there is none."""
        return self._observer.progress.stall(time.monotonic())

    @property
    def admits(self) -> bool:
        """Whether a new request would be queued now, not refused."""
        return self._status.ready and self._loaded.scheduler.admits

    async def wait_dead(self) -> BaseException:
        """Wait until the engine has failed, even while loading, or is closed; returns the error."""
        self._own_loop.check()
        if self._dead is None:
            raise RuntimeError("the engine was not started")
        return await asyncio.shield(self._dead)

    async def drain(self, timeout: float) -> None:
        """Admit no more requests and finish the admitted ones; abort them after ``timeout`` s.

        Admitted requests are those that run or wait, and those that are not queued yet because
        their prompt is being tokenized or their grammar compiled.

        An engine that is still loading will admit nothing once it has loaded. If the device hangs,
        this returns a few seconds after ``timeout`` all the same.
        """
        self._own_loop.check()
        self._draining = True
        loop = self._loop
        if self._status.phase not in ("ready", "draining") or loop is None:
            return
        self._set_status("draining", 1.0, "finishing what runs")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                # No request is admitted any more, so none can follow these.
                await self._admissions.wait_none()
                await loop.wait_idle()
                return
        self._admissions.revoke()
        loop.abort_all()
        try:
            async with asyncio.timeout(_ABORT_GRACE):
                await loop.wait_idle()
        except TimeoutError:
            logger.error("the device did not finish its last step within %.0f s", _ABORT_GRACE)

    async def close(self) -> None:
        """Abort all requests and release threads and memory."""
        if self._closing is None or not self._closing.done():
            self._own_loop.check()
        # Comes first: a client that is told of the end and retries must not be admitted.
        self._set_status("closed", 1.0, "closed")
        self._startup_done.set()
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(ShuttingDownError("the engine was closed"))
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._release())
        # Shielded, so that cancelling the caller does not leave the engine half closed.
        await asyncio.shield(self._closing)

    async def _release(self) -> None:
        self._background.stop()
        await self.inspector.close()
        task, self._main_task = self._main_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        # The metrics' callbacks would keep the model alive.
        self.metrics.on_stopped()
        parts, self._parts, self._loop = self._parts, None, None
        if parts is not None:
            await asyncio.to_thread(parts.close)
        if self.telemetry.active:
            await asyncio.to_thread(self.telemetry.close)

    async def _main(self) -> None:
        try:
            if self.telemetry.wanted:
                await asyncio.to_thread(self.telemetry.open)
            await self._load()
            self._startup_done.set()
            assert self._loop is not None
            await self._loop.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._status = replace(
                self._status, phase="failed", detail=f"{type(error).__name__}: {error}", error=error
            )
            assert self._dead is not None
            if not self._dead.done():
                self._dead.set_result(error)
            self._startup_done.set()
            self._start.failed(error)
            if not isinstance(error, SlipstreamError):
                logger.exception("the engine failed")
            forget_locals(error)

    async def _load(self) -> None:
        event_loop = asyncio.get_running_loop()

        timeline = self._start.timeline

        def report(phase: str, progress: float, detail: str) -> None:
            timeline.phase(phase)
            event_loop.call_soon_threadsafe(self._set_status, phase, progress, detail)

        loading = Loading(self.config, report, timeline)
        try:
            loaded = await asyncio.to_thread(loading.run)
        except asyncio.CancelledError:
            # If the parts were built at this very moment, `close` releases them.
            self._parts = loading.abandon()
            raise
        assert loaded is not None, "nobody abandoned it"
        self._parts = parts = loaded.parts
        progress = self._observer.progress
        self.metrics.on_loaded(
            loaded.facts, lambda: loaded.read(parts, progress.waited(time.monotonic()))
        )
        self._loop = loaded.loop_class(
            parts.scheduler,
            parts.worker,
            self._observer,
            pipeline_depth=self.config.scheduler.pipeline_depth,
        )
        self._set_status("ready", 1.0, "ready")
        self._start.ready(parts)

    def _set_status(self, phase: str, progress: float, detail: str) -> None:
        # The loading thread's reports may arrive late, after a failure or a close.
        if self._status.phase in ("failed", "closed"):
            return
        if phase == "ready" and self._draining:
            phase, detail = "draining", "asked to end while loading"
        self._status = EngineStatus(phase, progress, detail)

    def admit(self) -> Admission:
        """Admit a request that is submitted later. Always release the admission in the end.

        An engine that begins to drain meanwhile waits until it is released.

        Raises
        ------
        NotReadyError, ShuttingDownError
            The engine is loading, draining or closed.
        EngineDeadError, ConfigError, ModelLoadError
            The engine has failed.
        """
        self._check_admits()
        return self._admissions.open()

    def _check_admits(self, *, drains: bool = False) -> tuple[EngineParts, EngineLoop]:
        """The parts and the loop, if it admits; ``drains``: also while it drains."""
        self._own_loop.check()
        self._status.check(drains=drains)
        if self._parts is None or self._loop is None:
            raise self._status.not_ready()
        return self._parts, self._loop

    # The model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `NotReadyError` before the engine is ready."""
        return self._loaded.tokenizer

    @property
    def model_info(self) -> ModelInfo:
        """The model as clients see it; raises `NotReadyError` before it is ready."""
        return self._loaded.info

    @property
    def _loaded(self) -> EngineParts:
        if self._parts is None:
            raise self._status.not_ready()
        return self._parts

    @property
    def timeline(self) -> Timeline:
        """Records of the last steps."""
        return self._observer.timeline

    @property
    def stats(self) -> EngineStats:
        """Figures of this moment; raises `NotReadyError` before the engine is ready."""
        parts = self._loaded
        return stats_of(parts.scheduler, self.timeline, compiled=parts.worker.code.compiled)

    @property
    def adapters(self) -> Adapters:
        """What option ``lora`` may name; raises `NotReadyError` before it is ready."""
        self._own_loop.check()
        return self._loaded.adapters

    # Requests

    def check(self, params: SamplingParams) -> None:
        """Refuse parameters as `generate` would, without a prompt. Works while draining too.

        Raises
        ------
        InvalidRequestError
            A parameter is out of range, or no plugin has brought a logits processor that it names.
        """
        parts, _ = self._check_admits(drains=True)
        parts.builder.check(params, RequestOptions())

    async def tokenize(self, prompt: Prompt, *, chat: ChatOptions | None = None) -> list[int]:
        """Token ids of a prompt as `generate` would use them. Works while draining too."""
        parts, _ = self._check_admits(drains=True)
        return await parts.builder.tokenize(prompt, chat)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """The whole output for one prompt: a text, token ids, or chat messages.

        Cancelling the awaiting task aborts the request, which frees its memory within one step.

        Parameters
        ----------
        params
            ``None``: the checkpoint's own defaults.
        options
            See `RequestOptions`.

        Raises
        ------
        InvalidRequestError, PromptTooLongError
            The request cannot be served as it is.
        QueueFullError, NotReadyError, ShuttingDownError
            It cannot be queued now; ``retry_after`` says in how many seconds to try again.
        RequestAbortedError
            `abort` was called for it.
        EngineDeadError
            The engine failed.
        """
        async with self.submit(prompt, params, **options) as submission:
            result = await submission.result()
        if any(c.finish_reason is FinishReason.ABORT for c in result.completions):
            raise RequestAbortedError(f"request {result.request_id} was aborted")
        return result

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Delta]:
        """The output for one prompt as deltas; arguments and errors are those of `generate`.

        There is one delta per completion and step; deltas coalesce while the reader is slow.
        Closing the generator aborts the request. If a cancelled reader may leave the generator
        suspended, use `submit` instead, which always aborts.
        """
        async with self.submit(prompt, params, **options) as submission:
            async for delta in submission:
                yield delta

    @contextlib.asynccontextmanager
    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        admission: Admission | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[Submission]:
        """Queue a request and yield its stream; leaving the block aborts it if unfinished.

        Arguments and errors are those of `generate`. With an ``admission`` from `admit` the request
        is queued even while the engine drains; its caller releases the admission.
        """
        with Observed(self.telemetry, prompt, options) as observed, contextlib.ExitStack() as used:
            try:
                check_options(params, options)
                own = self.admit() if admission is None else contextlib.nullcontext(admission)
                with own as held:
                    submission = await self._queue(prompt, params, options, observed, held, used)
            except SlipstreamError as error:
                self._refused(error)
                raise
            # The prompt may be large and is token ids by now. It should not live as long as the
            # output takes.
            del prompt, options
            with self._admissions.named(submission.request_id, submission):
                try:
                    yield submission
                finally:
                    submission.abort()

    def _refused(self, error: SlipstreamError) -> None:
        """Count a request that was not queued, and say when one might be."""
        if isinstance(error, QueueFullError):
            wait = self._observer.queue_wait(time.monotonic())
            error.retry_after = min(max(1.0, wait), _MAX_RETRY_AFTER)
        self.metrics.on_refused(error)

    async def _queue(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        observed: Observed,
        admission: Admission,
        used: contextlib.ExitStack,
    ) -> Submission:
        parts, _ = self._check_admits(drains=not admission.revoked)
        parts.info.check("generate")
        adapter = used.enter_context(parts.adapters.using(options.get("lora")))
        params = with_defaults(params, parts.info.default_sampling)
        parts.builder.check(params, options)
        name = options.get("request_id") or os.urandom(16).hex()
        preparation = Preparation(parts.builder, parts.scheduler, params, options, adapter)
        with self._admissions.named(name, preparation):
            requests = await preparation.requests(prompt)
        # The engine may have failed or been closed meanwhile, or the admission was revoked.
        parts, loop = self._check_admits(drains=not admission.revoked)
        submission = Submission(loop, parts.tokenizer, name, requests)
        if observed.active:
            choices, tokenized = submission.choices, preparation.tokenized
            observed.queued(name, prompt, requests, choices, tokenized, parts.tokenizer)
        submission.start(preparation.ended)
        return submission

    async def embed(
        self,
        texts: Sequence[Text],
        *,
        dimensions: int | None = None,
        truncate: int | None = None,
        add_special_tokens: bool = True,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        admission: Admission | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> list[Embedding]:
        """The vectors of texts, or of lists of token ids, in their order: of all or of none.

        Cancelling the awaiting task aborts them.

        Parameters
        ----------
        dimensions
            Numbers of a vector, for models that were trained to be shortened.
        truncate
            Tokens of a text that are kept, see `Embedder.tokens`.
        add_special_tokens
            Whether texts get the tokenizer's special tokens.
        prompt_name
            Name of a prompt of the checkpoint that is put before texts; ``None``: its default.
        normalize
            Whether vectors are scaled to length 1; ``None``: as the checkpoint's files say.
        admission
            From `admit`: they are queued even while the engine drains.
        options
            See `EmbeddingOptions`.

        Raises
        ------
        InvalidRequestError, PromptTooLongError
            The model does not embed, or a text or an option cannot be served as it is.
        QueueFullError, NotReadyError, ShuttingDownError
            They cannot be queued now.
        RequestAbortedError
            `abort` was called for them, or their deadline passed.
        EngineDeadError
            The engine failed.
        """
        run = EmbeddingRun(
            dimensions, truncate, add_special_tokens, prompt_name, normalize, options
        )
        return await self._run(run, lambda parts: parts.embedder, texts, admission)

    async def classify(
        self,
        texts: Sequence[Prompt],
        *,
        use_activation: bool = True,
        truncate: int | None = None,
        add_special_tokens: bool = True,
        admission: Admission | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> list[Classification]:
        """What a classifier says of texts, of lists of token ids, or of chats, in their order.

        Cancelling the awaiting task aborts them.

        Parameters
        ----------
        use_activation
            Whether results are probabilities, as the checkpoint's files say; else they are the
            head's own numbers.
        truncate, add_special_tokens, admission, options
            See `embed`. Of chat messages the first tokens are kept, as of token ids.

        Raises
        ------
        InvalidRequestError, PromptTooLongError
            The model does not classify, or a text or an option cannot be served as it is.
        QueueFullError, NotReadyError, ShuttingDownError, RequestAbortedError, EngineDeadError
            As of `embed`.
        """
        run = self._label_run("classify", use_activation, truncate, add_special_tokens, options)
        return await self._run(run, lambda parts: parts.labeller, texts, admission)

    async def score(
        self,
        pairs: Sequence[tuple[Prompt, Prompt]],
        *,
        use_activation: bool = True,
        truncate: int | None = None,
        max_tokens_per_doc: int | None = None,
        add_special_tokens: bool = True,
        admission: Admission | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> list[Score]:
        """How well the two texts of each pair match, a query and a document, in their order.

        A model that only embeds scores by the cosine of both texts' vectors; equal texts are
        computed once, and they may be token ids as well. Before texts it puts the checkpoint's
        prompts for queries and for documents, where there are some.

        Parameters
        ----------
        use_activation
            Whether a score is what the checkpoint's files make of the head's number. A cosine stays
            what it is.
        truncate
            Tokens of a pair that are kept, see `PairBuilder.tokens`; of each text, where the score
            is a cosine.
        max_tokens_per_doc
            Tokens of the document that are kept.
        add_special_tokens, admission, options
            See `embed`. A template has its special tokens in it.

        Raises
        ------
        InvalidRequestError, PromptTooLongError
            The model does not score, or a pair or an option cannot be served as it is.
        QueueFullError, NotReadyError, ShuttingDownError, RequestAbortedError, EngineDeadError
            As of `embed`.
        """
        parts = self._parts_for("score")
        assert parts.pairs is not None
        if parts.pairs.recipe.joins != "apart":
            joined = PairRun(
                parts.pairs,
                use_activation,
                max_tokens_per_doc,
                truncate,
                add_special_tokens,
                options,
            )
            return await self._run(joined, lambda parts: parts.labeller, pairs, admission)
        assert parts.embedder is not None
        recipe = parts.embedder.recipe
        prompts = (recipe.query_prompt, recipe.document_prompt)
        run = CosineRun(prompts, max_tokens_per_doc, truncate, add_special_tokens, options)
        embeddings = await self._run(run, lambda parts: parts.embedder, pairs, admission)
        return await run.scores(embeddings)

    async def encode(
        self,
        texts: Sequence[Prompt],
        *,
        task: Task,
        use_activation: bool | None = None,
        max_values: int | None = None,
        on_counted: Callable[[int], None] | None = None,
        truncate: int | None = None,
        add_special_tokens: bool = True,
        admission: Admission | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> list[Encoding]:
        """What the model gives for texts, as arrays in float32, in their order.

        Parameters
        ----------
        task
            ``embed``: a vector [numbers]. ``classify``: [labels]. ``token_embed``: a vector of each
            token, [tokens, numbers]. ``token_classify``: [tokens, labels].
        max_values
            Numbers that all results may have together; more are refused. Not of ``embed``.
        on_counted
            Called with how many they are, once all texts are tokens and nothing is computed yet;
            what it raises ends the call. Not of ``embed``.
        use_activation
            Of labels see `classify`. Of vectors whether they are scaled to length 1; ``None``: as
            the checkpoint's files say.
        truncate, add_special_tokens, admission, options
            See `classify`.

        Raises
        ------
        InvalidRequestError, PromptTooLongError
            The model does not do the task, or a text or an option cannot be served as it is.
        QueueFullError, NotReadyError, ShuttingDownError, RequestAbortedError, EngineDeadError
            As of `embed`.
        """
        if task not in ENCODING_TASKS:
            raise InvalidRequestError(
                f"task must be one of {', '.join(ENCODING_TASKS)}, got {str(task)[:100]!r}",
                param="task",
            )
        if task == "embed":
            vectors = await self.embed(
                cast(Sequence[Text], texts),
                truncate=truncate,
                add_special_tokens=add_special_tokens,
                normalize=use_activation,
                admission=admission,
                **options,
            )
            return [encoding_of(each) for each in vectors]
        if task == "token_embed":
            run = TokenVectorRun(None, truncate, add_special_tokens, None, use_activation, options)
            run.max_values, run.on_counted = max_values, on_counted
            return await self._run(run, lambda parts: parts.embedder, texts, admission)
        activates = use_activation is not False
        labels = self._label_run(task, activates, truncate, add_special_tokens, options)
        labels.max_values, labels.on_counted = max_values, on_counted
        made = await self._run(labels, lambda parts: parts.labeller, texts, admission)
        return made if task == "token_classify" else [encoding_of(each) for each in made]

    def _label_run(
        self,
        task: Task,
        use_activation: bool,
        truncate: int | None,
        adds: bool,
        options: EmbeddingOptions,
    ) -> LabelRun:
        labels = self._parts_for(task).info.labels
        assert labels is not None
        kind = LabelRun if task == "classify" else TokenLabelRun
        return kind(labels, use_activation, truncate, adds, options)

    def _parts_for(self, task: Task) -> EngineParts:
        """The parts of a model that does a task."""
        parts, _ = self._check_admits(drains=True)
        try:
            parts.info.check(task)
        except SlipstreamError as error:
            self.metrics.on_refused(error)
            raise
        return parts

    async def _run(
        self,
        run: EmbeddingRun,
        reader: Callable[[EngineParts], Embedder | None],
        texts: Sequence[Any],
        admission: Admission | None,
    ) -> list[Any]:
        """The results of a run's texts; ``reader`` gives what tokenizes them."""
        observed = ObservedRun(self.telemetry, run)
        with observed, contextlib.ExitStack() as stack:
            try:
                own = self.admit() if admission is None else contextlib.nullcontext(admission)
                # Until the last text is queued: what drains must not end between two of them.
                held = stack.enter_context(own)
                stack.enter_context(self._admissions.named(run.request_id, run))
                stack.callback(run.abort)
                parts, _ = self._check_admits(drains=not held.revoked)
                parts.info.check(run.task)
                run.check_options()
                run.trace = observed.trace
                run.adapter = stack.enter_context(parts.adapters.using(run.lora))
                await run.prepare(reader(parts), parts.scheduler, texts)
                del texts
                # The engine may have failed meanwhile, or the admission was revoked.
                parts, loop = self._check_admits(drains=not held.revoked)
                run.queue(parts, loop, held.release)
            except SlipstreamError as error:
                self._refused(error)
                raise
            made = await run.vectors()
            observed.answered(
                len(made),
                sum(each.prompt_tokens for each in made),
                sum(each.cached_tokens for each in made),
            )
            return made

    def abort(self, request_id: str) -> bool:
        """Abort the requests with this id; their readers see it. ``False`` if there is none."""
        self._own_loop.check()
        return self._admissions.abort(request_id)
