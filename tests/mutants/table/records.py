"""Of records: an op's call as torch has it, and as the kernels of the CPU take it."""

from tests.mutants.mutation import mutations_of

MUTATIONS = (
    *mutations_of(
        "src/ops/records.py",
        ("tests/ops/test_records.py",),
        (
            "an argument before one that must be given may be left out",
            "                names.clear()\n",
            "                pass\n",
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
            "dtype=made.dtype or like.dtype",
            "dtype=like.dtype",
        ),
    ),
    *mutations_of(
        "src/ops/cpu/packing.py",
        ("tests/ops/test_records.py",),
        (
            "sizes are not compared",
            'yield f"{size} == {_text(dim)}"',
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
            'return f"(0 if {name} is None else {address})" if is_optional else address',
            "return address",
        ),
        (
            "a size that follows from a difference is taken from a sum",
            'value = f"({value} - ({other}))"',
            'value = f"({value} + ({other}))"',
        ),
    ),
)
