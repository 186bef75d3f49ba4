"""Of drafts that a GPU makes and verifies itself, as far as a CPU can tell."""

from tests.mutants.mutation import mutations_of

_ON_DEVICE = ("tests/engine/speculation/test_on_device.py",)
_ADVERSARY = "tests/engine/speculation/test_adversary_on_device.py"
_AT_THE_START = (
    f"{_ADVERSARY}::test_where_drafting_fails_at_the_start_requests_are_served_without",
)

MUTATIONS = (
    *mutations_of(
        "src/engine/speculation/choice.py",
        ("tests/engine/speculation/test_exactness.py::test_what_a_gpu_cannot_draft_for_is_refused"
         "_with_the_reason",),
        (
            "a GPU drafts for models whose states it cannot set back",
            "or has_states or has_own_inputs:",
            "or has_own_inputs:",
        ),
        (
            "a GPU drafts for models whose inputs it does not have",
            "or has_states or has_own_inputs:",
            "or has_states:",
        ),
    ),
    *mutations_of(
        "src/engine/speculation/device_check.py",
        (f"{_ADVERSARY}::test_kernels_of_drafts_are_compared_with_what_they_are_to_do",),
        (
            "a kernel that finds wrong drafts serves",
            "return torch.equal(found.cpu(), LOOK_UP.reference(*given, *numbers, 8192))",
            "return found is not None",
        ),
        (
            "a kernel that accepts wrong drafts serves",
            "return all(map(torch.equal, *outcomes))",
            "return len(outcomes) == 2",
        ),
    ),
    *mutations_of(
        "src/engine/startup.py",
        _AT_THE_START,
        (
            "kernels of drafts are not tried at the start",
            "reason = None if bounds is None else why_not(bounds, device)",
            "reason = None",
        ),
    ),
    *mutations_of(
        "src/engine/execution/graphs/planning.py",
        _AT_THE_START,
        (
            "where steps with drafts cannot be captured none are",
            "if has_drafts and failure is not None:",
            "if has_drafts and failure is None:",
        ),
    ),
    *mutations_of(
        "src/engine/speculation/on_device.py",
        _ON_DEVICE,
        (
            "steps with drafts go on failing",
            "        if self._has_ended:\n            return widths\n",
            "",
        ),
        (
            "drafting ends after some failures, whatever is between them",
            "            if not self._has_ended:\n                self._failures = 0\n",
            "            pass\n",
        ),
        (
            "steps are wider than any that is captured",
            "[drafts for drafts in self._possible if drafts <= most]",
            "self._possible",
        ),
        (
            "bounds are those of the drafts that were planned",
            "if (ends := self._ends.get(step.row)) is not None:",
            "if (ends := self._ends.get(-1)) is not None:",
        ),
    ),
    *mutations_of(
        "src/engine/speculation/widths.py",
        _ON_DEVICE,
        (
            "a step is thought to take as long as its longest row alone",
            "            drafts = num_rows * width\n",
            "            drafts = width\n",
        ),
    ),
    *mutations_of(
        "src/engine/execution/drafted_steps.py",
        ("tests/engine/execution/test_drafted_steps.py::test_warming_up_compiles_every_width_and"
         "_changes_nothing",),
        (
            "warming up ends a row",
            "idle, kept = torch.full_like(one, IDLE), torch.empty_like(one)",
            "idle, kept = torch.zeros_like(one), torch.empty_like(one)",
        ),
        (
            "kernels for few drafts are compiled while a request waits",
            "sorted({0, *powers, most})",
            "sorted({most})",
        ),
    ),
    *mutations_of(
        "src/engine/execution/drafted_inputs.py",
        ("tests/engine/execution/test_drafted_inputs.py",),
        (
            "a row begins where an owner before it ended",
            "torch.minimum(torch.maximum(state.lengths[rows_b], least_b), least_b + slack_b)",
            "torch.maximum(state.lengths[rows_b], least_b)",
        ),
        (
            "drafts reach beyond the end of a row",
            "torch.minimum(drafts_b, limits_b - known_b - 1).clamp(min=0)",
            "drafts_b.clamp(min=0)",
        ),
    ),
)  # fmt: skip
