"""Runs the Triton kernels in Triton's interpreter against the references; exits non-zero if not.

A program of its own, because TRITON_INTERPRET must be set before triton is imported. With the
argument `attention` it runs paged attention on its cases and on random rows, with `thresholds`
those by mass, with `drafts` those of drafts, without one the rest.
"""

import os
import random
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter

from benchmarks import tune_kernels
from benchmarks.record import Recorder
from src.ops import (
    CAUSAL_CONVOLUTION,
    DECODE_SCHEDULE,
    EXPERTS,
    GUMBEL_ARGMAX,
    LATENT_ATTENTION,
    LINEAR,
    LINEAR_RECURRENCE,
    LORA,
    MASS_THRESHOLD,
    PAGED_ATTENTION,
    ROTATE_AND_CACHE,
    AttentionSpec,
)
from src.ops.attention import decode_schedule_triton as decode_schedule
from src.ops.attention import latent_attention_triton as latent_attention
from src.ops.attention import latent_expanded_triton as latent_expanded
from src.ops.attention import paged_attention_triton as paged_attention
from src.ops.attention import paged_decode_triton as paged_decode
from src.ops.attention import rotate_and_cache_triton as rotate_and_cache
from src.ops.attention.cases import CACHED_CASES
from src.ops.attention.libraries import AttentionShape, LibraryAttention, flash_attention_3
from src.ops.attention.spec import ALL_AHEAD
from src.ops.projections import experts_triton as experts
from src.ops.projections import linear_triton as linear
from src.ops.projections import lora_triton as lora
from src.ops.projections.experts import Experts
from src.ops.projections.linear import Linear
from src.ops.sampling import gumbel_argmax_triton as gumbel_argmax
from src.ops.sampling import mass_threshold_triton as mass_threshold
from src.ops.states import causal_convolution_triton as causal_convolution
from src.ops.states import linear_recurrence_triton as linear_recurrence
from tests.ops import flash_attention_stand_in
from tests.ops.comparison import (
    TOLERANCE,
    attention_matches,
    bits,
    latent_matches,
    rotation_matches,
    states_match,
    with_own_states,
)
from tests.ops.drafts.in_interpreter import drafts_match

