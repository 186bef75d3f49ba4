"""Of drafts that a GPU makes and verifies itself, as far as a CPU can tell."""

from tests.mutants.mutation import rewrites_of

_ON_DEVICE = ("tests/engine/speculation/test_on_device.py",)
_ADVERSARY = "tests/engine/speculation/test_adversary_on_device.py"
_AT_THE_START = (
    f"{_ADVERSARY}::test_where_drafting_fails_at_the_start_requests_are_served_without",
)

MUTATIONS = (
    *rewrites_of(
        "src/engine/speculation/choice.py",
        (
            "tests/engine/speculation/test_exactness.py"
            "::test_what_a_gpu_cannot_draft_for_is_refused_with_the_reason",
        ),
        (
            "a GPU drafts for models whose states it cannot set back",
            "device_bounds",
            "A.has_states or A.has_own_inputs",
            "A.has_own_inputs",
        ),
        (
            "a GPU drafts for models whose inputs it does not have",
            "device_bounds",
            "A.has_states or A.has_own_inputs",
            "A.has_states",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/device_check.py",
        (f"{_ADVERSARY}::test_kernels_of_drafts_are_compared_with_what_they_are_to_do",),
        (
            "a kernel that finds wrong drafts serves",
            "why_not",
            "if not _finds_drafts(A, B, C): return D",
            "",
        ),
        (
            "a kernel that accepts wrong drafts serves",
            "why_not",
            "if not _accepts_drafts(A, B): return C",
            "",
        ),
    ),
    *rewrites_of(
        "src/engine/startup.py",
        _AT_THE_START,
        (
            "kernels of drafts are not tried at the start",
            "_build_runner",
            "None if A is None else why_not(A, B)",
            "None",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/graphs/planning.py",
        _AT_THE_START,
        (
            "where steps with drafts cannot be captured none are",
            "plan_graphs",
            "A and B is not None",
            "A and B is None",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/on_device.py",
        _ON_DEVICE,
        (
            "steps with drafts go on failing",
            "DeviceSpeculation._chosen",
            "if self._has_ended: return A",
            "",
        ),
        (
            "drafting ends after some failures, whatever is between them",
            "DeviceSpeculation.launching",
            "self._failures = 0",
            "pass",
        ),
        (
            "steps are wider than any that is captured",
            "DeviceSpeculation._chosen",
            "[A for A in self._possible if A <= B]",
            "self._possible",
        ),
        (
            "bounds are those of the drafts that were planned",
            "DeviceSpeculation._known",
            "self._ends.get(A)",
            "self._ends.get(-1)",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/widths.py",
        _ON_DEVICE,
        (
            "a step is thought to take as long as its longest row alone",
            "Widths.choose_width",
            "A * self._costs.price(B, A)",
            "A / num_rows * self._costs.price(B, A)",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/drafted_steps.py",
        (
            "tests/engine/execution/test_drafted_steps.py"
            "::test_warming_up_compiles_every_width_and_changes_nothing",
        ),
        (
            "warming up ends a row",
            "DraftedSteps.warm_up",
            "torch.full_like(A, IDLE)",
            "torch.zeros_like(A)",
        ),
        (
            "kernels for few drafts are compiled while a request waits",
            "DraftedSteps.warm_up",
            "sorted(A)",
            "[most]",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/drafted_inputs.py",
        ("tests/engine/execution/test_drafted_inputs.py",),
        (
            "a row begins where an owner before it ended",
            "draft",
            "torch.minimum(torch.maximum(A, B), B + C)",
            "torch.maximum(A, B)",
        ),
        (
            "drafts reach beyond the end of a row",
            "draft",
            "torch.minimum(A, B - C - 1)",
            "A",
        ),
    ),
)
