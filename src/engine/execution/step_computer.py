"""Computes a planned step, from its rows to their sampled tokens.

There are three ways, and all give the same tokens: a captured graph; one call of the kernel library
with compiled code; or call by call, that is gather, forward pass, head and sampler::

                       captured graph        one call              call by call
    function           _replay               _in_one_call          compute itself
    when               CUDA: a decode step   CPU: code that was    otherwise; the forward
                       of a captured size    compiled ahead        is a graph, if captured
    draws              the graph, then (a)   the call, or (b)      the sampler
    masks are awaited  before the sampler    in the call, before   behind the forward,
                                             its draw; (b) behind  before the head
    scatters tokens    the graph, then (a)   the call, or (b)      `scatter_tokens`

(a): If rows ask for more than a temperature and a seed, for example for masks, the sampler draws
again from the graph's logits, and `scatter_tokens` overwrites the graph's tokens.
(b): If rows ask for more than temperature, seed and masks, or for log-probabilities of a prompt,
the call ends with logits. Then the sampler draws and `scatter_tokens` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from src.compile import LoadedFunction
from src.core.plan import RowFailure, RowStep, StepPlan
from src.core.scoring import ScoreTokens
from src.core.step_message import DeviceRequest
from src.engine.devices.transfer import upload
from src.engine.execution.compiled_program import compiled_program
from src.engine.execution.drafted_steps import DraftedSteps, Verdicts
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs import DecodeGraph, GraphPool, VerifyGraph
from src.engine.execution.inputs import (
    StepInputs,
    build_inputs,
    decode_rows,
    decode_samplers,
    only_sampled,
    padding_inputs,
    sampled_indices,
    sampled_tokens,
)
from src.engine.execution.pooling import RowPooling, Vectors, pooled_by
from src.engine.execution.row_state import RowState
from src.engine.grammar.masks import RowMasks
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.sampling import SampleBatch, SampleOutput, Sampler, truncation
from src.engine.sampling.prompt_logprobs import PromptLogprobs, asks_for_scores, score_prompts
from src.engine.sampling.state import SEED, TEMPERATURE
from src.engine.speculation import KeptHidden
from src.engine.speculation.on_device import Bounds
from src.models import Model
from src.models.program import Function
from src.ops.runtime.compiled import Caller
from src.ops.runtime.step import CompiledStep, MaskGate, StepRows


@dataclass(frozen=True)
class StepOutput:
    """The device results of one step, kept until the copy-out has run."""

    samples: SampleOutput | None
    prompt_scores: PromptLogprobs | None
    failures: Sequence[RowFailure] = ()
    vectors: Vectors | None = None
    # What `KeptHidden` says, on the device; None: nobody wants them.
    hidden: Tensor | None = None
    # What came of drafts that the device has made; samples are then entries of `DraftedSteps`.
    verdicts: Verdicts | None = None
    # Of rows that were looked at on the side, [rows, 3] int32, as `look_up` returns them.
    looked: Tensor | None = None

    def to_host(self) -> StepOutput:
        """Begin the copy to host memory, without waiting for it."""
        return StepOutput(
            None if self.samples is None else self.samples.to_host(),
            None if self.prompt_scores is None else self.prompt_scores.to_host(),
            self.failures,
            None if self.vectors is None else self.vectors.to_host(),
            verdicts=None if self.verdicts is None else self.verdicts.to_host(),
            looked=None if self.looked is None else self.looked.to("cpu", non_blocking=True),
        )


class StepComputer:
    """A model with its KV memory, rows and sampler.

    Call it on the device thread only, except `try_out`.

    Parameters
    ----------
    unscored
        Row -> the request that still waits for log-probabilities of its prompt, or ``None``.
    pooling
        Makes vectors of hidden states.
    score_tokens
        Whose logits make a score; ``None``: the head gives scores.
    bounds
        What the device looks up of drafts, if it makes them.

    Attributes
    ----------
    code
        The code that the next step runs.
    graphs
        Captured steps of ``code``, or ``None``.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        code: Code,
        rows: RowState,
        sampler: Sampler,
        grammars: RowGrammars,
        unscored: Sequence[DeviceRequest | None],
        pooling: RowPooling,
        score_tokens: ScoreTokens | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self.code = code
        self.graphs: GraphPool | None = None
        self._forward_pass = forward_pass
        self._model = forward_pass.model
        self._rows = rows
        self._sampler = sampler
        self._grammars = grammars
        self._unscored = unscored
        self._pooling = pooling
        self._score_tokens = score_tokens
        self._bounds = bounds
        self._drafted = (
            None if bounds is None else DraftedSteps(forward_pass, rows, sampler, bounds.proposing)
        )

    def compute(
        self,
        plan: StepPlan,
        computes: Callable[[], object] = lambda: None,
        *,
        keeps_hidden: KeptHidden = "none",
    ) -> StepOutput:
        """Compute the step; the plan has been applied to its rows.

        Parameters
        ----------
        computes
            Called when the step's inputs, but nothing else, have been enqueued. It is not called if
            the step is one call on the host.
        keeps_hidden
            What ``StepOutput.hidden`` is; a captured decode step has none.
        """
        self._rows.flush()
        graph = None if self.graphs is None else self.graphs.find(plan)
        if isinstance(graph, DecodeGraph):
            return self._replay(plan, graph, computes)
        # Only a plan with bounds has one, and is no plan for this method.
        assert not isinstance(graph, VerifyGraph), "a plan with bounds is for `DraftedSteps`"
        # Read once, because the compiler's thread may swap it at any time.
        code = self.code.serving(adapts=self._rows.uses_adapters(plan))
        if graph is None and code.step is not None:
            return self._in_one_call(plan, code.step, code.functions, keeps_hidden=keeps_hidden)
        inputs = build_inputs(plan, self._rows, 0 if graph is None else graph.num_tokens)
        if graph is None and not self._wants_all(plan) and keeps_hidden != "all":
            inputs = only_sampled(inputs, self._rows)
        # Masks are computed while the forward pass runs; None without a constrained row.
        awaited = self._grammars.masks(inputs.samplers.rows, inputs.samplers.positions)
        computes()
        hidden = self._forward(inputs, code) if graph is None else graph.run(inputs)
        masks = None if awaited is None else awaited.result()
        samples = sampled = None
        if inputs.samplers.rows:
            sampled = hidden if inputs.last is not None else hidden[inputs.sample_index_s]
            samples = self._sample(inputs, sampled, code.functions, masks)
        output = self._output(plan, samples, hidden, code.functions, masks)
        if keeps_hidden == "none":
            return output
        return replace(output, hidden=hidden if keeps_hidden == "all" else sampled)

    def verify(self, plan: StepPlan, computes: Callable[[], object] = lambda: None) -> StepOutput:
        """Compute a plan with bounds, whose rows without any come first."""
        assert self._drafted is not None, "nothing drafts on this device"
        wants_all = self._wants_all(plan)
        graph = None if self.graphs is None or wants_all else self.graphs.find(plan)
        assert graph is None or isinstance(graph, VerifyGraph), "others know no bounds"
        sampling = [step for step in plan.rows if step.samples]
        # Behind a row's bounds nothing is restricted, so the most is as good as what is true.
        most = [step.start + step.slack + step.num_tokens for step in sampling]
        awaited = self._grammars.masks([step.row for step in sampling], most)
        out = self._drafted.compute(plan, self.code, graph, computes, awaited)
        functions = self.code.serving(adapts=self._rows.uses_adapters(plan)).functions
        hidden = out.hidden if wants_all else None
        output = self._output(plan, out.samples, hidden, functions, out.masks)
        return replace(output, verdicts=out.verdicts)

    def look(self, steps: Sequence[RowStep]) -> Tensor:
        """Look on the side whether rows of the exact step before have drafts: [rows, 3] int32."""
        assert self._bounds is not None, "nothing drafts on this device"
        count = len(steps)
        rows = upload([step.row for step in steps], torch.int64, self._rows.device)
        # Its newest token has just been sampled.
        lengths = upload(
            [step.start + step.num_tokens + 1 for step in steps] + [1] * count,
            torch.int32,
            self._rows.device,
        )
        propose = self._bounds.proposing(1)
        return propose(self._rows.tokens, rows, lengths[:count], lengths[count:])

    def try_out(self, code: Code, num_tokens: int) -> None:
        """Run padding through code that is not in use yet; no KV and no row is written."""
        for adapts, variant in ((False, code), (True, code.adapted)):
            if variant is None:
                continue
            if variant.step is not None:
                hidden = variant.step.try_out(num_tokens)
            else:
                padding = padding_inputs(num_tokens, self._rows, adapts=adapts)
                hidden = self._forward(padding, variant)
            self._model.logits(variant.functions, hidden)

    def warm_up(self, num_tokens: int) -> None:
        """Run padding, a draw and truncations, so that Triton compiles its kernels."""
        if self.code.adapted is not None:
            self._forward(padding_inputs(num_tokens, self._rows, adapts=True), self.code.adapted)
        hidden = self._forward(padding_inputs(num_tokens, self._rows), self.code)
        logits = self._model.logits(self.code.functions, hidden[:1])
        row = torch.full((1,), self._rows.padding_row, device=self._rows.device)
        self._sampler.state.flush()
        self._sampler.draw(logits, row, torch.zeros_like(row))
        truncation.warm_up(logits)
        if self._drafted is not None and self._bounds is not None:
            self._drafted.warm_up(self._bounds.most)

    def compiled_step(
        self, caller: Caller, functions: Sequence[LoadedFunction], variant: int = 0
    ) -> CompiledStep | None:
        """Build a step in one call from functions that were compiled ahead of time.

        ``None`` if the kernel library's interpreter does not support the program. Then steps run
        call by call.
        """
        model, cache, rows = self._model, self._forward_pass.kv_cache, self._rows
        assert isinstance(model, Model), "only a program is compiled"
        if self._forward_pass.owners:
            return None
        floats, ints = self._sampler.state.tables
        where = StepRows(
            rows.tokens,
            rows.block_tables,
            floats[:, TEMPERATURE],
            ints[:, SEED],
            model.spec.vocab_size,
            rows.adapter_slots if variant else None,
        )
        program = compiled_program(model, model.variants[variant], functions, cache)
        return None if program is None else CompiledStep(caller, program, where)

    def _in_one_call(
        self,
        plan: StepPlan,
        step: CompiledStep,
        functions: Sequence[Function],
        *,
        keeps_hidden: KeptHidden,
    ) -> StepOutput:
        batch = sampled_tokens(plan)
        count = len(batch.rows)
        wants_hidden = self._wants_all(plan)
        keeps_more = keeps_hidden == "all" and count != plan.num_tokens
        only_draws = self._sampler.only_draws(batch) and not (wants_hidden or keeps_more)
        awaited = self._grammars.masks(batch.rows, batch.positions, as_bits=only_draws)
        numbers: list[int] = []
        for row in plan.rows:
            numbers += (row.row, row.start, row.num_tokens, row.num_sampled, row.verifies)
        own = self._rows.own_inputs.integers(plan)
        self._sampler.state.flush()
        if only_draws:
            gate = None
            if awaited is not None:
                gate = step.gate()
                awaited.add_done_callback(partial(_open, gate))
            try:
                token_ids, hidden = step.draw(
                    numbers, count, gate, wants_hidden=keeps_hidden != "none", own=own
                )
            except ValueError:
                if awaited is not None and awaited.done():
                    # If computing the masks failed, raise that error: it says more.
                    awaited.result()
                raise
            samples = SampleOutput(token_ids, None, (), ()) if count else None
            failures = () if awaited is None else awaited.result().failures
            return StepOutput(samples, None, failures, hidden=hidden)
        hidden, logits = step.compute(
            numbers, count, wants_hidden=wants_hidden or keeps_hidden != "none", own=own
        )
        masks = None if awaited is None else awaited.result()
        samples = None
        if logits is not None:
            rows_s = upload(batch.rows, torch.int64, self._rows.device)
            positions_s = upload(batch.positions, torch.int64, self._rows.device)
            samples = self._choose(logits, replace(batch, positions_s=positions_s), masks)
            self._rows.scatter_tokens(rows_s, positions_s, samples.token_ids)
        output = self._output(plan, samples, hidden if wants_hidden else None, functions, masks)
        if keeps_hidden == "none" or hidden is None:
            return output
        kept = hidden if keeps_hidden == "all" else hidden[sampled_indices(plan)]
        return replace(output, hidden=kept)

    def _replay(
        self, plan: StepPlan, graph: DecodeGraph, computes: Callable[[], object]
    ) -> StepOutput:
        """Run a decode step as one captured graph, and sample again if its rows ask for more."""
        num_rows = len(plan.rows)
        awaited = self._grammars.masks(
            [step.row for step in plan.rows], [step.start + step.num_tokens for step in plan.rows]
        )
        out = graph.run(decode_rows(plan, graph.num_rows, self._rows.padding_row), computes)
        positions_s = out.positions[:num_rows]
        batch = decode_samplers(plan, positions_s)
        masks = None if awaited is None else awaited.result()
        if masks is None and self._sampler.only_draws(batch):
            samples = SampleOutput(out.token_ids[:num_rows], None, (), ())
        else:
            samples = self._choose(out.logits[:num_rows], batch, masks)
            self._rows.scatter_tokens(out.rows[:num_rows], positions_s, samples.token_ids)
        return self._output(plan, samples, out.hidden, self.code.functions, masks)

    def _forward(self, inputs: StepInputs, code: Code) -> Tensor:
        """Hidden states [T, hidden_size], or [S, hidden_size] with ``inputs.last``."""
        return self._forward_pass(inputs, code.functions)

    def _sample(
        self,
        inputs: StepInputs,
        sampled: Tensor,
        functions: Sequence[Function],
        masks: RowMasks | None,
    ) -> SampleOutput:
        """Sample behind hidden states [S, H]."""
        logits = self._model.logits(functions, sampled)
        samples = self._choose(logits, inputs.samplers, masks)
        self._rows.scatter_tokens(
            inputs.sampled_rows_s, inputs.sampled_positions_s, samples.token_ids
        )
        return samples

    def _choose(self, logits: Tensor, batch: SampleBatch, masks: RowMasks | None) -> SampleOutput:
        """Sample one token per row of the batch from logits [S, V], which may be overwritten."""
        if masks is not None:
            mask = masks.to(self._rows.device, logits.shape[1])
            batch = replace(batch, mask=mask, forced=masks.forced)
        return self._sampler.sample(logits, batch, self._rows.tokens)

    def _output(
        self,
        plan: StepPlan,
        samples: SampleOutput | None,
        hidden: Tensor | None,
        functions: Sequence[Function],
        masks: RowMasks | None,
    ) -> StepOutput:
        """The step's output; without ``hidden`` no prompt is scored."""
        scores = vectors = None
        if hidden is not None:
            if self._pooling.wants(plan):
                vectors = self._pooled(plan, hidden, functions)
            scores = score_prompts(
                plan,
                self._unscored,
                hidden,
                self._rows.tokens,
                lambda positions: self._model.logits(functions, positions),
            )
        return StepOutput(samples, scores, () if masks is None else masks.failures, vectors)

    def _pooled(
        self, plan: StepPlan, hidden: Tensor, functions: Sequence[Function]
    ) -> Vectors | None:
        """Vectors of the rows that are pooled, or their scores by the head."""
        return pooled_by(self._pooling, plan, hidden, self._model, functions, self._score_tokens)

    def _wants_all(self, plan: StepPlan) -> bool:
        """Whether the hidden state of every token is needed, not only of those that sample."""
        return self._pooling.wants(plan) or asks_for_scores(plan, self._unscored)


def _open(gate: MaskGate, done: Future[RowMasks]) -> None:
    """Let the waiting step draw with its masks, or make it fail if computing them failed."""
    try:
        masks = done.result()
    except BaseException:
        gate.fail()
    else:
        gate.open(masks.table, masks.rows)