ATTENTION_CASES = [
    {"dtype": torch.float32, "head_dim": 24, "padding": 2},
    {"dtype": torch.float32, "head_dim": 64, "num_heads": 6, "num_kv_heads": 2, "block_size": 5},
    {"dtype": torch.float32, "sliding_window": 7, "head_dim": 16, "padding": 1},
    {"dtype": torch.float16, "head_dim": 40},
    {"rows": ((90, 130), (1, 1100), (0, 3)), "head_dim": 16},
    {"rows": ((1, 1100), (1, 513), (1, 1)), "head_dim": 16, "sliding_window": 600},
    {"rows": ((1, 1100), (90, 530), (1, 512), (1, 513)), "head_dim": 16, "chunk": 512},
    {"rows": ((70, 100), (3, 40)), "head_dim": 16, "chunk": 30, "deterministic": True},
    {"rows": ((0, 3),), "padding": 2},
    # Captured steps: padding last, and the bound of any row.
    {"rows": ((1, 1), (1, 1100), (0, 0), (0, 0)), "padding": 2, "longest": 4096, "head_dim": 16},
    {"rows": ((0, 0), (0, 0)), "padding": 2, "longest": 4096, "head_dim": 16},
    {"rows": ((5, 33), (1, 130)), "padding": 10, "longest": 4096, "head_dim": 16},
    {"rows": ((1, 100), (3, 40), (1, 1), (90, 130)), "head_dim": 16, "deterministic": True},
    # Modifiers of scores: rows of one piece and of many, beside a prompt, in a pack, at any size.
    {"cap": 2.0, "has_sinks": True, "dtype": torch.float32, "head_dim": 24},
    {"rows": ((90, 130), (1, 1100), (0, 3), (1, 1)), "head_dim": 16, "cap": 3.0, "padding": 1},
    {"rows": ((90, 130), (1, 1100), (1, 40)), "head_dim": 16, "has_sinks": True, "num_heads": 6},
    {
        "rows": ((1, 1100), (1, 900), (1, 2100), (3, 50)),
        "prefixes": {1: (0, 50), 2: (0, 32)},
        "head_dim": 16,
        "cap": 2.0,
        "has_sinks": True,
    },
    {
        "rows": ((1, 600), (20, 320)),
        "head_dim": 256,
        "sliding_window": 100,
        "cap": 30.0,
        "has_sinks": True,
        "dtype": torch.float16,
    },
    {
        "rows": ((1, 100), (3, 40), (90, 130)),
        "head_dim": 16,
        "deterministic": True,
        "cap": 2.0,
        "has_sinks": True,
    },
    # Tokens that see later ones: all of them, and those of a window of one side or of two.
    *(
        {"rows": ((1, 1), (7, 7), (0, 0), (90, 90), (3, 40)), "head_dim": 16, "padding": 1, **some}
        for some in (
            {"ahead": ALL_AHEAD, "dtype": torch.float32, "num_heads": 6, "block_size": 5},
            {"ahead": 1, "dtype": torch.float32},
            {"ahead": 20, "sliding_window": 21, "dtype": torch.float16},
            {"ahead": 40, "sliding_window": 7, "cap": 2.0, "has_sinks": True},
            {"ahead": ALL_AHEAD, "deterministic": True},
        )
    ),
    *CACHED_CASES,
    # Caches in 8 bits: each kind by every way of reading, half of them each.
    *(
        {"rows": ((20, 60), (1, 1100), (1, 40)), "head_dim": 24, **some}
        for some in (
            {"has_sinks": True, "dtype": torch.float16, "block_size": 5, "cache_dtype": torch.int8},
            {"sliding_window": 100, "cap": 2.0, "padding": 1, "cache_dtype": torch.float8_e4m3fn},
            {"deterministic": True, "cache_dtype": torch.int8},
            {"cached": True, "cache_dtype": torch.float8_e4m3fn},
        )
    ),
]
# Rows with one query token between others, idle rows, and padding, beside a library's rows.
LIBRARY_CASES: list[dict[str, Any]] = [
    {"padding": 2},
    {"sliding_window": 7, "padding": 1},
    {"rows": ((90, 130), (1, 1100), (0, 3), (2, 2), (1, 1)), "block_size": 5},
]


def random_case(seed: int) -> dict[str, Any]:
    """Rows of any lengths, some of which begin as another does."""
    chance = random.Random(seed)
    block_size = chance.choice([5, 16, 32, 64, 128])
    rows: list[tuple[int, int]] = []
    prefixes: dict[int, tuple[int, int]] = {}
    for row in range(chance.randint(1, 9)):
        query_len = chance.choice([1, 1, 1, 1, 0, 3])
        seq_len = max(query_len, chance.choice([1, 5, 64, 65, 300, 700, 1100]))
        rows.append((query_len, seq_len if query_len else chance.choice([0, 3])))
        other = chance.randrange(row) if row and chance.random() < 0.7 else row
        most = min(length - query for query, length in (rows[row], rows[other])) // block_size
        if other != row and rows[other][0] < 2 and most > 0:
            prefixes[row] = (other, chance.choice([most, chance.randint(1, most)]))
    num_heads, num_kv_heads = chance.choice([(4, 1), (4, 2), (3, 3), (14, 2), (17, 1)])
    return {
        "rows": rows,
        "prefixes": prefixes,
        "block_size": block_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": chance.choice([8, 16, 24]),
        "sliding_window": chance.choice([0, 0, 0, 100]),
        "chunk": chance.choice([0, 0, 0, 100]),
        "cap": chance.choice([0, 0, 3.0]),
        "has_sinks": chance.random() < 0.4,
        "padding": chance.choice([0, 2]),
        "dtype": chance.choice([torch.float32, torch.float16]),
        "seed": seed,
    }


