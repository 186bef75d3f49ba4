"""Of mixers: the one-call step's functions, what layers share, and what owns a group of layers."""

from tests.mutants.mutation import mutations_of

_ONE_CALL = ("tests/engine/test_step_computer.py::test_one_call_and_its_parts_leave_the_same_bits",)
_OWNERS = ("tests/engine/test_group_attention.py",)
_LFM2 = "tests/models/test_oracle.py::test_shapes_biases_windows_and_parameters[lfm2-plain]"
_INPUTS = ("tests/engine/test_step_inputs.py",)

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
    *mutations_of(
        "src/models/layers/short_convolution.py",
        (_LFM2,),
        (
            "the factor of inputs is that of outputs",
            "return before * given, behind.clone(",
            "return behind * given, before.clone(",
        ),
    ),
    *mutations_of(
        "src/models/families/lfm2.py",
        (
            "tests/models/test_spellings.py::"
            "test_files_of_lfm2_of_all_ages_mean_what_the_reference_reads",
        ),
        (
            "the width of an MLP is rounded down",
            "width = -(-width // multiple) * multiple",
            "width = width // multiple * multiple",
        ),
        (
            "the older name of tied embeddings is passed over",
            'if fields.raw("tie_embedding") is None else "tie_embedding"',
            "",
        ),
        (
            "layers that are named have convolutions",
            "LAYER_TYPES[layer in attending]",
            "LAYER_TYPES[layer not in attending]",
        ),
    ),
    *mutations_of(
        "src/ops/projections/routing.py",
        ("tests/ops/projections/test_routing.py",),
        (
            "what a family adds to the sum of weights is next to nothing",
            "keepdim=True) + routing.added)",
            "keepdim=True) + TOO_SMALL_TO_SHOW)",
        ),
    ),
    *mutations_of(
        "src/engine/execution/forward_pass.py",
        ("tests/engine/test_mixers.py",),
        (
            "every layer prepares what others share",
            "numbers.setdefault((type(mixer), mixer.shares), len(numbers))",
            "numbers.setdefault((layer, mixer.shares), len(numbers))",
        ),
        (
            "layers of other shapes share what one of them prepares",
            "numbers.setdefault((type(mixer), mixer.shares), len(numbers))",
            "numbers.setdefault(type(mixer), len(numbers))",
        ),
    ),
    *mutations_of(
        "src/engine/execution/forward_pass.py",
        (_ONE_CALL[0] + "[chunk-granite_moehybrid]",),
        (
            "what a layer before the last needs is not prepared",
            "self._metadata_of.count(self._metadata_of[-1]) == 1",
            "self._metadata_of.count(len(numbers) - 1) == 1",
        ),
    ),
    *mutations_of(
        "src/engine/execution/group_attention.py",
        _OWNERS,
        (
            "a backend gets groups that it does not honour",
            "if not any(reasons):",
            "if reasons:",
        ),
    ),
    *mutations_of(
        "src/engine/execution/row_inputs.py",
        _INPUTS,
        (
            "positions go on from the last token's",
            "int(values.max()) + 1",
            "int(values[-1].min()) + 1",
        ),
        (
            "a chunk's values begin with the prompt's first",
            "values[step.start : step.start + count]",
            "values[:count]",
        ),
    ),
    *mutations_of(
        "src/engine/requests/step_inputs.py",
        _INPUTS,
        (
            "prompts with other values share blocks",
            "    if not values:\n        return salt\n",
            "    return salt\n",
        ),
        (
            "later positions may leave the table",
            "    if last > most:\n",
            "    if last > 2 * most:\n",
        ),
    ),
)
