"""Which variants of the Triton kernels steps of any shape select; exits non-zero if too many.

Triton compiles a kernel anew for another alignment of a pointer, for an integer that is 1 or a
multiple of 16, and for every constant. A request must not wait for that, so what the engine runs
before it is ready has to select everything that its steps select. Nothing is compiled here: what a
launch would select is only noted, for a GPU that is not there.
"""

import random
import sys
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from src.core.plan import RowStep, StepPlan
from src.engine.execution.inputs import StepInputs, build_inputs, padding_inputs
from src.engine.execution.row_state import RowState
from src.engine.execution.warm_up import KERNEL_WARM_UP_TOKENS, warm_up_tokens
from src.models import Model
from src.models.fields import Fields
from src.models.model import ModelOptions
from src.models.registry import family_of
from src.ops import launching_triton as launching
from src.ops import tuning
from src.ops.attention import decode_schedule_triton as decode_schedule
from src.ops.attention import latent_attention_triton as latent_attention
from src.ops.attention import paged_attention_triton as paged_attention
from src.ops.attention import rotate_and_cache_triton as rotate_and_cache
from src.ops.attention.latent_expansion import LatentShape, plan_expansion
from src.ops.matrix import Matrix
from src.ops.projections import experts_triton as experts
from src.ops.projections import lora_triton as lora
from src.ops.projections.experts import Experts
from src.ops.sampling import gumbel_argmax_triton as gumbel_argmax
from src.ops.sampling import mass_threshold_triton as mass_threshold
from src.ops.states import causal_convolution_triton as causal_convolution
from src.ops.states import linear_recurrence_triton as linear_recurrence

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LONGEST, ROWS = 32, 8, 128, 64, 8192, 256
STEPS = 400
MOST_TOKENS = 4096
LATENT_HEADS, LATENTS = 32, LatentShape(nope=32, rope=16, rank=64, value=32)

seen: set[tuple[Any, ...]] = set()
_binders: dict[JITFunction, Any] = {}


def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    if self not in _binders:
        _binders[self] = create_function_from_signature(self.signature, self.params, BACKEND)
    _, specialization, _ = _binders[self](*args, **kwargs)
    options = sorted((name, str(kwargs[name])) for name in kwargs if name.startswith("num_"))
    seen.add((self.fn.__module__, self.fn.__name__, str(specialization), str(options)))


