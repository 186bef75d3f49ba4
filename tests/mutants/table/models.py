"""Of the rotary embedding, and of what the files of a directory mean."""

from tests.mutants.mutation import rewrites_of

_SPELLINGS = ("tests/models/test_spellings.py",)

_EVERY_FAMILY = "tests/engine/test_deterministic.py::test_every_family_keeps_the_bits_uncompiled"
MUTATIONS = (
    *rewrites_of(
        "src/models/layers/rope.py",
        ("tests/models/test_rope.py",),
        (
            "YaRN's ramp ends behind the last dimension",
            "_yarn",
            "min(A, B - 1)",
            "A",
        ),
        (
            "YaRN's ramp begins before the first dimension",
            "_yarn",
            "max(A, 0)",
            "A",
        ),
        (
            "YaRN's ramp may have no length",
            "_yarn",
            "A += 0.001",
            "pass",
        ),
        (
            "YaRN's dimensions are rounded where they are not to be",
            "_yarn",
            "A.truncate",
            "True",
        ),
        (
            "Llama 3's short wavelengths are stretched",
            "_llama3",
            "~A & ~B",
            "~B",
        ),
    ),
    *rewrites_of(
        "src/models/weights/transforms.py",
        ("tests/models/test_placements.py",),
        (
            "the two halves of a head change places",
            "InHalves.__call__",
            "[A, B[0::2], B[1::2], C]",
            "[A, B[1::2], B[0::2], C]",
        ),
        (
            "the first rows of a head are reordered whichever are rotated",
            "InHalves.__call__",
            "(self.start, self.rotary_dim, self.head_dim - self.start - self.rotary_dim)",
            "(0, self.rotary_dim, self.head_dim - self.rotary_dim)",
        ),
        (
            "values are reordered as keys are",
            "InHalves.__call__",
            "A.shape[self.dim] if self.heads is None else self.heads",
            "A.shape[self.dim]",
        ),
    ),
    *rewrites_of(
        "src/models/decoder.py",
        _SPELLINGS,
        (
            "an MLP beside attention reads what attention has written",
            "write_layer",
            "A.parallel",
            "False",
        ),
    ),
    *rewrites_of(
        "src/models/loading/loader.py",
        ("tests/models/test_loader.py", *_SPELLINGS),
        (
            "tensors of no use are passed over in any layer",
            "_is_unread",
            "A <= int(B[1]) < A + C.unread_layers",
            "int(B[1]) < A + C.unread_layers",
        ),
        (
            "one layer more than there are is passed over",
            "_is_unread",
            "A <= int(B[1]) < A + C.unread_layers",
            "A <= int(B[1]) <= A + C.unread_layers",
        ),
    ),
    *rewrites_of(
        "src/models/checkpoint.py",
        _SPELLINGS,
        (
            "the dtype of a model is that of its last tensor",
            "first_dtype",
            "min(A or B)",
            "max(A or B)",
        ),
    ),
    *rewrites_of(
        "src/models/registry.py",
        _SPELLINGS,
        (
            "the class that a file names outweighs its model type",
            "_chosen",
            "A is not None and B not in A.architectures",
            "False",
        ),
        (
            "any class is taken for a decoder without its head",
            "_chosen",
            "A is not None and B in _bodies(A)",
            "A is not None",
        ),
    ),
    *rewrites_of(
        "src/models/families/gemma.py",
        ("tests/models/test_spellings.py",),
        (
            "gelu of old files is the exact one",
            "Gemma.describe",
            "if A == 'gelu': B",
            "",
        ),
    ),
    *rewrites_of(
        "src/ops/elementwise.py",
        ("tests/ops/test_elementwise.py",),
        (
            "rows of elementwise functions end within a vector",
            "_in_whole_vectors",
            "-A % _LANES",
            "0",
        ),
        (
            "pieces of elementwise functions are cut for threads",
            "_UNCUT_ELEMENTS",
            "16384",
            "1 << 30",
        ),
        (
            "slices go to elementwise functions as they are",
            "_in_whole_vectors",
            "functional.pad(A, (0, B))",
            "A",
        ),
    ),
    *rewrites_of(
        "src/ops/projections/routing.py",
        (_EVERY_FAMILY,),
        (
            "a router's sigmoids depend on the batch",
            "_scores",
            "by_token(torch.sigmoid, B) if A else B.sigmoid()",
            "B.sigmoid()",
        ),
    ),
    *rewrites_of(
        "src/models/layers/recurrence.py",
        ("tests/engine/test_deterministic.py::test_no_thread_is_seen_in_a_recurrent_layers_gates",),
        (
            "time steps depend on the batch",
            "_softplus",
            "by_token(functional.softplus, B) if A else functional.softplus(B)",
            "functional.softplus(B)",
        ),
        (
            "gates of recurrent layers depend on the batch",
            "_opened",
            "by_token(functional.silu, B) if A else functional.silu(B)",
            "functional.silu(B)",
        ),
    ),
    *rewrites_of(
        "src/models/layers/experts.py",
        (_EVERY_FAMILY,),
        (
            "the factor of a shared expert depends on the batch",
            "experts",
            "sigmoid(linear(A, B.shared_gate), C.deterministic)",
            "sigmoid(linear(A, B.shared_gate), False)",
        ),
    ),
)
