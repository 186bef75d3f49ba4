"""Of who drafts for a model, and of what a start and a plan count for it."""

from tests.mutants.mutation import rewrites_of

_DRAFTS = ("tests/engine/sizing/test_drafts.py",)
_STATES = ("tests/engine/speculation/test_states.py",)
_LEFT_OUT = (f"{_DRAFTS[0]}::test_a_layer_that_does_not_fit_is_left_out_unless_it_is_asked_for",)

MUTATIONS = (
    *rewrites_of(
        "src/engine/speculation/choice.py",
        _DRAFTS,
        (
            "drafters serve models that generate nothing",
            "_why_not",
            "if not A.generates: return B",
            "",
        ),
        (
            "the default has drafts on a GPU",
            "device_bounds",
            'A.method == "suffix"',
            'A.method in ("suffix", "auto")',
        ),
        (
            "drafts are counted that nobody makes",
            "most_drafts",
            "A.num_speculative_tokens if B.sources else 0",
            "A.num_speculative_tokens",
        ),
    ),
    *rewrites_of(
        "src/models/served.py",
        (f"{_DRAFTS[0]}::test_a_gpu_counts_drafts_only_if_they_are_asked_for_by_name",),
        (
            "a plan for a GPU captures no steps with drafts",
            "device_of",
            "return A.options.served_on",
            "return A.spec.device",
        ),
    ),
    *rewrites_of(
        "src/models/tasks.py",
        _DRAFTS,
        (
            "a classifier generates",
            "may_generate",
            "A.classifier is not None or B",
            "B",
        ),
        (
            "a model generates although its tasks do not name that",
            "may_generate",
            'A is not None or (B != "auto" and C)',
            "A is not None",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/state_memory.py",
        _STATES,
        (
            "drafts that nobody has asked for take the last snapshots",
            "plan_states",
            "min(A, B, C, D + E // _SNAPSHOTS_PER_SPARE)",
            "min(A, B, C, D + E)",
        ),
        (
            "drafts that nobody has asked for take more than an eighth of the slots",
            "plan_states",
            "min(A, B, C // 8, D + E // _SNAPSHOTS_PER_SPARE)",
            "min(A, B, D + E // _SNAPSHOTS_PER_SPARE)",
        ),
    ),
    *rewrites_of(
        "src/engine/sizing/start.py",
        _DRAFTS,
        (
            "drafts take the slots of snapshots whoever has asked for them",
            "_size",
            'A.method == "auto"',
            "False",
        ),
        (
            "a history is kept although nobody reads it",
            "_size",
            "if not A.sources and B: C; D",
            "",
        ),
        (
            "a layer is kept that shortens the context",
            "_size",
            'A.method != "auto" or not B',
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/startup.py",
        _LEFT_OUT,
        (
            "a layer that does not fit ends a start that has not asked for it",
            "_with_drafts",
            "why_left_out(A, str(B))",
            "None",
        ),
    ),
    *rewrites_of(
        "src/engine/sizing/attempt.py",
        _LEFT_OUT,
        (
            "a plan does not leave out what a start leaves out",
            "Setup.attempt",
            "why_left_out(A, B)",
            "None",
        ),
    ),
    *rewrites_of(
        "src/engine/drafters/loading.py",
        ("tests/engine/drafters/test_mtp.py",),
        (
            "a layer may take all memory that is free beside the model",
            "_brought",
            "_SHARE_OF_FREE * A > B",
            "A > B",
        ),
    ),
    *rewrites_of(
        "src/engine/sizing/planning.py",
        ("tests/engine/sizing/test_drafts.py",),
        (
            "a plan compares vocabularies by their sizes alone",
            "plan_model",
            "tokenizer_for(A, B)",
            "None",
        ),
    ),
    *rewrites_of(
        "src/cli/doctor/kernels.py",
        ("tests/cli/test_doctor.py",),
        (
            "fields that end a start are good",
            "drafts",
            "require_fields(A.speculation)",
            "pass",
        ),
        (
            "weights that do not fit a model are good",
            "_weights",
            "load_drafts(A, B, C, outlines=True)",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/choice.py",
        ("tests/cli/test_doctor.py",),
        (
            "too few bytes for outputs are found when drafters are made",
            "choose_sources",
            "require_size(A)",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/cli/bench/calibrate.py",
        ("tests/bench/simulate/test_commands.py",),
        (
            "steps with drafts are priced",
            "run",
            "_without_drafts(A)",
            "A",
        ),
    ),
    *rewrites_of(
        "src/cli/bench/serve.py",
        ("tests/bench/test_commands.py",),
        (
            "drafts before a run count in it",
            "_measured",
            "A.since(B)",
            "A",
        ),
        (
            "drafts of a run are not kept with its result",
            "_run",
            "A | B.fields()",
            "A",
        ),
    ),
)
