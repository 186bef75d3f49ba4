"""Which variants of the Triton kernels steps of any shape select; exits non-zero if too many.

Triton compiles a kernel anew for another alignment of a pointer, for an integer that is 1 or a
multiple of 16, and for every constant. A request must not wait for that, so what the engine runs
before it is ready has to select everything that its steps select. Nothing is compiled here: what a
launch would select is only noted, for a GPU that is not there.
"""

import random
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from src.core.plan import RowStep, StepPlan
from src.engine.execution.code_host import _KERNEL_WARM_UP_TOKENS
from src.engine.execution.inputs import StepInputs, build_inputs, padding_inputs
from src.engine.execution.row_state import RowState
from src.ops.latent_expansion import LatentShape, plan_expansion
from src.ops.triton import (
    decode_schedule,
    gumbel_argmax,
    latent_attention,
    paged_attention,
    rotate_and_cache,
    tuning,
)

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LONGEST, ROWS = 32, 8, 128, 64, 8192, 256
STEPS = 400
LATENT_HEADS, LATENTS = 32, LatentShape(nope=32, rope=16, rank=64, value=32)

seen: set[tuple[Any, ...]] = set()
_binders: dict[JITFunction, Any] = {}


def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    if self not in _binders:
        _binders[self] = create_function_from_signature(self.signature, self.params, BACKEND)
    _, specialization, _ = _binders[self](*args, **kwargs)
    options = sorted((name, str(kwargs[name])) for name in kwargs if name.startswith("num_"))
    seen.add((self.fn.__module__, self.fn.__name__, str(specialization), str(options)))


def step(inputs: StepInputs, window: int) -> None:
    """What one layer, and the draw, launch for a step."""
    cache = torch.zeros(1, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    num_tokens = len(inputs.input_ids_t)
    fused = torch.empty(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    query, key, value = fused.split((HEADS, KV_HEADS, KV_HEADS), 1)
    out = torch.empty(num_tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    table = torch.zeros(LONGEST, HEAD_DIM)
    rotate_and_cache.run(
        query, key, value, None, None, 1e-5, table, inputs.positions_t, inputs.slot_mappings_t[0],
        cache, cache, out,
    )  # fmt: skip
    tile = tuning.decode_shape(90, HEAD_DIM, 2).tile
    members = tuning.packed_rows(HEADS // KV_HEADS) // (HEADS // KV_HEADS)
    rows = (inputs.block_tables_b[0], inputs.query_start_loc, inputs.seq_lens_b)
    schedule = decode_schedule.run(*rows, BLOCK_SIZE, window, 0, tile, members)
    paged_attention.run(
        query, None, None, cache, cache, *rows, inputs.slot_mappings_t[0], out, None,
        [0.1, 0.0, window, 0.0], inputs.max_query_len, inputs.max_seq_len, False, schedule,
    )  # fmt: skip
    positions = inputs.sampled_positions_s
    if len(positions) == 0:  # warming up draws for the padding row
        positions = torch.zeros(1, dtype=torch.int64)
    logits = torch.empty(len(positions), 1024)
    gumbel_argmax.run(logits, torch.zeros_like(positions), positions, torch.zeros(len(positions)))


def latent_step(inputs: StepInputs) -> None:
    """What a layer of latent attention launches for a step, with the plan that its mixer makes."""
    nope, rope, rank, value = LATENTS
    num_tokens, width = len(inputs.input_ids_t), rank + rope
    plan = None if inputs.lengths_b is None else plan_expansion(*inputs.lengths_b, LATENTS)
    made = (None, 0) if plan is None else (torch.from_numpy(plan.plan), plan.keys)
    kind = {"dtype": torch.bfloat16}
    latent_attention.run(
        torch.empty(num_tokens, LATENT_HEADS, nope + rope, **kind),
        torch.empty(num_tokens, width, **kind),
        torch.zeros(1, BLOCK_SIZE, width, **kind),
        torch.empty(LATENT_HEADS, nope + value, rank, **kind),
        *(inputs.block_tables_b[0], inputs.query_start_loc, inputs.seq_lens_b),
        inputs.slot_mappings_t[0],
        torch.empty(num_tokens, LATENT_HEADS, value, **kind),
        *(0.1, inputs.max_query_len, inputs.max_seq_len, False, *made),
    )


def random_plan(chance: random.Random) -> StepPlan:
    """Up to `ROWS` decoding rows of any length, and up to two prompts."""
    decoding = chance.randint(0, ROWS - 2)
    prompts = chance.randint(0 if decoding else 1, 2)
    longest = chance.choice([100, 900, LONGEST - 1])
    rows = [(chance.randint(1, longest), 1) for _ in range(decoding)]
    rows += [(0, chance.randint(2, 900)) for _ in range(prompts)]
    return StepPlan(
        1, [], [], [RowStep(i, 1, start, count, True) for i, (start, count) in enumerate(rows)]
    )


def main() -> None:
    JITFunction.run = note
    state = RowState(
        max_num_seqs=ROWS,
        max_model_len=LONGEST,
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
    )
    state.block_tables.fill_(0)
    state.tokens.zero_()
    for window in (0, 512):
        for num_tokens in _KERNEL_WARM_UP_TOKENS:
            step(padding_inputs(num_tokens, state), window)
        ready, chance = set(seen), random.Random(0)
        for _ in range(STEPS):
            plan = random_plan(chance)
            padded = chance.choice([0, plan.num_tokens + chance.randint(0, 40)])
            step(build_inputs(plan, state, padded), window)
        late = seen - ready
        assert not late, (len(late), sorted(late)[:3])
    # Two forms of the prefill kernel; with a window, attention's and the schedule's once more.
    assert len(seen) <= 14, sorted(seen)
    seen.clear()
    for num_tokens in _KERNEL_WARM_UP_TOKENS:
        latent_step(padding_inputs(num_tokens, state))
    ready, chance = set(seen), random.Random(0)
    for _ in range(STEPS // 8):
        plan = random_plan(chance)
        padded = chance.choice([0, plan.num_tokens + chance.randint(0, 40)])
        latent_step(build_inputs(plan, state, padded))
    late = seen - ready
    assert not late, (len(late), sorted(late)[:3])
    # One of each kernel, but attention's with splits and without, and two projections.
    assert {name for _, name, *_ in seen} == {
        *("_write_kernel", "_project_kernel", "_attend_kernel", "_merge_kernel", "_gather_kernel")
    }
    assert len(seen) == 8, sorted(seen)
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