def random_rows_match(cases: int) -> None:
    """On grids that cut the list of tiles anywhere: from one program to more than there are."""
    multiprocessors = paged_decode.multiprocessors
    for seed in range(cases):
        programs = (1, 2, 3, 7, 33, 200)[seed % 6]
        paged_decode.multiprocessors = lambda device, programs=programs: programs
        case = random_case(seed)
        try:
            attention_matches(paged_attention.run, PAGED_ATTENTION.build("cpu", **case))
        except AssertionError as error:
            raise AssertionError(f"{programs} programs, {case}") from error
    paged_decode.multiprocessors = multiprocessors


_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope) -> None:
    # Triton 3.6's interpreter takes int() of a one-element array, which NumPy 2.4 refuses.
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_with_index

_convert_float = interpreter._convert_float


def _convert_as_torch(data, source, target, rounding_mode):
    # The interpreter cuts float32 off to bfloat16, where devices round to the nearest.
    if str(source) == "fp32" and str(target) == "bf16":
        wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return wide.to(torch.bfloat16).view(torch.uint16).numpy()
    return _convert_float(data, source, target, rounding_mode)


interpreter._convert_float = _convert_as_torch

_create_dot = interpreter.InterpreterBuilder.create_dot


def _create_dot_of_any_row(self, a, b, d, *options):
    # How some CPUs' libraries round a float32 product depends on where in a tile its row stands.
    # No GPU does that. A wider product is rounded once.
    if a.data.dtype != np.float32 or d.data.dtype != np.float32:
        return _create_dot(self, a, b, d, *options)
    wide = np.matmul(a.data, b.data, dtype=np.float64) + d.data
    return interpreter.TensorHandle(wide.astype(np.float32), d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _create_dot_of_any_row


def main() -> None:
    if sys.argv[1:] == ["attention"]:
        for case in ATTENTION_CASES:
            attention_matches(paged_attention.run, PAGED_ATTENTION.build("cpu", **case))
        random_rows_match(6)  # each number of programs once
    elif sys.argv[1:] == ["thresholds"]:
        thresholds_match()
    elif sys.argv[1:] == ["drafts"]:
        drafts_match()
    else:
        all_else_matches()
    sys.stdout.write("ok\n")


def all_else_matches() -> None:
    for case in DECODE_SCHEDULE.cases:
        args = DECODE_SCHEDULE.build("cpu", **case)
        expected, got = DECODE_SCHEDULE.reference(*args), decode_schedule.run(*args)
        assert torch.equal(expected, got), (case, expected, got)
    quick = ["--device", "cpu", "--dtype", "float16", "--head-dim", "16", "--quick", "--no-save",
             "--only", "decode", "experts of few pairs", "latent attention"]  # fmt: skip
    assert tune_kernels.main(quick) == 0
    # Of a tile that is no power of two no kernel can be made, which loses the others nothing.
    options = tune_kernels.parse(quick)
    candidates = tune_kernels.candidates("decode", options)
    impossible = candidates[0]._replace(tile=48)
    tune_kernels.candidates = lambda kernel, options: [impossible, *candidates]
    recorder = Recorder("tune_kernels", save=False)
    (failed,) = tune_kernels.tune("decode", options, recorder)
    assert failed.startswith(f"decode: {impossible}"), failed
    # What the reference has left in `out` is no result.
    idle = tune_kernels.KERNELS["decode"]._replace(run=lambda *_: None)
    tune_kernels.KERNELS["decode"] = idle
    assert "differs" in tune_kernels.tune("decode", options, recorder)[1]
    for case in LIBRARY_CASES:
        beside_a_library(case)
    for case in ROTATE_AND_CACHE.cases:
        # A mean is summed in another order; everything else rounds where the reference does.
        args = ROTATE_AND_CACHE.build("cpu", **case)
        rotation_matches(rotate_and_cache.run, args, exact=args[3] is None)
    for case in GUMBEL_ARGMAX.cases:
        args = GUMBEL_ARGMAX.build("cpu", **case)
        expected, got = GUMBEL_ARGMAX.reference(*args), gumbel_argmax.run(*args)
        assert torch.equal(expected, got), (case, expected, got)
    recurrences_match()
    loras_match()
    linears_match()
    experts_match()
    latents_match()
    bad = [[-torch.inf] * 5, [1.0, torch.nan, 2.0, 2.0, 0.0], [0.0, 0.0, 1.0, 0.0, torch.inf]]
    logits = torch.tensor([*bad, [1.0, -torch.inf, 2.0, 2.0, 0.0]])
    words = torch.zeros(4, dtype=torch.int64)
    for temperature, expected in ((0.0, 2), (1e-5, None), (1.0, None)):
        temperatures = torch.full((4,), temperature)
        got = gumbel_argmax.run(logits, words, words, temperatures).tolist()
        assert got == GUMBEL_ARGMAX.reference(logits, words, words, temperatures).tolist()
        assert got[:3] == [-1, -1, -1]
        assert got[3] == expected if expected is not None else got[3] in (0, 2, 3, 4)


def thresholds_match() -> None:
    """To the bit, and a row's alone too; whatever its place, and the numbers of bits per pass."""
    # A row is read some thirty times, which takes the interpreter long.
    cases = [case for case in MASS_THRESHOLD.cases if case["rows"] * case["vocab_size"] < 6500]
    for number, case in enumerate(cases):
        mass_threshold.PIVOTS, mass_threshold.BLOCK = ((4, 2048), (2, 2048), (8, 512))[number % 3]
        values, weights, shares = MASS_THRESHOLD.build("cpu", **case)
        expected = MASS_THRESHOLD.reference(values, weights, shares)
        got = mass_threshold.run(values, weights, shares)
        assert torch.equal(bits(got), bits(expected)), (case, expected, got)
        if number % 4:
            continue
        # Rows may lie apart, and the last one alone gives the same.
        apart = torch.cat((values, values), 1)[:, : values.shape[1]]
        own = apart if weights is values else weights
        for some in (slice(None), slice(-1, None)):
            given = apart[some], None if own is None else own[some], shares[some]
            assert torch.equal(bits(mass_threshold.run(*given)), bits(expected[some])), case
    specials = [-torch.inf, -1.0, -0.0, 0.0, 1e-45, 1.0, torch.inf, torch.nan, -torch.nan]
    values = torch.tensor([specials])
    for k in range(len(specials) + 1):
        wanted = torch.tensor([float(k)]).double()
        expected = MASS_THRESHOLD.reference(values, None, wanted)
        assert torch.equal(bits(mass_threshold.run(values, None, wanted)), bits(expected)), k
    mass_threshold.PIVOTS, mass_threshold.BLOCK = 4, 2048
    for weights in (torch.zeros(2, 40), torch.tensor([[1.0, 0.5, 2.0**-34, 2.0**-35]])):
        for share in (1e-30, 0.5, 1.0):
            shares = torch.full((len(weights),), share).double()
            got = mass_threshold.run(weights, weights, shares)
            assert torch.equal(bits(got), bits(MASS_THRESHOLD.reference(weights, weights, shares)))


def recurrences_match() -> None:
    """Cut anywhere a row gets the same bits: outputs, and the state that it leaves."""
    for op, kernel in (
        (CAUSAL_CONVOLUTION, causal_convolution.run),
        (LINEAR_RECURRENCE, linear_recurrence.run),
    ):
        for case in op.cases:
            states_match(op, kernel, op.build("cpu", **case))
        args = op.build("cpu", rows=(9,), dtype=torch.float32)
        given, whole = with_own_states(op, args)
        kernel(*whole)
        pieces, _ = with_own_states(op, args)
        for begin, end in ((0, 2), (2, 3), (3, 9)):
            named = dict(pieces, query_start_loc=torch.tensor([0, end - begin]).int())
            for name in ("x", "query", "key", "value", "decay", "factor", "out"):
                if name in named:
                    named[name] = named[name][begin:end]
            kernel(*named.values())
        assert torch.equal(pieces["out"], given["out"])
        assert torch.equal(bits(pieces["states"]._base), bits(given["states"]._base))


def loras_match() -> None:
    """A token's bits are the same alone and in any company."""
    for case in LORA.cases:
        if case["dtype"] == torch.bfloat16:
            continue
        args = LORA.build("cpu", **case)
        base, x, *weights, slots = args
        expected, got = LORA.reference(*args), lora.lora(*args)
        tolerance = TOLERANCE[case["dtype"]]
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=str(case))
        alone = lora.lora(base[-1:], x[-1:], *weights, slots[-1:])
        assert torch.equal(alone, got[-1:]), case


