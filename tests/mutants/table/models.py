"""Of the rotary embedding, and of what the files of a directory mean."""

from tests.mutants.mutation import mutations_of

_SPELLINGS = ("tests/models/test_spellings.py",)

_EVERY_FAMILY = "tests/engine/test_deterministic.py::test_every_family_keeps_the_bits_uncompiled"
MUTATIONS = (
    *mutations_of(
        "src/models/layers/rope.py",
        ("tests/models/test_rope.py",),
        (
            "YaRN's ramp ends behind the last dimension",
            "low, high = max(low, 0), min(high, head_dim - 1)",
            "low, high = max(low, 0), high",
        ),
        (
            "YaRN's ramp begins before the first dimension",
            "low, high = max(low, 0), min(high, head_dim - 1)",
            "low, high = low, min(high, head_dim - 1)",
        ),
        (
            "YaRN's ramp may have no length",
            "        high += 0.001\n",
            "        pass\n",
        ),
        (
            "YaRN's dimensions are rounded where they are not to be",
            "    if rope.truncate:\n        low, high",
            "    if True:\n        low, high",
        ),
        (
            "Llama 3's short wavelengths are stretched",
            "return torch.where(~is_short & ~is_long, smoothed, scaled)",
            "return torch.where(~is_long, smoothed, scaled)",
        ),
    ),
    *mutations_of(
        "src/models/weights/transforms.py",
        ("tests/models/test_placements.py",),
        (
            "the two halves of a head change places",
            "rotated[0::2], rotated[1::2]",
            "rotated[1::2], rotated[0::2]",
        ),
        (
            "the first rows of a head are reordered whichever are rotated",
            "(self.start, self.rotary_dim, self.head_dim - self.start - self.rotary_dim)",
            "(0, self.rotary_dim, self.head_dim - self.rotary_dim)",
        ),
        (
            "values are reordered as keys are",
            "count = rows.shape[self.dim] if self.heads is None else self.heads",
            "count = rows.shape[self.dim]",
        ),
    ),
    *mutations_of(
        "src/models/decoder.py",
        _SPELLINGS,
        (
            "an MLP beside attention reads what attention has written",
            "    if parts.parallel:\n        # The MLP",
            "    if False:\n        # The MLP",
        ),
    ),
    *mutations_of(
        "src/models/loading/loader.py",
        ("tests/models/test_loader.py", *_SPELLINGS),
        (
            "tensors of no use are passed over in any layer",
            "last <= int(layer[1]) < last + config.unread_layers",
            "int(layer[1]) < last + config.unread_layers",
        ),
        (
            "one layer more than there are is passed over",
            "last <= int(layer[1]) < last + config.unread_layers",
            "last <= int(layer[1]) <= last + config.unread_layers",
        ),
    ),
    *mutations_of(
        "src/models/checkpoint.py",
        _SPELLINGS,
        (
            "the dtype of a model is that of its last tensor",
            "return tensors[min(numbers or tensors)].dtype",
            "return tensors[max(numbers or tensors)].dtype",
        ),
    ),
    *mutations_of(
        "src/models/registry.py",
        _SPELLINGS,
        (
            "the class that a file names outweighs its model type",
            "is_other = family is not None and name not in family.architectures",
            "is_other = False",
        ),
        (
            "any class is taken for a decoder without its head",
            "if family is not None and name in _bodies(family) else None",
            "if family is not None else None",
        ),
    ),
    *mutations_of(
        "src/ops/elementwise.py",
        ("tests/ops/test_elementwise.py",),
        (
            "rows of elementwise functions end within a vector",
            "    padding = -width % _LANES\n",
            "    padding = 0\n",
        ),
        (
            "pieces of elementwise functions are cut for threads",
            "_UNCUT_ELEMENTS: Final = 16384",
            "_UNCUT_ELEMENTS: Final = 1 << 30",
        ),
        (
            "slices go to elementwise functions as they are",
            "function(functional.pad(piece, (0, padding)))",
            "function(piece)",
        ),
    ),
    *mutations_of(
        "src/ops/projections/routing.py",
        (_EVERY_FAMILY,),
        (
            "a router's sigmoids depend on the batch",
            "by_token(torch.sigmoid, logits) if deterministic else logits.sigmoid()",
            "logits.sigmoid()",
        ),
    ),
    *mutations_of(
        "src/models/layers/recurrence.py",
        ("tests/engine/test_deterministic.py::test_no_thread_is_seen_in_a_recurrent_layers_gates",),
        (
            "time steps depend on the batch",
            "by_token(functional.softplus, x) if deterministic else functional.softplus(x)",
            "functional.softplus(x)",
        ),
        (
            "gates of recurrent layers depend on the batch",
            "by_token(functional.silu, wide) if deterministic else functional.silu(wide)",
            "functional.silu(wide)",
        ),
    ),
    *mutations_of(
        "src/models/layers/experts.py",
        (_EVERY_FAMILY,),
        (
            "the factor of a shared expert depends on the batch",
            "sigmoid(linear(wide, weights.shared_gate), spec.deterministic)",
            "sigmoid(linear(wide, weights.shared_gate), False)",
        ),
    ),
)