def step(inputs: StepInputs, window: int, group: int = 0) -> None:
    """What one layer of a KV group, and the draw, launch for a step."""
    cache = torch.zeros(1, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    num_tokens = len(inputs.input_ids_t)
    fused = torch.empty(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    query, key, value = fused.split((HEADS, KV_HEADS, KV_HEADS), 1)
    out = torch.empty(num_tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    table = torch.zeros(LONGEST, HEAD_DIM)
    rotate_and_cache.run(
        query, key, value, None, None, 1e-5, table, inputs.positions_t,
        inputs.slot_mappings_t[group], cache, cache, out,
    )  # fmt: skip
    tile = tuning.decode_shape(90, HEAD_DIM, 2).tile
    members = tuning.packed_rows(HEADS // KV_HEADS) // (HEADS // KV_HEADS)
    rows = (inputs.block_tables_b[group], inputs.query_start_loc, inputs.seq_lens_b)
    schedule = decode_schedule.run(*rows, BLOCK_SIZE, window, 0, tile, members)
    paged_attention.run(
        query, None, None, cache, cache, *rows, inputs.slot_mappings_t[group], out, None,
        [0.1, 0.0, window, 0.0, 0.0], inputs.max_query_len, inputs.max_seq_len, False, schedule,
    )  # fmt: skip
    positions = inputs.sampled_positions_s
    if len(positions) == 0:  # warming up draws for the padding row
        positions = torch.zeros(1, dtype=torch.int64)
    logits = torch.empty(len(positions), 1024)
    gumbel_argmax.run(logits, torch.zeros_like(positions), positions, torch.zeros(len(positions)))


def recurrent_step(inputs: StepInputs) -> None:
    """What a layer with a recurrent state launches for a step."""
    num_tokens, kind = len(inputs.input_ids_t), {"dtype": torch.bfloat16}
    heads, key_dim, dim = 4, 16, 32
    rows = (inputs.rows_b, inputs.query_start_loc)
    channels = torch.empty(num_tokens, 2 * 2 * key_dim + heads * dim + 8, **kind)[:, 8:]
    convolved = torch.empty(channels.shape, **kind)
    inner = torch.zeros(9, 3 * channels.shape[1] + 16, **kind)[:, 16:]
    inner = inner.unflatten(1, (3, channels.shape[1]))
    weight = torch.empty(4, channels.shape[1], **kind)
    causal_convolution.run(channels, weight, None, inner, *rows, convolved)
    query, key, value = convolved.split((2 * key_dim, 2 * key_dim, heads * dim), 1)
    numbers = torch.empty(2, num_tokens, heads)
    linear_recurrence.run(
        query.unflatten(1, (2, key_dim)), key.unflatten(1, (2, key_dim)),
        value.unflatten(1, (heads, dim)), numbers[0], numbers[1], None,
        torch.zeros(9, heads, key_dim, dim), *rows,
        torch.empty(num_tokens, heads, dim, **kind), True, True,
    )  # fmt: skip


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


def adapted(num_tokens: int) -> None:
    """What an adapter adds to a projection."""
    kind = {"dtype": torch.bfloat16}
    slots = torch.zeros(num_tokens + 1, dtype=torch.int64)
    lora.lora(
        torch.empty(num_tokens, 96, **kind),
        torch.empty(num_tokens, 64, **kind),
        torch.empty(4, 3, 16, 64, **kind),
        torch.empty(4, 16, 96, **kind),
        torch.zeros(4, 3, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
        slots[num_tokens % 2 :][:num_tokens],  # a part of a step's inputs
    )


def mixed(num_tokens: int, num_experts: int, chosen: int) -> None:
    """What a layer of experts launches."""
    kind = {"dtype": torch.bfloat16}
    call = Experts(
        x=torch.empty(num_tokens, 64, **kind),
        gate_up=Matrix.plain(torch.empty(num_experts, 2 * 32, 64, **kind)),
        down=Matrix.plain(torch.empty(num_experts, 64, 32, **kind)),
        weights=torch.ones(num_tokens, chosen),
        ids=torch.zeros(num_tokens, chosen, dtype=torch.int64),
    )
    experts.run(*call.flat())


def truncated(rows: int, vocab_size: int) -> None:
    """What rows with top-p, with typical-p and with a large top-k launch."""
    logits = torch.zeros(rows, vocab_size)
    weights = torch.ones(rows, vocab_size)
    # A part of the rows' parameters.
    shares = torch.ones(rows + 1, dtype=torch.float64)[rows % 2 :][:rows]
    mass_threshold.run(logits, None, shares)
    mass_threshold.run(weights, weights, shares)
    mass_threshold.run(-weights, weights, shares)


def check_truncations() -> None:
    for vocab_size in (32_000, 32_001):
        seen.clear()
        truncated(1, vocab_size)
        assert len(seen) == 3
        for rows in (1, 2, 3, 16, 255, 256):
            truncated(rows, vocab_size)
        assert len(seen) == 3, sorted(seen)


def model_of_experts(num_experts: int, chosen: int) -> Model:
    family = family_of("MixtralForCausalLM")
    fields = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "num_local_experts": num_experts,
        "num_experts_per_tok": chosen,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    config = family.describe(Fields(fields, "shape", family.defaults))
    meta = torch.device("meta")
    options = ModelOptions(dtype=torch.bfloat16, device=meta, max_positions=64)
    return Model(config, family.write, options)


def check_sizes() -> None:
    """Any number of tokens, with adapters, and with experts of which a token takes few."""
    for launch, model in (
        (adapted, model_of_experts(2, 1)),
        *(
            (partial(mixed, num_experts=count, chosen=chosen), model_of_experts(count, chosen))
            for count, chosen in ((128, 1), (8, 2), (64, 6))
        ),
    ):
        seen.clear()
        for num_tokens in warm_up_tokens(model, MOST_TOKENS):
            launch(num_tokens)
        ready = set(seen)
        for num_tokens in (1, 2, 3, 16, 17, 255, 256, 1041, 2047, 3000, MOST_TOKENS):
            launch(num_tokens)
        assert seen == ready, (launch, sorted(seen - ready)[:3])
    # A step that no request can have needs no warm-up.
    assert warm_up_tokens(model_of_experts(128, 1), 1500) == (8, 1500)
    assert warm_up_tokens(model_of_experts(128, 1), 512) == (8, 512)


def random_plan(chance: random.Random, rows: int) -> StepPlan:
    """Up to so many rows: decoding ones of any length, and up to two prompts."""
    decoding = chance.randint(0, rows - 2)
    prompts = chance.randint(0 if decoding else 1, 2)
    longest = chance.choice([100, 900, 8100])
    spans = [(chance.randint(1, longest), 1) for _ in range(decoding)]
    spans += [(0, chance.randint(2, 900)) for _ in range(prompts)]
    return StepPlan(
        1, [], [], [RowStep(i, 1, start, count, True) for i, (start, count) in enumerate(spans)]
    )


def rows_of(groups: int, rows: int, longest: int) -> RowState:
    state = RowState(
        max_num_seqs=rows,
        max_model_len=longest,
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
        page_blocks=(1,) * groups,
    )
    state.block_tables.fill_(0)
    state.tokens.zero_()
    return state


def main() -> None:
    JITFunction.run = note
    launching._current = lambda: (int, int)
    check_sizes()
    check_truncations()
    # With several KV groups, and with tables of odd sizes, parts of tensors begin anywhere.
    for groups, rows, longest in ((1, ROWS, LONGEST), (2, ROWS, LONGEST), (1, 63, 8130)):
        check_steps(groups, rows_of(groups, rows, longest))
    latent_steps(rows_of(1, ROWS, LONGEST))
    sys.stdout.write("ok\n")


def check_steps(groups: int, state: RowState) -> None:
    seen.clear()
    for window in (0, 512):
        for num_tokens in KERNEL_WARM_UP_TOKENS:
            for group in range(groups):
                step(padding_inputs(num_tokens, state), window, group)
            recurrent_step(padding_inputs(num_tokens, state))
        ready, chance = set(seen), random.Random(0)
        is_usual = (groups, state.padding_row) == (1, ROWS)
        for _ in range(STEPS // 2 if is_usual else STEPS // 8):
            plan = random_plan(chance, state.padding_row)
            padded = chance.choice([0, plan.num_tokens + chance.randint(0, 40)])
            inputs = build_inputs(plan, state, padded)
            for group in range(groups):
                step(inputs, window, group)
            recurrent_step(inputs)
        late = seen - ready
        assert not late, (len(late), sorted(late)[:3])
    # Two forms of the prefill kernel; with a window, attention's and the schedule's once more.
    # And three kernels of recurrent layers.
    assert len(seen) <= 14 + 3, sorted(seen)


def latent_steps(state: RowState) -> None:
    seen.clear()
    for num_tokens in KERNEL_WARM_UP_TOKENS:
        latent_step(padding_inputs(num_tokens, state))
    ready, chance = set(seen), random.Random(0)
    for _ in range(STEPS // 8):
        plan = random_plan(chance, ROWS)
        padded = chance.choice([0, plan.num_tokens + chance.randint(0, 40)])
        latent_step(build_inputs(plan, state, padded))
    late = seen - ready
    assert not late, (len(late), sorted(late)[:3])
    # One of each kernel, but attention's with splits and without, and two projections.
    assert {name for _, name, *_ in seen} == {
        *("_write_kernel", "_project_kernel", "_attend_kernel", "_merge_kernel", "_gather_kernel")
    }
    assert len(seen) == 8, sorted(seen)


if __name__ == "__main__":
    main()
