"""Computes steps with each sampling parameter on CUDA tensors that are not there.

A program of its own, see `tests.support.fake_cuda`; its argument is a checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

import src.models.loading.loader
from src.core.config import Config
from src.core.plan import BlockAppend, RowInstall, RowStep, StepPlan
from src.core.sampling_params import SamplingParams
from src.core.step_message import DeviceRequest
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs.decode import DecodeCapture
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.memory_profile import compute_largest_step
from src.engine.execution.mixers import latent_attention as latent_mixer
from src.engine.execution.pooling import RowPooling
from src.engine.execution.row_state import RowState
from src.engine.execution.step_computer import StepComputer, StepOutput
from src.engine.grammar.masks import RowMasks
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.sampling import SampleBatch, Sampler, SamplingState
from src.models import load_model
from src.models.loading.options import LoadOptions
from src.ops.attention import latent_expansion
from src.ops.attention.latent_expansion import Expansion
from tests.support.fake_cuda import DEVICE, NobodyWaits, fake_cuda
from tests.support.rotation import rotates_in_mixers

ROWS, BLOCK_SIZE, PROMPT = 16, 16, 14
END_IDS, BAD_WORDS = frozenset((1, 7)), ((5, 6), (8,))
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.9, min_p=0.1),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1),
    SamplingParams(logit_bias={5: 2.0, 9: -100.0}),
    SamplingParams(allowed_token_ids=(3, 4, 5)),
    SamplingParams(min_tokens=4),
    SamplingParams(logprobs=5),
    SamplingParams(prompt_logprobs=3),
    SamplingParams(bad_words=("two words", "word")),
)


class Steps:
    """An engine's device half, whose tensors are all on `DEVICE`."""

    def __init__(self, checkpoint: Path, *, rotates: bool) -> None:
        model = load_model(
            checkpoint, LoadOptions(dtype="bfloat16", device=DEVICE, load_format="dummy")
        )
        assert rotates_in_mixers(model) is rotates
        cache = allocate_kv_cache(model.kv_cache_spec(), KVCachePlan(BLOCK_SIZE, 64, 0), DEVICE)
        self.vocab_size = model.spec.vocab_size
        self.rows = RowState(
            max_num_seqs=ROWS,
            max_model_len=256,
            block_size=BLOCK_SIZE,
            device=DEVICE,
            page_blocks=cache.layout.page_blocks,
        )
        self.num_groups = len(cache.layout.groups)
        self.sampler = Sampler(SamplingState(ROWS, self.vocab_size, DEVICE))
        self.requests: list[DeviceRequest | None] = [None] * ROWS
        with unset_fake_temporarily():
            self.grammars = RowGrammars(ROWS, self.vocab_size, on_cpu=False)
        self.forward, self.code = ForwardPass(model, cache), Code(model.functions)
        self.computer = StepComputer(
            *(self.forward, self.code, self.rows, self.sampler, self.grammars, self.requests),
            RowPooling([None] * ROWS, model.spec.hidden_size, DEVICE),
        )

    def install(self, row: int, params: SamplingParams) -> RowInstall:
        prompt = list(range(3, 3 + PROMPT))
        request = DeviceRequest(
            key=row,
            prompt_len=PROMPT,
            params=params,
            seed=row,
            end_token_ids=END_IDS,
            bad_words_token_ids=BAD_WORDS if params.bad_words else (),
        )
        self.requests[row] = request
        installed = RowInstall(row, 1, row, prompt, PROMPT, [[2 * row]] * self.num_groups)
        self.rows.install(installed)
        self.sampler.state.install(row, request, PROMPT)
        return installed

    def run(self, kinds: tuple[SamplingParams, ...]) -> None:
        """A prompt of each kind in two chunks, and four tokens."""
        installs = [self.install(row, params) for row, params in enumerate(kinds)]
        half, count = PROMPT // 2, range(len(kinds))
        self.step(StepPlan(0, installs, [], [RowStep(i, 1, 0, half, False) for i in count]))
        rest = [RowStep(i, 1, half, PROMPT - half, True) for i in count]
        self.step(StepPlan(1, [], [], rest))
        for start in range(PROMPT, PROMPT + 4):
            appends = []
            if start == BLOCK_SIZE:
                groups = range(self.num_groups)
                appends = [BlockAppend(i, group, 1, [2 * i + 1]) for i in count for group in groups]
                for append in appends:
                    self.rows.append_blocks(append)
            decode = [RowStep(i, 1, start, 1, True) for i in count]
            self.step(StepPlan(start, [], appends, decode))

    def step(self, plan: StepPlan) -> None:
        out: StepOutput = self.computer.compute(plan).to_host()
        sampling = sum(row.samples for row in plan.rows)
        if out.samples is None:
            assert not sampling
        else:
            assert out.samples.token_ids.shape == (sampling,)
            assert out.samples.token_ids.device.type == "cpu"

    def compute_as_captured(self) -> None:
        """What a graph of a whole decode step has in it."""
        backend: Any = None
        capture = DecodeCapture(
            *(backend, self.forward, self.code, self.rows, self.sampler), max_rows=ROWS
        )
        for rows in (1, ROWS):
            out = capture._compute(capture.buffer[: 4 * rows + 1], adapts=False)
            assert all(each.device == DEVICE for each in out)
            assert out.token_ids.shape == (rows,)

    def choose_under_masks(self) -> None:
        """A token for each row, of which every other one has a grammar, and one has no choice."""
        rows = list(range(len(KINDS)))
        with unset_fake_temporarily():
            table = torch.zeros(ROWS, -(-self.vocab_size // 32), dtype=torch.int32)
        masks = RowMasks(table, [row if row % 2 else -1 for row in rows], None, (), forced=[1])
        positions = torch.zeros(len(rows), dtype=torch.int64, device=DEVICE)
        logits = torch.zeros(len(rows), self.vocab_size, device=DEVICE)
        batch = SampleBatch(rows, [PROMPT + 4] * len(rows), positions)
        samples = self.computer._choose(logits, batch, masks)
        assert samples.token_ids.shape == (len(rows),)


class Plans:
    """The plans of latent attention that layers ask for; prompts as short as here are expanded."""

    def __init__(self) -> None:
        self.made: list[Expansion | None] = []
        latent_expansion.FEWEST_ON_GPU = PROMPT // 4
        latent_mixer.plan_expansion = self._plan  # type: ignore[assignment]

    def _plan(self, *given: Any) -> Expansion | None:
        plan = latent_expansion.plan_expansion(*given)
        self.made.append(plan)
        return plan

    def check(self) -> None:
        """Each step with a prompt's tokens makes one for all layers, and no other step does."""
        half = PROMPT // 2
        # Of the second chunk few queries would pay for many keys.
        expected = [plan for rows in (*[1] * len(KINDS), len(KINDS)) for plan in (rows * half, -1)]
        assert [-1 if plan is None else plan.keys for plan in self.made] == expected


def main() -> None:
    # Values are of no use, and random ones come of a device's generator.
    src.models.loading.loader.fill_dummy = lambda *_: None
    with fake_cuda():
        steps = Steps(Path(sys.argv[1]), rotates=sys.argv[2] == "rotates")
        with NobodyWaits():
            plans = Plans()
            for kind in KINDS:
                steps.run((kind,))
            steps.run(KINDS)
            if any(mixer.kind == "latent_attention" for mixer in steps.forward.model.mixers):
                plans.check()
            steps.choose_under_masks()
            steps.compute_as_captured()
            compute_largest_step(Config(), steps.forward.model)
    steps.grammars.close()
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
