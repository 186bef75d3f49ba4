"""Of the compiled kernels; each is compiled anew, so they are few."""

from tests.mutants.mutation import mutations_of

MUTATIONS = mutations_of(
    "src/ops/cpu/attend.h",
    ("tests/ops/test_build.py::test_every_level_of_this_machine_and_compiler_is_tested",),
    (
        "bfloat16 decodes drop the value of the last of an even number of keys",
        "if (end > s.now->last) rows_of_values",
        "if (end >= s.now->last) rows_of_values",
    ),
)
