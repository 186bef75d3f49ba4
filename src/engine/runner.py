"""Runs planned steps on the device, in order, one behind the other.

Steps are executed by one *device thread*. On the CPU backend the thread computes; on CUDA it only
enqueues, and a *waiter thread* blocks on the step's copy-out event with the interpreter lock
released. Either way the event loop never waits for the device, and step N+1 is queued behind step N
before anybody has seen step N's tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from src.core.errors import EngineDeadError, SlipstreamError
from src.core.plan import RowResult, StepPlan, StepResult, StepTimes
from src.core.request import Request
from src.engine.in_flight import InFlight
from src.engine.inputs import StepInputs, build_inputs, padding_inputs
from src.engine.kv_cache import KVCache
from src.engine.prompt_scores import PromptScores, score_prompts
from src.engine.row_state import RowState
from src.engine.sampling import SampleOutput, Sampler
from src.engine.structured.row_grammars import RowGrammars, RowMasks
from src.models.decoder import Decoder
from src.models.regions import Regions
from src.ops import paged_attention
from src.ops.cpu.compiled import Caller
from src.ops.cpu.forward import CompiledForward

T = TypeVar("T")

# More than one, so that nothing is taken for a constant; few, since it costs time at every start.
_WARM_UP_TOKENS = 8


class DeviceLostError(EngineDeadError):
    """The device is in a state from which only a restart helps."""


class RunnerClosedError(SlipstreamError):
    """The runner was closed while it was in use."""


@dataclass(frozen=True)
class StepOutput:
    """What one step leaves on the device until the copy-out has run."""

    samples: SampleOutput | None
    prompt_scores: PromptScores | None
    failures: Sequence[tuple[int, str]] = ()

    def to_host(self) -> StepOutput:
        """Begin the copy to host memory, without waiting for it."""
        return StepOutput(
            None if self.samples is None else self.samples.to_host(),
            None if self.prompt_scores is None else self.prompt_scores.to_host(),
            self.failures,
        )


class Code(NamedTuple):
    """What a step's forward pass runs."""

    regions: Regions
    # Everything from token ids to hidden states in one call; None: region by region.
    forward: CompiledForward | None = None


