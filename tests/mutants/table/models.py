"""Of the rotary embedding."""

from tests.mutants.mutation import mutations_of

MUTATIONS = mutations_of(
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
)