def linears_match() -> None:
    """In rows, whatever the group; a token's bits are the same in any company of the same tile."""
    kinds = ("int8", "int8/16", "int8/96 with offsets", "int4/32", "int4/192 with bfloat16 offsets")
    for seed, kind in enumerate((*kinds, "int4/32 with offsets", "int8/64")):
        for tokens, outputs, dtype in ((1, 5, torch.float32), (70, 67, torch.float16)):
            case = {"tokens": tokens, "outputs": outputs, "dtype": dtype, "weight": kind}
            args = LINEAR.build("cpu", inputs=192, has_bias=seed % 2 == 0, seed=seed, **case)
            if Linear.of_flat(*args).weight.offsets is not None:
                # Contiguous or not: tokens may lie apart.
                args = (torch.cat((args[0], args[0]), 1)[:, :192], *args[1:])
            expected, got = LINEAR.reference(*args), linear.run(*args)
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=str(case))
            assert torch.equal(linear.run(args[0][-1:], *args[1:]), got[-1:]) or tokens > 32
    args = LINEAR.build("cpu", tokens=3, inputs=64, outputs=64)
    assert torch.equal(linear.run(*args), LINEAR.reference(*args))
    for kind in ("strips of int8", "strips of same", "e2m1/32"):
        of = {"weight": kind, "dtype": torch.bfloat16}
        args = LINEAR.build("cpu", tokens=3, inputs=64, outputs=64, **of)
        refuses(linear.run, args)
    # Rows whose groups end within a run of levels.
    x, weight, *rest = LINEAR.build("cpu", tokens=3, inputs=64, outputs=64, weight="int8")
    refuses(linear.run, (x[:, :48], weight[:, :48].contiguous(), *rest))


