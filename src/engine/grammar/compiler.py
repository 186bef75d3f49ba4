"""Compiles grammars off the event loop, within bounds, and caches the latest.

Each grammar is first tried in another process (`trial`), which a bad grammar may crash or hang. A
grammar that passes is compiled here, in a thread, in about the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from llguidance import LLTokenizer

from src.core.config import StructuredOutputSection
from src.core.errors import (
    QueueFullError,
    ShuttingDownError,
    SlipstreamError,
    UnavailableError,
)
from src.core.settings import CHECKOUT, PREFIX
from src.core.structured_output import StructuredOutput
from src.core.turn_pool import Job, TurnPool
from src.engine.grammar.compiled import (
    Candidate,
    CompiledGrammar,
    GrammarError,
    compile_matcher,
    with_options,
)
from src.engine.grammar.constraints import (
    MAX_LANE_STATES,
    ConstraintTokenizer,
    constraint_tokenizer,
    num_lanes,
)
from src.engine.grammar.grammar_text import grammar_candidate, refusal
from src.engine.grammar.spelling import Spelling
from src.engine.grammar.trial import Setup, Verdict, read_frame, write_frame
from src.engine.grammar.vocabulary import Vocabulary
from src.text import Tokenizer

logger = logging.getLogger(__name__)

# Grammars that are compiled at the same time. A slow one occupies one worker.
_WORKERS: Final = 2
# The most grammars that may be waiting or compiling.
_MAX_WAITING: Final = 256
# Seconds for a trial process to start, on a busy machine.
_START_SECONDS: Final = 60.0
# `retry_after` in seconds if no trial process could be started.
_RETRY_AFTER: Final = 5.0
# The longest grammar, in characters, whose forced texts are drafts. One that is forced is found in
# one call, however long it is.
_LONGEST_SPELLED: Final = 1 << 14


@dataclass(frozen=True)
class Tokenizers:
    """A vocabulary in the forms for matchers and, if available, for constraints; and its texts."""

    matchers: LLTokenizer
    constraints: ConstraintTokenizer | None
    spelling: Spelling

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, tokenize: Callable[[str], list[int]] | None = None
    ) -> Tokenizers:
        """Build both forms; takes some tenths of a second for a large vocabulary.

        ``tokenize`` spells what a grammar forces; without it the longest tokens do.
        """
        matchers = vocabulary.build()
        spelling = Spelling(vocabulary, tokenize or matchers.greedy_tokenize)
        return cls(matchers, constraint_tokenizer(vocabulary), spelling)


@dataclass
class _Compilation:
    """A running compilation: its ``job`` in the pool, its task, and the number of waiters.

    Any of its owners may have the turn in which it is compiled; it counts as the first one's.
    """

    job: Job[CompiledGrammar]
    done: asyncio.Task[CompiledGrammar]
    owners: set[str]
    num_waiting: int = 0


def compile_grammar(tokenizers: Tokenizers, lark: str) -> CompiledGrammar:
    """Compile a grammar.

    Raises
    ------
    GrammarError
        See `compile_matcher`.
    """
    recompile = functools.partial(compile_matcher, tokenizers.matchers, lark)
    started = time.thread_time()
    matcher = recompile()
    seconds = time.thread_time() - started
    lanes = []
    if tokenizers.constraints is not None:
        text, count = with_options(lark), num_lanes()
        most = MAX_LANE_STATES // count
        roots = [tokenizers.constraints.compile(text, most) for _ in range(count)]
        lanes = [root for root in roots if root is not None]
    spelling = tokenizers.spelling if len(lark) <= _LONGEST_SPELLED else None
    return CompiledGrammar(matcher, tokenizers.matchers, lanes, recompile, seconds, spelling)


class GrammarCompiler:
    """Compiles and caches the grammars of one model. Builds nothing before the first request.

    Parameters
    ----------
    vocab_size
        Width of the model's logits.
    end_token_ids
        The model's own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_token_ids: Sequence[int],
        bounds: StructuredOutputSection,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = tuple(i for i in end_token_ids if 0 <= i < vocab_size)
        self._bounds = bounds
        self._pool = TurnPool(_WORKERS, "slipstream-compile-grammar")
        self._lock = threading.Lock()
        self._built: tuple[Vocabulary, Tokenizers] | None = None
        self._idle: queue.LifoQueue[_Trial] = queue.LifoQueue()
        self._trials: set[_Trial] = set()
        self._closed = False
        # Used on the event loop only: the cached grammars, the newest last.
        self._known: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._compiling: dict[StructuredOutput, _Compilation] = {}

    async def compile(self, output: StructuredOutput, owner: str = "") -> CompiledGrammar:
        """The compiled grammar, from the cache or compiled once it is the turn of ``owner``.

        Raises
        ------
        InvalidRequestError
            It cannot be compiled, or takes too much time or memory.
        QueueFullError
            Too many grammars wait to be compiled, or too many of this owner.
        UnavailableError
            The trial process could not be started.
        ShuttingDownError
            The compiler was closed, before or meanwhile.
        """
        self._check_open()
        known = self._known.get(output)
        if known is not None and not known.is_spent:
            self._known.move_to_end(output)
            return known
        compilation = self._compiling.get(output) or self._begin(output, owner)
        if owner not in compilation.owners:
            self._share(compilation, owner)
        compilation.num_waiting += 1
        # Shielded, because other requests may wait for the same grammar.
        try:
            return await asyncio.shield(compilation.done)
        except SlipstreamError as error:
            # A copy for each waiter: an error that is raised repeatedly keeps every traceback.
            raise copy.copy(error) from None
        finally:
            compilation.num_waiting -= 1
            # If no request waits any more, a compilation that has not begun is cancelled.
            if compilation.num_waiting == 0 and compilation.job.future.cancel():
                self._compiling.pop(output, None)

    def close(self) -> None:
        """Kill the trial processes. Running compilations fail."""
        with self._lock:
            self._closed = True
            trials = list(self._trials)
        for trial in trials:
            trial.kill()
        self._pool.close()
        for trial in trials:
            trial.close()

    def _begin(self, output: StructuredOutput, owner: str) -> _Compilation:
        self._check_room(owner)
        try:
            job = self._pool.submit(owner, functools.partial(self._compile_now, output))
        except RuntimeError:  # it was shut down a moment ago
            self._check_open()
            raise
        done = asyncio.ensure_future(self._finish(job))
        compilation = self._compiling[output] = _Compilation(job, done, {owner})
        done.add_done_callback(lambda _: self._finished(output, compilation))
        return compilation

    def _share(self, compilation: _Compilation, owner: str) -> None:
        compilation.owners.add(owner)
        try:
            self._pool.share(owner, compilation.job)
        except RuntimeError:  # it was shut down a moment ago
            self._check_open()
            raise

    def _check_room(self, owner: str) -> None:
        waiting = len(self._compiling)
        if waiting >= _MAX_WAITING:
            raise QueueFullError("too many grammars wait to be compiled")
        own = sum(each.job.owner == owner for each in self._compiling.values())
        # An owner leaves as much room to others as it takes, as in the engine's waiting queue.
        if owner and own and waiting + own + 2 > _MAX_WAITING:
            raise QueueFullError(
                f"{own} grammars of this key wait to be compiled, of {waiting} in all",
                code="queue_full",
            )

    async def _finish(self, job: Job[CompiledGrammar]) -> CompiledGrammar:
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            # A pool that is shut down cancels jobs that it had not begun.
            self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ShuttingDownError("the engine was closed")

    def _finished(self, output: StructuredOutput, compilation: _Compilation) -> None:
        # A cancelled compilation was removed before, and there may be a newer one.
        if self._compiling.get(output) is compilation:
            del self._compiling[output]
        done = compilation.done
        if done.cancelled() or done.exception() is not None:
            return
        self._known[output] = done.result()
        self._known.move_to_end(output)
        while len(self._known) > self._bounds.cached_grammars:
            self._known.popitem(last=False)

    def _compile_now(self, output: StructuredOutput) -> CompiledGrammar:
        candidate = grammar_candidate(output, self._bounds)
        vocabulary, tokenizers = self._vocabulary()
        try:
            lark = self._tried(candidate, vocabulary)
            return compile_grammar(tokenizers, lark)
        except GrammarError as error:
            # If `close` has killed the trial process, the error is not the grammar's.
            self._check_open()
            raise refusal(str(error)) from None

    def _vocabulary(self) -> tuple[Vocabulary, Tokenizers]:
        with self._lock:
            if self._built is None:
                if not self._end_token_ids:
                    raise refusal("this model has no end token, so no output can be complete")
                if self._tokenizer.cleans_up:
                    raise refusal("this model's tokenizer changes its text afterwards")
                vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size, self._end_token_ids)
                tokenize = functools.partial(self._tokenizer.encode, add_special_tokens=False)
                self._built = vocabulary, Tokenizers.of(vocabulary, tokenize)
            return self._built

    def _tried(self, candidate: Candidate, vocabulary: Vocabulary) -> str:
        """Try the candidate in a trial process; returns the Lark text to compile here."""
        trial = self._idle_trial() or self._start_trial(vocabulary)
        try:
            verdict = trial.verdict(candidate, self._bounds.compile_seconds)
        except BaseException:
            self._discard(trial)
            raise
        self._idle.put(trial)
        if verdict.fault:
            raise GrammarError(verdict.fault)
        if verdict.dropped:
            # Not which: places and reasons are made of names that a client has chosen.
            logger.warning(
                "parts of the tools' schemas cannot be enforced and are left out: %d",
                len(verdict.dropped),
            )
        return verdict.lark

    def _idle_trial(self) -> _Trial | None:
        while True:
            try:
                trial = self._idle.get_nowait()
            except queue.Empty:
                return None
            if trial.is_usable:
                return trial
            # It ended while idle, which is not the next grammar's fault.
            self._discard(trial)

    def _start_trial(self, vocabulary: Vocabulary) -> _Trial:
        bounds = self._bounds
        setup = Setup(vocabulary, bounds.compile_memory_bytes, 2 * bounds.compile_seconds)
        try:
            trial = _Trial()
        except OSError:
            logger.exception("no grammar can be tried")
            raise _no_trial() from None
        with self._lock:
            self._trials.add(trial)
        try:
            # After adding it, because `close` kills only the processes in `_trials`.
            self._check_open()
            trial.set_up(setup)
        except BaseException:
            self._discard(trial)
            self._check_open()
            logger.exception("no grammar can be tried")
            raise
        return trial

    def _discard(self, trial: _Trial) -> None:
        with self._lock:
            self._trials.discard(trial)
        trial.kill()
        trial.close()


