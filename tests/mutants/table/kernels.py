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
) + mutations_of(
    "src/ops/cpu/integer_tiles.h",
    (
        "tests/ops/test_linear_amx.py"
        "::test_bytes_have_the_same_bits_by_tiles_and_by_products_of_four",
    ),
    (
        "tiles of bytes take the second of every eight inputs' halves for the first",
        "std::memcpy(at, &low, sizeof low);",
        "std::memcpy(at, &high, sizeof high);",
    ),
    (
        "tiles of bytes leave out the last unit of each four",
        "if (count > 3) _tile_stored(3, sums[3], 64);",
        "if (count > 4) _tile_stored(3, sums[3], 64);",
    ),
)