def refuses(run: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> None:
    """It never falls back to decoding the whole matrix in every call."""
    with pytest.raises(ValueError, match="no kernel for CUDA multiplies"):
        run(*args)


def experts_match() -> None:
    for case in EXPERTS.cases:
        # Strips are the CPU's, and the interpreter's products of bfloat16 are none.
        if case["dtype"] == torch.bfloat16 or case["weight"].startswith("strips"):
            continue
        if case["weight"].startswith(("float8", "int4", "e2m1", "int8/")) and case["tokens"] > 1:
            continue
        args = EXPERTS.build("cpu", **case)
        expected, got = EXPERTS.reference(*args), experts.run(*args)
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=str(case))
    shape = {"tokens": 90, "experts": 4, "chosen": 2, "hidden": 40, "intermediate": 24}
    call = Experts.of_flat(*EXPERTS.build("cpu", **shape, deterministic=True))
    whole = experts.run(*call.flat())
    for some in (slice(5, 6), slice(30, 80)):
        part = call.replace(x=call.x[some], weights=call.weights[some], ids=call.ids[some])
        assert torch.equal(experts.run(*part.flat()), whole[some]), some


def latents_match() -> None:
    """Whatever the number of splits; a token's bits are the same alone if that is promised."""
    multiprocessors = latent_attention.multiprocessors
    # The interpreter's products of bfloat16 are none.
    cases = [
        case
        for case in LATENT_ATTENTION.cases
        if case.get("heads", 0) < 16 and case.get("dtype") != torch.bfloat16
    ]
    absorbed = [case for case in cases if "expands" not in case]
    # Two shapes, each in both dtypes: one of either.
    expanded = [case for case in cases if "expands" in case][::3]
    for seed, case in enumerate([*absorbed[:5], absorbed[6], *absorbed[-2:], *expanded]):
        number = (1, 7, 40)[seed % 3]
        latent_attention.multiprocessors = lambda device, number=number: number
        latent_matches(latent_attention.run, LATENT_ATTENTION.build("cpu", **case))
    latent_attention.multiprocessors = multiprocessors
    expansions_match(expanded)
    args = LATENT_ATTENTION.build("cpu", rows=((3, 40), (9, 70), (1, 50)), deterministic=True)
    latent_attention.run(*args)
    whole = args[8].clone()
    for token, (row, seq_len) in ((11, (1, 70)), (5, (1, 64)), (12, (2, 50))):
        one = [each[token : token + 1] for each in (args[0], args[1], args[7], args[8])]
        starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([seq_len]).int()
        tables = args[4][row : row + 1]
        latent_attention.run(
            one[0], one[1], *args[2:4], tables, starts, lengths, *one[2:], *args[9:]
        )
        assert torch.equal(one[3][0], whole[token]), token


