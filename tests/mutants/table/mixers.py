"""Of mixers: the one-call step's functions, what layers share, and what owns a group of layers."""

from tests.mutants.mutation import mutations_of, rewrites_of

_ONE_CALL = (
    "tests/engine/execution/test_step_computer.py::test_one_call_and_its_parts_leave_the_same_bits",
)
_OWNERS = ("tests/engine/execution/test_group_attention.py",)
_LFM2 = "tests/models/test_oracle.py::test_shapes_biases_windows_and_parameters[lfm2-plain]"
_INPUTS = ("tests/engine/requests/test_step_inputs.py",)

MUTATIONS = (
    *mutations_of(
        "src/ops/runtime/step_mixers.cpp",
        _ONE_CALL,
        (
            "a recurrence that narrows hands on the first tokens",
            "if (step->narrows()) in.pick(all, size_t(width) * item",
            "if (step->narrows()) in.pick(all, 0",
        ),
        (
            "states are those of the step's rows in turn",
            "convolution.slots = recurrence.slots = in.all_rows.data();",
            "convolution.slots = recurrence.slots = in.positions.data();",
        ),
        (
            "a short convolution that narrows hands on the first tokens",
            "if (step->narrows()) in.pick(all, row, row, &in.mixed);",
            "if (step->narrows()) in.pick(all, 0, row, &in.mixed);",
        ),
        (
            "a short convolution reads the states of other rows",
            "args.slots = in.all_rows.data(), args.starts",
            "args.slots = in.positions.data(), args.starts",
        ),
    ),
    *mutations_of(
        "src/ops/states/recurrence.cpp",
        ("tests/ops/test_declarations.py::test_compiled_kernel_equals_reference",),
        (
            "a convolution without SiLU has it",
            "put(a.silu ? silu(sum) : sum,",
            "put(silu(sum),",
        ),
    ),
    *rewrites_of(
        "src/models/layers/short_convolution.py",
        (_LFM2,),
        (
            "the factor of inputs is that of outputs",
            "short_convolution_in",
            "(A * B, C.clone(memory_format=torch.contiguous_format))",
            "(C * B, A.clone(memory_format=torch.contiguous_format))",
        ),
    ),
    *rewrites_of(
        "src/models/families/lfm2.py",
        (
            "tests/models/test_spellings.py::"
            "test_files_of_lfm2_of_all_ages_mean_what_the_reference_reads",
        ),
        (
            "the width of an MLP is rounded down",
            "_width",
            "-(-A // B)",
            "A // B",
        ),
        (
            "the older name of tied embeddings is passed over",
            "lfm2_decoder",
            "'tie_word_embeddings' if A.raw('tie_embedding') is None else 'tie_embedding'",
            "'tie_word_embeddings'",
        ),
        (
            "layers that are named have convolutions",
            "Lfm2.describe",
            "LAYER_TYPES[A in B]",
            "LAYER_TYPES[A not in B]",
        ),
    ),
    *rewrites_of(
        "src/ops/projections/routing.py",
        ("tests/ops/projections/test_routing.py",),
        (
            "what a family adds to the sum of weights is next to nothing",
            "route",
            "A.added",
            "TOO_SMALL_TO_SHOW",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/forward_pass.py",
        ("tests/engine/execution/mixers/test_what_layers_share.py",),
        (
            "every layer prepares what others share",
            "ForwardPass.__init__",
            "type(A)",
            "layer",
        ),
        (
            "layers of other shapes share what one of them prepares",
            "ForwardPass.__init__",
            "(type(A), A.shares)",
            "type(A)",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/forward_pass.py",
        (_ONE_CALL[0] + "[chunk-granite_moehybrid]",),
        (
            "what a layer before the last needs is not prepared",
            "ForwardPass.__init__",
            "self._metadata_of[-1]",
            "len(numbers) - 1",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/group_attention.py",
        _OWNERS,
        (
            "a backend gets groups that it does not honour",
            "find_backends",
            "not any(A)",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/row_inputs.py",
        _INPUTS,
        (
            "positions go on from the last token's",
            "RowInputs._numbers",
            "A.max",
            "A[-1].min",
        ),
        (
            "a chunk's values begin with the prompt's first",
            "RowInputs._numbers",
            "A[B.start:B.start + C]",
            "A[:C]",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/step_inputs.py",
        _INPUTS,
        (
            "prompts with other values share blocks",
            "salted",
            "if not A:\n    return B",
            "return B",
        ),
        (
            "later positions may leave the table",
            "_check_onwards",
            "A > B",
            "A > 2 * B",
        ),
    ),
    *rewrites_of(
        "src/models/parts/recurrence.py",
        ("tests/models/test_post_norms.py",),
        (
            "a norm behind a recurrence is read from nowhere",
            "_Writer.write_out",
            "self._layer.block_norm(A, B)",
            "None",
        ),
    ),
    *rewrites_of(
        "src/models/layers/short_convolution.py",
        ("tests/models/test_post_norms.py",),
        (
            "a norm behind a short convolution is left out",
            "short_convolution_out",
            "weights.post_norm",
            "None",
        ),
    ),
)
