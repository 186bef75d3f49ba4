"""Of what runs on a GPU, as far as a CPU can tell."""

from tests.mutants.mutation import mutations_of

_INTERPRETED = ("tests/ops/test_triton.py::test_triton_kernels[triton_in_interpreter]",)
_THRESHOLDS = ("tests/ops/test_triton.py::test_triton_kernels[triton_in_interpreter thresholds]",)
_VARIANTS = ("tests/ops/test_triton.py::test_triton_kernels[triton_variants]",)

MUTATIONS = (
    *mutations_of(
        "src/compile/just_in_time.py",
        (
            "tests/compile/test_just_in_time.py::test_a_weight_that_comes_twice_does_so_in_every_call",
        ),
        (
            "code that was compiled for one weight at two places is called with two",
            "[each.device for each in tensors], repeats(tensors)",
            "[each.device for each in tensors], ()",
        ),
    ),
    *mutations_of(
        "src/compile/loaded.py",
        (
            "tests/compile/test_ahead.py::test_other_weights_than_it_was_compiled_for_are_refused",
            "tests/compile/test_ahead.py::test_projections_are_those_of_the_op",
        ),
        (
            "code of one encoding is bound to a matrix of another",
            'fields = getattr(given, "_fields", range(len(given)))',
            "return",
        ),
    ),
    *mutations_of(
        "src/engine/execution/warm_up.py",
        _VARIANTS,
        (
            "large tiles of many experts are compiled while the first long prompt waits",
            "for tokens in (few, max(many, needed)))",
            "for tokens in (few, many))",
        ),
    ),
    *mutations_of(
        "src/ops/attention/paged_decode_triton.py",
        _VARIANTS,
        (
            "block tables of a second KV group select another variant of the decode kernel",
            '["block_tables", "seq_lens", "table_stride", "rows"]',
            '["seq_lens", "table_stride", "rows"]',
        ),
    ),
    *mutations_of(
        "src/ops/projections/lora_triton.py",
        _VARIANTS,
        (
            "one token with an adapter selects another variant",
            '@triton.jit(do_not_specialize=["slots", "tokens"])\ndef _project(',
            '@triton.jit(do_not_specialize=["slots"])\ndef _project(',
        ),
    ),
    *mutations_of(
        "src/ops/states/linear_recurrence_triton.py",
        _INTERPRETED,
        (
            "on a GPU the output of padding behind recurrent layers is left as it was",
            "for first in range(behind, tokens, PADDING):",
            "for first in range(tokens, tokens, PADDING):",
        ),
        (
            "on a GPU the delta rule writes what a state holds already",
            "if DELTA:",
            "if DELTA and NORMALIZES == 2:",
        ),
    ),
    *mutations_of(
        "src/ops/states/causal_convolution_triton.py",
        _INTERPRETED,
        (
            "on a GPU a convolution's state is one input old",
            "place = count + kept",
            "place = count - 1 + kept",
        ),
    ),
    *mutations_of(
        "src/ops/launching_triton.py",
        ("tests/ops/test_launching.py",),
        (
            "a kept kernel is launched with tensors of another dtype",
            'key += [f"_kind_{name}", *([f"_aligned_{name}"] if aligned else ())]',
            'key += [*([f"_aligned_{name}"] if aligned else ())]',
        ),
        (
            "a kernel for aligned memory is launched with other memory",
            "& 15 == 0",
            "& 3 == 0",
        ),
        (
            "a kernel for 32 bits is launched with a larger number",
            "(-2147483648 <= {name} <= 2147483647) or {name}",
            "(-2147483648 <= {name} <= 2147483648) or {name}",
        ),
        (
            "a kernel for an integer is launched with a fraction",
            'key += [f"{name}.__class__", fits if each.do_not_specialize else name]',
            "key += [fits if each.do_not_specialize else name]",
        ),
        (
            "a kernel of one device is launched on another",
            'lines, key, passed = [], ["_device"], []',
            'lines, key, passed = [], ["None"], []',
        ),
        (
            "options of a launch do not count",
            "f\"_key = ({', '.join(key)}, {options})\",",
            "f\"_key = ({', '.join(key)},)\",",
        ),
        (
            "memory of the host is launched on the device",
            "isinstance(made, CompiledKernel) or _ON_HOST in key",
            "isinstance(made, CompiledKernel)",
        ),
        (
            "a profiler's hooks are not called",
            "if _found is None or _begins.calls or _ends.calls:",
            "if _found is None:",
        ),
        (
            "kept kernels are never dropped",
            "if len(self.variants) >= _MOST_KEPT:",
            "if len(self.variants) >= 2 * _MOST_KEPT:",
        ),
    ),
    *mutations_of(
        "src/ops/sampling/mass_threshold.py",
        ("tests/engine/sampling/test_truncation.py",),
        (
            "top_p keeps a token though those before it are enough (by radix)",
            "((histogram > 0) & (larger < target))",
            "((histogram > 0) & (larger <= target))",
        ),
        (
            "negative logits are in the wrong order",
            "return torch.where(bits < 0, -1 - bits, bits + 2**31)",
            "return torch.where(bits < 0, bits + 2**31, bits + 2**31)",
        ),
    ),
    *mutations_of(
        "src/ops/sampling/mass_threshold_triton.py",
        _THRESHOLDS,
        (
            "on a GPU top_p keeps a token though those before it are enough",
            "tl.sum(parts, 1).to(tl.float64) < target",
            "tl.sum(parts, 1).to(tl.float64) <= target",
        ),
        (
            "on a GPU negative logits are ranked by their bits",
            "return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)",
            "return bits",
        ),
        (
            "on a GPU masses are rounded to float32",
            "* _UNITS).to(tl.int64)",
            "* 16777216.0).to(tl.int64)",
        ),
        (
            "on a GPU the likeliest token's mass is not found",
            "_KEY_OF_ONE if WITHIN_ONE",
            "_KEY_OF_ONE - 1 if WITHIN_ONE",
        ),
        (
            "on a GPU values behind a row's last count",
            "return (at < vocab_size).to(tl.int64)",
            "return (at >= 0).to(tl.int64)",
        ),
        (
            "on a GPU rows that lie apart are read as if they were together",
            "values, weights, shares, thresholds, values.stride(0),",
            "values, weights, shares, thresholds, vocab_size,",
        ),
    ),
    *mutations_of(
        "src/engine/sampling/truncation.py",
        ("tests/engine/test_pipeline.py::test_warming_up_writes_nothing_and_draws_for_nobody",),
        (
            "kernels that truncate are compiled while a request waits",
            "    truncate_long(logits, rows)\n\n\ndef _truncate_long(",
            "\n\ndef _truncate_long(",
        ),
    ),
)