def expansions_match(cases: list[dict[str, Any]]) -> None:
    """In pieces that end within a row, within a tile, at both ends, and before every token."""
    piece_keys = latent_expanded.piece_keys
    for keys, case in zip((37, 100), cases, strict=True):
        args = LATENT_ATTENTION.build("cpu", **case)
        assert args[13] is not None
        assert args[14] > 2 * keys
        latent_expanded.piece_keys = lambda up, keys=keys: keys
        latent_matches(latent_attention.run, args)
    latent_expanded.piece_keys = piece_keys
    ways_divide_the_tokens(LATENT_ATTENTION.build("cpu", **cases[0]))
    # As a step that warms up: nothing is written.
    empty = LATENT_ATTENTION.build("cpu", rows=((0, 0),), padding=3, expands=True)
    assert (empty[13].tolist(), empty[14]) == ([0, 0], 0)
    latent_matches(latent_attention.run, empty)


def ways_divide_the_tokens(args: tuple[Any, ...]) -> None:
    """Each way leaves the other's tokens alone."""
    LATENT_ATTENTION.reference(*args)
    query, _, cache, up, tables, starts, lengths, _, out, scale, *_, plan, keys, _ = args
    count = int(starts[-1])
    marks = plan[len(tables) + 1 :].bool()
    assert marks.any()
    assert not marks.all()
    absorbed, expanded = (torch.full_like(out, torch.nan) for _ in range(2))
    rows = (cache, up, tables, starts, lengths)
    latent_attention._absorb(query, *rows, absorbed, scale, plan, deterministic=False)
    latent_expanded.run(query, *rows, expanded, scale, plan, keys)
    for got, tokens in ((absorbed, ~marks), (expanded, marks)):
        assert torch.equal(~got[:count].isnan().all(-1).all(-1), tokens)
        torch.testing.assert_close(got[:count][tokens], out[:count][tokens])


def beside_a_library(case: dict[str, Any]) -> None:
    """The kernels write the cache and decode, a library does the rest."""
    args = PAGED_ATTENTION.build("cpu", dtype=torch.float16, head_dim=16, **case)
    features = AttentionSpec.of(*args[10:12]).features
    shape = AttentionShape(4, 2, 16, args[3].shape[1], torch.float16, features)
    sys.modules["flash_attn_interface"] = flash_attention_stand_in.as_module(
        flash_attn_with_kvcache=flash_attention_stand_in.flash_attn_with_kvcache
    )
    prefill, calls = flash_attention_3(9).prefill, []

    def counted(*args: Any) -> None:
        calls.append(args)
        prefill(*args)

    attention = LibraryAttention(counted, [shape], paged_attention.launch)
    attention_matches(PAGED_ATTENTION.record.taking_flat(attention.run), args)
    assert len(calls) == 1


if __name__ == "__main__":
    main()