class Runner:
    """The only owner of the device: streams, threads, rows and KV memory.

    Parameters
    ----------
    regions
        The model's regions, compiled or not.
    num_threads
        Intra-op threads of the device thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        regions: Regions,
        kv_cache: KVCache,
        rows: RowState,
        sampler: Sampler,
        *,
        num_threads: int,
    ) -> None:
        self._decoder = decoder
        self._code = Code(regions)
        self._kv_cache = kv_cache
        self._rows = rows
        self._sampler = sampler
        self._device = decoder.spec.device
        # Of the device thread alone: row -> its newest owner, and unfinished requests by key.
        self._requests: list[Request | None] = [None] * len(rows.tokens)
        self._known: dict[int, Request] = {}
        self._on_cuda = self._device.type == "cuda"
        self._grammars = RowGrammars(
            len(rows.tokens), decoder.spec.vocab_size, on_cpu=not self._on_cuda
        )
        self._stream = torch.cuda.Stream(self._device) if self._on_cuda else None
        self._num_threads = num_threads
        self.compiled = False
        # Seconds that the compilation took, once it has ended.
        self.compile_seconds = 0.0
        self.closed = False
        self._device_thread = ThreadPoolExecutor(
            1, "slipstream-device", torch.set_num_threads, (num_threads,)
        )
        self._waiter_thread = ThreadPoolExecutor(1, "slipstream-waiter")
        if self._on_cuda:
            # Weights and KV memory were written on other streams than the steps'.
            torch.cuda.synchronize(self._device)

    @property
    def is_on_cpu(self) -> bool:
        """Whether steps are computed on the host."""
        return not self._on_cuda

    @property
    def num_graphs(self) -> int:
        """Graphs that the compiler made of the regions in use; more than those, it recompiled."""
        return sum(getattr(region, "num_graphs", 0) for region in self._code.regions)

    @property
    def num_threads(self) -> int:
        """Intra-op threads of a step."""
        return self._num_threads

    def launch(
        self, plan: StepPlan, admitted: Sequence[Request], ended: Sequence[int] = ()
    ) -> InFlight:
        """Queue a step behind those launched before; returns at once.

        ``admitted`` are the requests that ``plan`` installs for the first time, ``ended`` the keys
        of those that no later plan installs again.
        """
        loop = asyncio.get_running_loop()
        for key in ended:
            self._grammars.abandon(key)
        in_flight = InFlight(plan, loop.create_future(), StepTimes(launched=time.monotonic()))
        self._device_thread.submit(self._run, in_flight, admitted, ended, loop)
        return in_flight

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run something on the device thread, behind the steps that are launched."""
        return self._device_thread.submit(function)

    def swap_in(self, code: Code, seconds: float | None = None) -> None:
        """Try compiled code on padding, then use it from the next step on.

        Blocks; meant for a thread of its own while steps go on with the code of before. The padding
        writes neither KV memory nor rows, so it disturbs no step. Code that is compiled at its
        first call is so here.

        Parameters
        ----------
        seconds
            That its compilation took before.
        """
        # Compiled code is guarded by the number of threads, which belongs to the calling thread.
        torch.set_num_threads(self._num_threads)
        started = time.monotonic()
        with torch.inference_mode():
            hidden = self._forward(padding_inputs(_WARM_UP_TOKENS, self._rows), code)
            self._decoder.logits(code.regions, hidden)
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        self._code = code
        self.compile_seconds = (seconds or 0.0) + time.monotonic() - started
        self.compiled = True

    def compiled_forward(self, caller: Caller, regions: Regions) -> CompiledForward:
        """The forward pass in one call, of regions that were compiled ahead of time."""
        spec = self._decoder.spec
        return CompiledForward(
            caller,
            [region.bind(*arguments) for region, arguments in self._decoder.calls(regions)],
            self._kv_cache.keys,
            self._kv_cache.values,
            [window or 0 for window in spec.sliding_windows],
            num_heads=self._decoder.region_spec.num_heads,
            scale=spec.attention_scale,
            num_threads=self._num_threads,
            deterministic=self._decoder.region_spec.deterministic,
        )

    def close(self) -> None:
        """Let the launched steps end and stop the threads. Blocks.

        What compiles in another thread at its first call ends at the end of the region that it is
        in.
        """
        self._device_thread.shutdown(wait=True)
        self._waiter_thread.shutdown(wait=True)
        self._grammars.close()
        self.closed = True

    def _run(
        self,
        in_flight: InFlight,
        admitted: Sequence[Request],
        ended: Sequence[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._execute(in_flight, admitted, ended, loop)
        except Exception as error:
            self._fail(in_flight, self._neutralize(in_flight.plan, error), loop)

    def _neutralize(self, plan: StepPlan, error: Exception) -> Exception:
        """Make harmless what a failed step left in its rows; returns what the step failed with.

        Where not even that is possible the device is lost, and nobody may wait for the step.
        """
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                for install in plan.installs:
                    self._requests[install.row] = self._known[install.request_key]
                self._rows.neutralize(plan)
        except Exception as again:
            lost = DeviceLostError(f"the rows of a failed step cannot be written: {again}")
            lost.__cause__ = error
            return lost
        return error

    def _execute(
        self,
        in_flight: InFlight,
        admitted: Sequence[Request],
        ended: Sequence[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        plan, times = in_flight.plan, in_flight.times
        times.device_start = time.monotonic()
        started = _recorded_event() if self._on_cuda else None
        for request in admitted:
            self._known[request.key] = request
        for key in ended:
            self._known.pop(key, None)
            self._grammars.forget(key)
        self._apply(plan)
        output = self._compute(plan)
        if started is None:
            self._follow(plan, output, None)
            result = self._read(plan, output)
            times.device_end = time.monotonic()
            _post(loop, in_flight, result)
            return
        host_output = output.to_host()
        finished = _recorded_event()
        in_flight.holds += [output, host_output]
        self._follow(plan, host_output, finished)
        self._waiter_thread.submit(self._await, in_flight, host_output, started, finished, loop)

    def _follow(
        self, plan: StepPlan, output: StepOutput, finished: torch.cuda.Event | None
    ) -> None:
        """Let the grammars know what the step samples, as soon as it is on the host."""
        samples = output.samples
        if samples is None:
            return

        def read() -> list[int]:
            if finished is not None:
                finished.synchronize()
            token_ids: list[int] = samples.token_ids.tolist()
            return token_ids

        self._grammars.follow([step.row for step in plan.rows if step.samples], read)

    def _apply(self, plan: StepPlan) -> None:
        for install in plan.installs:
            request = self._known[install.request_key]
            self._requests[install.row] = request
            self._rows.install(install)
            self._sampler.state.install(install.row, request, install.prompt_len)
            output = install.token_ids[install.prompt_len :]
            self._grammars.install(install.row, request, output)
        for append in plan.block_appends:
            self._rows.append_blocks(append)
        self._grammars.begin()

    def _compute(self, plan: StepPlan) -> StepOutput:
        inputs = build_inputs(plan, self._rows)
        # One look: the compiler may swap it between two steps.
        code = self._code
        # They are computed while the forward runs; without a constrained row there are none.
        awaited = self._grammars.masks(inputs.samplers.rows)
        hidden = self._forward(inputs, code)
        masks = None if awaited is None else awaited.result()
        samples = (
            self._sample(inputs, hidden, code.regions, masks) if inputs.samplers.rows else None
        )
        return StepOutput(
            samples,
            self._score_prompts(plan, hidden, code.regions),
            () if masks is None else masks.failures,
        )

    def _forward(self, inputs: StepInputs, code: Code) -> Tensor:
        """Hidden states [T, hidden_size]."""
        if code.forward is not None:
            return code.forward(
                inputs.input_ids_t,
                inputs.positions_t,
                inputs.block_tables_b,
                inputs.query_start_loc,
                inputs.seq_lens_b,
                inputs.slot_mapping_t,
            )
        spec = self._decoder.spec

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if self.closed:
                raise RunnerClosedError("the runner was closed")
            out = torch.empty_like(query)  # [T, num_heads, head_dim]
            paged_attention(
                query,
                key,
                value,
                self._kv_cache.keys[layer],
                self._kv_cache.values[layer],
                inputs.block_tables_b,
                inputs.query_start_loc,
                inputs.seq_lens_b,
                inputs.slot_mapping_t,
                out,
                spec.attention_scale,
                spec.sliding_windows[layer] or 0,
                inputs.max_query_len,
                inputs.max_seq_len,
                self._decoder.region_spec.deterministic,
            )
            return out.flatten(1)

        return self._decoder.forward(code.regions, inputs.input_ids_t, inputs.positions_t, attend)

    def _sample(
        self, inputs: StepInputs, hidden: Tensor, regions: Regions, masks: RowMasks | None
    ) -> SampleOutput:
        logits = self._decoder.logits(regions, hidden[inputs.sample_index_s])
        batch = inputs.samplers
        if masks is not None:
            batch = replace(batch, mask=masks.to(self._device, logits.shape[1]))
        samples = self._sampler.sample(logits, batch, self._rows.tokens)
        self._rows.scatter_tokens(
            inputs.sampled_rows_s, inputs.sampled_positions_s, samples.token_ids
        )
        return samples

    def _score_prompts(
        self, plan: StepPlan, hidden: Tensor, regions: Regions
    ) -> PromptScores | None:
        return score_prompts(
            plan,
            self._requests,
            hidden,
            self._rows.tokens,
            lambda positions: self._decoder.logits(regions, positions),
        )

    def _read(self, plan: StepPlan, output: StepOutput) -> StepResult:
        """Turn host tensors into a result, rows in the plan's order."""
        samples, scores = output.samples, output.prompt_scores
        token_ids = iter(samples.token_ids.tolist() if samples else ())
        logprobs = iter(samples.logprob_lists() if samples else ())
        rows = []
        for index, step in enumerate(plan.rows):
            prompt_logprobs = scores.of_row(index) if scores else None
            if step.samples:
                scored = next(logprobs)
                rows.append(
                    RowResult(
                        step.row,
                        step.generation,
                        [next(token_ids)],
                        None if scored is None else [scored],
                        prompt_logprobs,
                    )
                )
            else:
                rows.append(RowResult(step.row, step.generation, [], None, prompt_logprobs))
        return StepResult(plan.step_id, rows, output.failures)

    def _await(
        self,
        in_flight: InFlight,
        host_output: StepOutput,
        started: torch.cuda.Event,
        finished: torch.cuda.Event,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """On the waiter thread: block on the copy-out, then hand the result to the event loop."""
        try:
            finished.synchronize()
            times = in_flight.times
            times.device_end = time.monotonic()
            times.device_start = times.device_end - started.elapsed_time(finished) / 1000
            _post(loop, in_flight, self._read(in_flight.plan, host_output))
        except Exception as error:
            self._fail(in_flight, error, loop)

    def _fail(self, in_flight: InFlight, error: Exception, loop: asyncio.AbstractEventLoop) -> None:
        in_flight.times.device_end = time.monotonic()
        if self._on_cuda and not _cuda_is_sound(self._device):
            lost = DeviceLostError("the CUDA device failed")
            lost.__cause__ = error
            error = lost
        _post(loop, in_flight, error)


def _cuda_is_sound(device: torch.device) -> bool:
    """Whether the device still answers: after a fault in a kernel every later call fails too."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def _post(
    loop: asyncio.AbstractEventLoop,
    in_flight: InFlight,
    outcome: StepResult | Exception,
) -> None:
    """Resolve a step's future from another thread; the loop may be gone by then."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_resolve, in_flight, outcome)


def _resolve(in_flight: InFlight, outcome: StepResult | Exception) -> None:
    future = in_flight.future
    in_flight.times.arrived = time.monotonic()
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
