"""Of records: an op's call as torch has it, and as the kernels of the CPU take it."""

from tests.mutants.mutation import rewrites_of

MUTATIONS = (
    *rewrites_of(
        "src/ops/records.py",
        ("tests/ops/test_records.py",),
        (
            "of arguments with defaults only the last may be left out",
            "Record.optional_flat",
            "A.add(B)",
            "A = {B}",
        ),
        (
            "nothing that a call changes is marked as changed",
            "Record.schema",
            "A.changed",
            "False",
        ),
        (
            "an integer that varies specialises compiled code",
            "Record.schema",
            "A.varies",
            "False",
        ),
        (
            "a field that is none is taken without a word",
            "Record.replace",
            "if A:\n    B",
            "if False:\n    B",
        ),
        (
            "a size is that of a tensor which may be absent",
            "Record.place_of",
            "isinstance(A, TensorField) and A.is_optional",
            "False",
        ),
        (
            "a result that is traced has the dtype of what it is like",
            "Record.traced",
            "A or B.dtype",
            "B.dtype",
        ),
    ),
    *rewrites_of(
        "src/ops/runtime/packing.py",
        ("tests/ops/test_records.py",),
        (
            "sizes are not compared",
            "_Source._of_sizes",
            "f'{A} == {in_parentheses(B)}'",
            "f'{A} == {A}'",
        ),
        (
            "a tensor may have more dimensions than are named",
            "_Source._of_sizes",
            "yield f'{A}.dim() == {len(B)}'",
            "",
        ),
        (
            "a tensor of another dtype is taken for one of the call's",
            "_Source._of_tensor",
            "f'{A}.dtype == main'",
            "'main == main'",
        ),
        (
            "a dtype that is said is not asked for",
            "_Source._of_tensor",
            "f'{A}.dtype == dtype_of_{A}'",
            "f'dtype_of_{A} == dtype_of_{A}'",
        ),
        (
            "what is not contiguous is read as if it were",
            "_Source._of_tensor",
            "'.is_contiguous()'",
            "' is not None'",
        ),
        (
            "columns that lie apart are read as neighbours",
            "_Source._of_tensor",
            "'.stride()[1] == 1 or '",
            "'.stride()[1] >= 1 or '",
        ),
        (
            "the stride of a dimension of size one refuses a tensor",
            "_lies_packed",
            "A > 1 and B != C",
            "B != C",
        ),
        (
            "a status of a kernel is not looked at",
            "_Source.lines",
            "'    if status:'",
            "'    if False:'",
        ),
        (
            "an absent tensor has the address of what is not there",
            "_Source._value",
            "f'(0 if {A.of} is None else {B})'",
            "B",
        ),
    ),
    *rewrites_of(
        "src/ops/runtime/sizes.py",
        ("tests/ops/test_records.py",),
        (
            "a size that follows from a difference is taken from a sum",
            "_solved",
            "' - ('",
            "' + ('",
        ),
    ),
    *rewrites_of(
        "src/ops/runtime/struct_fields.py",
        ("tests/ops/test_records.py",),
        (
            "a name of C++ that stands for nothing is passed over",
            "fields_of",
            "A.keys() - B.keys()",
            "A.keys() - A.keys()",
        ),
        (
            "a tensor that a call changes is const to its kernel",
            "_address",
            "'' if A.changed else 'const '",
            "'const '",
        ),
    ),
    *rewrites_of(
        "src/ops/runtime/struct_fields.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "what compiled code leaves out is 0",
            "_number",
            "'' if A is REQUIRED else str(B(A))",
            "''",
        ),
        (
            "no struct has numbers of a nested value",
            "_fields_of",
            "A in _PARTS",
            "False",
        ),
    ),
    *rewrites_of(
        "src/ops/runtime/compiled_entries.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "compiled code hands over no group",
            "_value",
            "f'seen_{A.of}.{A.source}'",
            "''",
        ),
    ),
    *rewrites_of(
        "src/ops/runtime/c_records.py",
        ("tests/ops/runtime/test_abi.py",),
        (
            "tensors of a value are read wherever they lie",
            "Record.of",
            "A.is_cpu and A.is_contiguous()",
            "A.is_cpu",
        ),
    ),
    *rewrites_of(
        "src/ops/runtime/matrix_reading.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "scales of too few rows are read to the end",
            "reader_of.read",
            "A = B and C.shape == (*D, E)",
            "A = B and C.dim() == len((*D, E))",
        ),
        (
            "scales of groups are read as float32 whatever they are",
            "reader_of.read",
            "_GROUP_DTYPES[A.dtype]",
            "0",
        ),
        (
            "offsets of another dtype than the scales are read as if of theirs",
            "reader_of.read",
            "A is not None and B.shape == C.shape and (B.dtype == C.dtype) and B.is_contiguous()",
            "A is not None and B.shape == C.shape and B.is_contiguous()",
        ),
        (
            "a matrix without offsets' scales keeps its offsets to itself",
            "reader_of.read",
            "if A is not None:\n    B",
            "if False:\n    B",
        ),
    ),
    *rewrites_of(
        "src/ops/projections/matrix_field.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "an op that takes no order forgets a matrix's",
            "MatrixField.parts",
            (
                "if A.order is not None:\n"
                "    raise ValueError(f'{self.name} must have its columns in the order of inputs')"
            ),
            (
                "if False:\n"
                "    raise ValueError(f'{self.name} must have its columns in the order of inputs')"
            ),
        ),
        (
            "a matrix loses its order among flat arguments",
            "MatrixField.of",
            "B._replace(order=A[0]) if A else B",
            "B",
        ),
    ),
    *rewrites_of(
        "src/ops/matrix.py",
        ("tests/ops/test_matrix.py",),
        (
            "every launch asks a GPU what it multiplies",
            "has_capability",
            "_has_capability",
            "_ask_capability",
        ),
        (
            "torch's compiler warns of a cache",
            "has_capability",
            "A.index is None or torch.compiler.is_compiling()",
            "A.index is None",
        ),
        (
            "int8 in groups is padded like int8 by row",
            "fits_strips",
            "A.dtype == torch.int8 and (not B)",
            "A.dtype == torch.int8",
        ),
        (
            "a row of zeros becomes no numbers in 8-bit floating point",
            "_rounded_float8",
            "torch.where(A == 0, 1.0, B)",
            "B",
        ),
    ),
    *rewrites_of(
        "src/ops/matrix.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "a stack has the shape of one of its matrices",
            "Matrix.shape",
            "self.values.shape[:1] if self.is_stack else ()",
            "()",
        ),
    ),
)
