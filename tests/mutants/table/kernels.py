"""Of the compiled kernels: the units that a fault is in are compiled anew, for every level."""

from tests.mutants.mutation import mutations_of, rewrites_of

_TURNS = (
    "tests/ops/attention/test_latent_attention.py::test_heads_whose_keys_do_not_fit_together_take_turns",
)

_ROUNDED = "tests/engine/test_rounded_inputs.py"

MUTATIONS = (
    *mutations_of(
        "src/ops/attention/attend.h",
        (
            "tests/ops/build/test_kernels.py::test_every_level_of_this_machine_and_compiler_is_tested",
        ),
        (
            "bfloat16 decodes drop the value of the last of an even number of keys",
            "if (end > s.now->last) rows_of_values",
            "if (end >= s.now->last) rows_of_values",
        ),
    ),
    *mutations_of(
        "src/ops/attention/work.h",
        ("tests/ops/attention/test_drafted_tokens.py",),
        (
            "a step that verifies drafts rounds otherwise",
            "like_one ? heads : all",
            "all",
        ),
        (
            "many query rows of drafts fold their sums elsewhere",
            "if (folds) path.split = seq_len;\n#if",
            "if (folds) path.split = path.fold = seq_len;\n#if",
        ),
    ),
    *mutations_of(
        "src/ops/attention/like_one.h",
        ("tests/ops/attention/test_drafted_tokens.py",),
        (
            "a prompt's tokens are rounded as drafts",
            "a.deterministic || a.verifies == nullptr || !a.verifies[row]",
            "a.deterministic",
        ),
    ),
    *mutations_of(
        "src/ops/runtime/step.cpp",
        ("tests/engine/speculation/test_rounding.py",),
        (
            "a step in one call does not say that rows verify",
            "end, step.verifies != 0, table",
            "end, false, table",
        ),
    ),
    *mutations_of(
        "src/ops/attention/latent_attention.cpp",
        _TURNS,
        (
            "a second turn of heads has the queries of the first",
            "join(query_of(first + t, head + i), query_dim",
            "join(query_of(first + t, i), query_dim",
        ),
        (
            "a second turn of heads has the keys and values of the first",
            "up_of(head), count * up_rows, made.get()",
            "up_of(0), count * up_rows, made.get()",
        ),
        (
            "a second turn of heads is written over the first",
            "std::memcpy(out_of(first + t, head + i), out.get()",
            "std::memcpy(out_of(first + t, i), out.get()",
        ),
        (
            "a last turn of fewer heads is taken apart as a whole one",
            "out.get() + (t * count + i) * wide,\n",
            "out.get() + (t * together + i) * wide,\n",
        ),
    ),
    *mutations_of(
        "src/ops/projections/experts.cpp",
        ("tests/ops/projections/test_experts.py::test_sizes_that_do_not_fill_a_vector",),
        (
            "the last inputs of a token are not weighed",
            ": load_some(from + h, some)) * weight, some);",
            ": load_some(from + h, some) / weight) * weight, some);",
        ),
        (
            "the last numbers of a token are the sum of one result",
            "(some == W ? load(result) : load_some(result, some))",
            "(some == W ? load(result) : j ? vf{} : load_some(result, some))",
        ),
    ),
    *mutations_of(
        "src/ops/attention/code_tables.h",
        ("tests/ops/attention/test_cached_rows.py::test_heads_that_end_in_half_a_lookup",),
        (
            "a row behind half a lookup begins too late",
            "to += is_half ? 32 : 64;",
            "to += 64;",
        ),
    ),
    *mutations_of(
        "src/ops/projections/integer_tiles.h",
        (
            "tests/ops/projections/test_linear_amx.py"
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
    ),
    *mutations_of(
        "src/ops/projections/pair_tiles.h",
        (
            "tests/ops/projections/test_linear_amx.py::test_strips_of_bfloat16_are_tiles_as_they_lie",
        ),
        (
            "two tiles of tokens meet the first half of a strip twice",
            "multiply_two(tokens, right + 128, sums[0]",
            "multiply_two(tokens, right, sums[0]",
        ),
    ),
    *mutations_of(
        "src/ops/projections/pair_tiles.h",
        (
            "tests/ops/projections/test_linear_amx.py::test_more_tokens_in_strips_than_are_kept_close_to_a_core",
        ),
        (
            "a thread multiplies the tokens that it packed for the range before",
            "held != call || held_begin != begin || held_end != end",
            "held != call",
        ),
        (
            "a thread multiplies the tokens of the call before",
            "held != call || held_begin != begin || held_end != end",
            "held == 0 || held_begin != begin || held_end != end",
        ),
    ),
    *mutations_of(
        "src/ops/projections/pair_tiles.h",
        (
            "tests/ops/projections/test_linear_amx.py::test_many_tokens_meet_the_weights_as_bfloat16",
        ),
        (
            "strips are spread out without their offsets",
            "shifts[v] -= offsets[v];",
            "shifts[v] -= vf{};",
        ),
        (
            "scales are taken for 32 inputs where groups are of 48",
            "unit(std::gcd(args.group, int64_t(kDepth)))",
            "unit(std::min<int64_t>(args.group, kDepth))",
        ),
    ),
    *mutations_of(
        "src/ops/projections/pair_tiles.h",
        (
            "tests/ops/build/test_kernels.py::test_every_level_of_this_machine_and_compiler_is_tested",
        ),
        (
            "results that are written past the caches have half of their outputs twice",
            "_mm512_stream_si512((__m512i*)to, (__m512i)both);",
            "_mm512_stream_si512((__m512i*)to, (__m512i)(v == 0 ? both : vb{}));",
        ),
    ),
    *rewrites_of(
        "src/ops/build/kernel_cache.py",
        ("tests/ops/build/test_kernels.py::test_another_model_of_cpu_takes_its_own_measurements",),
        (
            "what was measured on another model of CPU is taken",
            "KernelCache.directory",
            "digest(A, self._model.encode())",
            "digest(A)",
        ),
    ),
    *rewrites_of(
        "src/ops/build/kernel_cache.py",
        ("tests/ops/build/test_kernels.py",),
        (
            "without a compiler, what was measured on another model of CPU is taken",
            "KernelCache._load_from",
            "self._is_elsewhere(A) and B",
            "False",
        ),
    ),
    *rewrites_of(
        "src/ops/build/ways.py",
        ("tests/ops/build/test_ways.py::test_the_fastest_way_is_chosen_where_it_gains",),
        (
            "a way with other bits is chosen where bits must stay",
            "measure",
            "2",
            "3",
        ),
        (
            "any gain is one",
            "_GAIN",
            "0.95",
            "1.0",
        ),
    ),
    *rewrites_of(
        "src/ops/build/kernels.py",
        ("tests/ops/build/test_kernels.py::test_background_build_takes_over",),
        (
            "matrices are rounded by torch though the kernels are there",
            "_install",
            "rounding.install_cpu(A)",
            "",
        ),
    ),
    *rewrites_of(
        "src/ops/build/units.py",
        (
            "tests/ops/build/test_objects.py::"
            "test_what_a_unit_depends_on_is_what_the_compiler_reads",
        ),
        (
            "headers of other rooms do not count, so a change of them compiles nothing anew",
            "files_of",
            "A if A.exists() else B",
            "A",
        ),
    ),
    *rewrites_of(
        "src/ops/build/kernel_cache.py",
        ("tests/ops/build/test_kernels.py::test_without_a_measurement_a_fixed_table_serves",),
        (
            "a build without a measurement keeps an empty choice, and later starts say nothing",
            "KernelCache._measured",
            "return None",
            "return []",
        ),
    ),
    *rewrites_of(
        "src/ops/build/kernel_cache.py",
        ("tests/ops/build/test_ways.py::test_a_build_keeps_its_choice",),
        (
            "a choice that was kept is not taken",
            "KernelCache._load_from",
            "A['ways'] or ()",
            "()",
        ),
    ),
    *mutations_of(
        "src/ops/projections/outer_products.h",
        ("tests/ops/projections/test_outer_products.py",),
        (
            "a deterministic engine sums many tokens in another order than few",
            "a.tokens >= kFirstOuterTokens && !ways().keeps_one()",
            "a.tokens >= kFirstOuterTokens",
        ),
        (
            "outputs behind the first tile of rows have the bias of the first",
            "load_some(static_cast<const T*>(a.bias) + n, some)",
            "load_some(static_cast<const T*>(a.bias), some)",
        ),
        (
            "a second block of tokens is the first again",
            "static_cast<const T*>(a.x) + first * a.x_stride",
            "static_cast<const T*>(a.x)",
        ),
        (
            "tokens that lie apart are read as if they did not",
            "transpose_tokens(x + v * W * a.x_stride, a.x_stride,",
            "transpose_tokens(x + v * W * a.inputs, a.inputs,",
        ),
        (
            "inputs that fill no vector are left out",
            "for (int64_t i = 0; i < std::min<int64_t>(W, inputs - k); ++i) store(",
            "for (int64_t i = 0; i < W && k < whole; ++i) store(",
        ),
    ),
    *mutations_of(
        "src/ops/projections/ways.h",
        ("tests/ops/projections/test_linear_amx.py::test_a_choice_holds_for_its_format_alone",),
        (
            "offsets make no format of their own",
            "return has_offsets ? format + kWithOffsets - 1 : format;",
            "return format + 0 * int64_t(has_offsets);",
        ),
    ),
    *rewrites_of(
        "src/engine/startup.py",
        (f"{_ROUNDED}::test_a_deterministic_engine_keeps_one_way",),
        (
            "a deterministic engine lets kernels choose their way by the number of tokens",
            "_require_deterministic",
            "A.ways.keeping_one()",
            "contextlib.nullcontext()",
        ),
    ),
    *mutations_of(
        "src/ops/projections/ways.h",
        (f"{_ROUNDED}::test_one_way_is_kept_until_the_last_deterministic_engine_has_ended",),
        (
            "who keeps one way is not counted",
            "keepers += keep ? 1 : -1;",
            "keepers = keep ? 1 : 0;",
        ),
        (
            "one way is kept for good",
            "keepers += keep ? 1 : -1;",
            "keepers += keep ? 1 : 0;",
        ),
    ),
    *mutations_of(
        "src/ops/projections/integer_linear.h",
        ("tests/ops/projections/test_linear_amx.py::test_a_choice_holds_for_its_format_alone",),
        (
            "bfloat16 tokens take the way of others",
            "a.offsets != nullptr), a.tokens, !kIsBFloat16)",
            "a.offsets != nullptr), a.tokens, true)",
        ),
    ),
    *rewrites_of(
        "src/ops/projections/rounding.py",
        ("tests/ops/projections/test_rounding.py::test_sums_of_large_groups_are_exact",),
        (
            "sums of large groups are of float32",
            "_MOST_IN_FLOAT32",
            "2 ** 24 // _PARTS ** 2",
            "2 ** 24",
        ),
    ),
    *rewrites_of(
        "src/ops/attention/cached_rows.py",
        ("tests/ops/attention/test_cached_rows.py",),
        (
            "kernels are told that codes are numbers",
            "kind_of",
            "A.kind",
            "0",
        ),
    ),
    *rewrites_of(
        "src/ops/attention/cached_rows.py",
        (
            "tests/ops/attention/test_cached_rows.py::test_a_reference_divides_by_tensors_as_kernels_do",
        ),
        (
            "a reference multiplies by a reciprocal where kernels divide",
            "to_rows",
            "torch.full_like(A, B)",
            "B",
        ),
    ),
    *rewrites_of(
        "src/models/generic/layers.py",
        (
            "tests/models/test_generic_layers.py::"
            "test_a_thread_with_another_number_of_threads_runs_what_is_compiled",
        ),
        (
            "compiled layers are left by a thread with another number of threads",
            "_kept_guards",
            "A.guard_type != 'GLOBAL_STATE'",
            "True",
        ),
    ),
    *rewrites_of(
        "src/models/generic/loading.py",
        ("tests/models/test_generic.py::test_experts_for_which_a_device_is_waited_for_are_told",),
        (
            "nobody is told that experts wait for the device",
            "_warn_of_waiting_experts",
            "A and type(B)._can_set_experts_implementation() and (B.dtype != _GROUPED)",
            "False and type(B)._can_set_experts_implementation() and (B.dtype != _GROUPED)",
        ),
    ),
    *rewrites_of(
        "src/models/adapters/memory.py",
        ("tests/engine/execution/test_adapter_transfers.py",),
        (
            "an adapter that comes to a device waits for the steps that run there",
            "_send",
            "A.to(B.dtype).contiguous().pin_memory",
            "A.to(B.dtype).contiguous",
        ),
    ),
)
