"""Of records: an op's call as torch has it, and as the kernels of the CPU take it."""

from tests.mutants.mutation import mutations_of

MUTATIONS = (
    *mutations_of(
        "src/ops/records.py",
        ("tests/ops/test_records.py",),
        (
            "of arguments with defaults only the last may be left out",
            "                names.add(name)\n",
            "                names = {name}\n",
        ),
        (
            "nothing that a call changes is marked as changed",
            'if each.changed else "Tensor"',
            'if False else "Tensor"',
        ),
        (
            "an integer that varies specialises compiled code",
            '"SymInt" if each.varies else',
            '"SymInt" if False else',
        ),
        (
            "a field that is none is taken without a word",
            "        if unknown:\n",
            "        if False:\n",
        ),
        (
            "a result that is traced has the dtype of what it is like",
            "dtype=dtype or like.dtype",
            "dtype=like.dtype",
        ),
    ),
    *mutations_of(
        "src/ops/runtime/packing.py",
        ("tests/ops/test_records.py",),
        (
            "sizes are not compared",
            'yield f"{size} == {in_parentheses(dim)}"',
            'yield f"{size} == {size}"',
        ),
        (
            "a tensor of another dtype is taken for one of the call's",
            'yield f"{name}.dtype == main"',
            'yield "main == main"',
        ),
        (
            "a dtype that is said is not asked for",
            'yield f"{name}.dtype == dtype_of_{name}"',
            'yield f"dtype_of_{name} == dtype_of_{name}"',
        ),
        (
            "what is not contiguous is read as if it were",
            'yield f"{name}.is_contiguous()"',
            'yield f"{name} is not None"',
        ),
        (
            "columns that lie apart are read as neighbours",
            'yield f"({name}.stride()[1] == 1 or',
            'yield f"({name}.stride()[1] >= 1 or',
        ),
        (
            "the stride of a dimension of size one refuses a tensor",
            "if size > 1 and stride != expected:",
            "if stride != expected:",
        ),
        (
            "a status of a kernel is not looked at",
            'yield "    if status:"',
            'yield "    if False:"',
        ),
        (
            "an absent tensor has the address of what is not there",
            'return f"(0 if {field.of} is None else {address})"',
            "return address",
        ),
    ),
    *mutations_of(
        "src/ops/runtime/sizes.py",
        ("tests/ops/test_records.py",),
        (
            "a size that follows from a difference is taken from a sum",
            'value = f"({value} - ({other}))"',
            'value = f"({value} + ({other}))"',
        ),
    ),
    *mutations_of(
        "src/ops/runtime/struct_fields.py",
        ("tests/ops/test_records.py",),
        (
            "a name of C++ that stands for nothing is passed over",
            "if unknown := renamed.keys() - made.keys():",
            "if unknown := renamed.keys() - renamed.keys():",
        ),
        (
            "a tensor that a call changes is const to its kernel",
            "'' if tensor.changed else 'const '",
            "'const '",
        ),
    ),
    *mutations_of(
        "src/ops/runtime/struct_fields.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "what compiled code leaves out is 0",
            'text = "" if default is REQUIRED else str(whole(default))',
            'text = ""',
        ),
        (
            "no struct has numbers of a nested value",
            "                if kind in _PARTS:\n",
            "                if False:\n",
        ),
    ),
    *mutations_of(
        "src/ops/runtime/compiled_entries.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "compiled code hands over no group",
            'case "group" | "group_dtype":\n            return f"seen_{field.of}.{field.source}"',
            'case "group" | "group_dtype":\n            return ""',
        ),
    ),
    *mutations_of(
        "src/ops/runtime/c_records.py",
        ("tests/ops/runtime/test_abi.py",),
        (
            "tensors of a value are read wherever they lie",
            "if not (each.is_cpu and each.is_contiguous()):",
            "if not each.is_cpu:",
        ),
    ),
    *mutations_of(
        "src/ops/runtime/matrix_reading.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "scales of too few rows are read to the end",
            "scales.shape == (*stacked, outputs)",
            "scales.dim() == 1 + len(stacked)",
        ),
        (
            "scales of groups are read as float32 whatever they are",
            "return (*stacked, outputs, inputs, group or 0, _GROUP_DTYPES[scales.dtype])",
            "return (*stacked, outputs, inputs, group or 0, 0)",
        ),
        (
            "offsets of another dtype than the scales are read as if of theirs",
            "            and offsets.dtype == scales.dtype\n",
            "",
        ),
        (
            "a matrix without offsets' scales keeps its offsets to itself",
            "if offsets is not None:\n                raise",
            "if False:\n                raise",
        ),
    ),
    *mutations_of(
        "src/ops/projections/matrix_field.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "an op that takes no order forgets a matrix's",
            "if matrix.order is not None:\n            raise",
            "if False:\n            raise",
        ),
        (
            "a matrix loses its order among flat arguments",
            "return matrix._replace(order=order[0]) if order else matrix",
            "return matrix",
        ),
    ),
    *mutations_of(
        "src/ops/matrix.py",
        ("tests/ops/test_matrix.py",),
        (
            "every launch asks a GPU what it multiplies",
            "    return _has_capability(device, least)\n",
            "    return _ask_capability(device, least)\n",
        ),
        (
            "torch's compiler warns of a cache",
            "if device.index is None or torch.compiler.is_compiling():",
            "if device.index is None:",
        ),
    ),
    *mutations_of(
        "src/ops/matrix.py",
        ("tests/ops/runtime/test_matrix_reading.py",),
        (
            "a stack has the shape of one of its matrices",
            "stacked = self.values.shape[:1] if self.is_stack else ()",
            "stacked = ()",
        ),
    ),
)
