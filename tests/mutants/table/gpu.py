"""Of what runs on a GPU, as far as a CPU can tell."""

from tests.mutants.mutation import mutations_of

_INTERPRETED = ("tests/ops/test_triton.py::test_triton_kernels[triton_in_interpreter]",)
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
            "return *few, max(many, min(needed, most_tokens))",
            "return *few, many",
        ),
    ),
    *mutations_of(
        "src/ops/triton/paged_decode.py",
        _VARIANTS,
        (
            "block tables of a second KV group select another variant of the decode kernel",
            '["block_tables", "seq_lens", "table_stride", "rows"]',
            '["seq_lens", "table_stride", "rows"]',
        ),
    ),
    *mutations_of(
        "src/ops/triton/lora.py",
        _VARIANTS,
        (
            "one token with an adapter selects another variant",
            '@triton.jit(do_not_specialize=["slots", "tokens"])\ndef _project(',
            '@triton.jit(do_not_specialize=["slots"])\ndef _project(',
        ),
    ),
    *mutations_of(
        "src/ops/triton/linear_recurrence.py",
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
        "src/ops/triton/causal_convolution.py",
        _INTERPRETED,
        (
            "on a GPU a convolution's state is one input old",
            "place = count + kept",
            "place = count - 1 + kept",
        ),
    ),
)
