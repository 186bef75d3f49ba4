"""Of what runs on a GPU, as far as a CPU can tell."""

from tests.mutants.mutation import mutations_of, rewrites_of

_INTERPRETED = ("tests/ops/test_triton.py::test_triton_kernels[triton_in_interpreter]",)
_THRESHOLDS = ("tests/ops/test_triton.py::test_triton_kernels[triton_in_interpreter thresholds]",)
_VARIANTS = ("tests/ops/test_triton.py::test_triton_kernels[triton_variants]",)

MUTATIONS = (
    *rewrites_of(
        "src/compile/just_in_time.py",
        (
            "tests/compile/test_just_in_time.py::test_a_weight_that_comes_twice_does_so_in_every_call",
        ),
        (
            "code that was compiled for one weight at two places is called with two",
            "_description",
            "repeats(A)",
            "()",
        ),
    ),
    *rewrites_of(
        "src/compile/loaded.py",
        (
            "tests/compile/test_ahead.py::test_other_weights_than_it_was_compiled_for_are_refused",
            "tests/compile/test_ahead.py::test_projections_are_those_of_the_op",
        ),
        (
            "code of one encoding is bound to a matrix of another",
            "_require_same",
            "A = getattr(B, '_fields', range(len(B)))",
            "return",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/warm_up.py",
        _VARIANTS,
        (
            "large tiles of many experts are compiled while the first long prompt waits",
            "warm_up_tokens",
            "max(A, B)",
            "A",
        ),
    ),
    *rewrites_of(
        "src/ops/attention/paged_decode_triton.py",
        _VARIANTS,
        (
            "block tables of a second KV group select another variant of the decode kernel",
            "_decode_kernel",
            "['block_tables', 'seq_lens', 'table_stride', 'rows']",
            "['seq_lens', 'table_stride', 'rows']",
        ),
    ),
    *rewrites_of(
        "src/ops/projections/lora_triton.py",
        _VARIANTS,
        (
            "one token with an adapter selects another variant",
            "_project",
            "['slots', 'tokens']",
            "['slots']",
        ),
    ),
    *rewrites_of(
        "src/ops/states/linear_recurrence_triton.py",
        _INTERPRETED,
        (
            "on a GPU the output of padding behind recurrent layers is left as it was",
            "_recurrence_kernel",
            "range(A, B, C)",
            "range(B, B, C)",
        ),
        (
            "on a GPU the delta rule writes what a state holds already",
            "_recurrence_kernel",
            "if A:\n    B -= tl.sum(C * D[:, None], 0)",
            "if A and NORMALIZES == 2:\n    B -= tl.sum(C * D[:, None], 0)",
        ),
    ),
    *rewrites_of(
        "src/ops/states/causal_convolution_triton.py",
        _INTERPRETED,
        (
            "on a GPU a convolution's state is one input old",
            "_keep_kernel",
            "A = B + C\nif A < D - 1:\n    E\nelse:\n    F",
            "A = B - 1 + C\nif A < D - 1:\n    E\nelse:\n    F",
        ),
    ),
    *rewrites_of(
        "src/ops/launching_triton.py",
        ("tests/ops/test_launching.py",),
        (
            "a kept kernel is launched with tensors of another dtype",
            "_written",
            "[f'_kind_{A}', *([f'_aligned_{A}'] if B else ())]",
            "[*([f'_aligned_{A}'] if B else ())]",
        ),
        (
            "a kernel for aligned memory is launched with other memory",
            "_written",
            "' & 15 == 0'",
            "' & 3 == 0'",
        ),
        (
            "a kernel for 32 bits is launched with a larger number",
            "_written",
            "' <= 2147483647) or '",
            "' <= 2147483648) or '",
        ),
        (
            "a kernel for an integer is launched with a fraction",
            "_written",
            "[f'{A}.__class__', C if B.do_not_specialize else A]",
            "[C if B.do_not_specialize else A]",
        ),
        (
            "a kernel of one device is launched on another",
            "_written",
            "'_device'",
            "'None'",
        ),
        (
            "options of a launch do not count",
            "_written",
            "f\"_key = ({', '.join(A)}, {B})\"",
            "f\"_key = ({', '.join(A)},)\"",
        ),
        (
            "memory of the host is launched on the device",
            "_Kept.through_triton",
            "not isinstance(A, CompiledKernel) or _ON_HOST in B",
            "not isinstance(A, CompiledKernel)",
        ),
        (
            "a profiler's hooks are not called",
            "_written",
            "'if _found is None or _begins.calls or _ends.calls:'",
            "'if _found is None:'",
        ),
        (
            "a profiler's hooks behind launches are not called",
            "_written",
            "'if _found is None or _begins.calls or _ends.calls:'",
            "'if _found is None or _begins.calls:'",
        ),
        (
            "kept kernels are never dropped",
            "_Kept.through_triton",
            "_MOST_KEPT",
            "2 * _MOST_KEPT",
        ),
    ),
    *rewrites_of(
        "src/ops/sampling/mass_threshold.py",
        ("tests/engine/sampling/test_truncation.py",),
        (
            "top_p keeps a token though those before it are enough (by radix)",
            "reference",
            "(A > 0) & (B < C)",
            "(A > 0) & (B <= C)",
        ),
        (
            "negative logits are in the wrong order",
            "_sortable",
            "-1 - A",
            "A + 2 ** 31",
        ),
    ),
    *rewrites_of(
        "src/ops/sampling/mass_threshold_triton.py",
        _THRESHOLDS,
        (
            "on a GPU top_p keeps a token though those before it are enough",
            "_threshold_kernel",
            "tl.sum(A, 1).to(tl.float64) < B",
            "tl.sum(A, 1).to(tl.float64) <= B",
        ),
        (
            "on a GPU negative logits are ranked by their bits",
            "_keys",
            "tl.where(A < 0, A ^ 2147483647, A)",
            "A",
        ),
        (
            "on a GPU masses are rounded to float32",
            "_masses",
            "_UNITS",
            "16777216.0",
        ),
        (
            "on a GPU the likeliest token's mass is not found",
            "_threshold_kernel",
            "_KEY_OF_ONE",
            "_KEY_OF_ONE - 1",
        ),
        (
            "on a GPU values behind a row's last count",
            "_masses",
            "(A < B).to",
            "(A >= 0).to",
        ),
        (
            "on a GPU rows that lie apart are read as if they were together",
            "run",
            "_launch_threshold(A, B, C, D, E, B.stride(0), F, G, **H)",
            "_launch_threshold(A, B, C, D, E, G, F, G, **H)",
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