def _no_trial() -> UnavailableError:
    # Not the grammar's fault, and temporary: the machine lacks memory or time.
    return UnavailableError(
        "the process that tries grammars did not start",
        retry_after=_RETRY_AFTER,
        code="compiler_unavailable",
    )


class _Trial:
    """One `trial` process."""

    def __init__(self) -> None:
        # Without the server's settings, since these may contain keys.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "src.engine.grammar.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=CHECKOUT,
            env=environment,
        )
        self._is_killed = False

    def set_up(self, setup: Setup) -> None:
        """Send the vocabulary, and wait until the process is ready.

        Raises
        ------
        UnavailableError
            The process does not start.
        """
        if self._ask(msgspec.msgpack.encode(setup), _START_SECONDS) is None:
            raise _no_trial()

    def verdict(self, candidate: Candidate, seconds: float) -> Verdict:
        """Try a grammar.

        Raises
        ------
        GrammarError
            The process ran out of time, memory or stack, and has ended.
        """
        answer = self._ask(msgspec.msgpack.encode(candidate), seconds)
        if answer is None:
            logger.info("a grammar could not be compiled within its bounds")
            raise GrammarError(
                f"it takes more than {seconds:g} s, too much memory or too deep a stack to compile"
            )
        return msgspec.msgpack.decode(answer, type=Verdict)

    @property
    def is_usable(self) -> bool:
        """Whether the process can try another grammar."""
        # A process that was just killed may not have ended yet.
        return not self._is_killed and self._process.poll() is None

    def kill(self) -> None:
        """Kill the process. A thread that waits for its answer gets none."""
        self._end()
        self._process.wait()

    def _end(self) -> None:
        self._is_killed = True
        self._process.kill()

    def close(self) -> None:
        """Close the pipes, once the process has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            # Unwritten data cannot be flushed to an ended process.
            with contextlib.suppress(OSError):
                pipe.close()

    def _ask(self, frame: bytes, seconds: float) -> bytes | None:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        # Killing the process ends the read below.
        timer = threading.Timer(seconds, self._end)
        timer.start()
        answer = None
        try:
            with contextlib.suppress(OSError):
                write_frame(requests, frame)
                answer = read_frame(answers)
        finally:
            timer.cancel()
            # A timer that is firing may kill the process after its answer: wait, to know it.
            timer.join()
        if answer is None:
            self.kill()
            self.close()
        return answer
