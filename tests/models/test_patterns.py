"""Patterns of checkpoints find the modules that `re` finds, and cannot keep a start busy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from src.core.errors import ModelLoadError
from src.models import load_config
from src.models.loading.loader import outline_model
from src.models.weights.schemes import patterns
from src.models.weights.schemes.names import ModuleNames
from src.models.weights.schemes.patterns import Allowance, Patterns
from tests.models.test_quantized_checkpoints import AWQ, GPTQ, PER_GROUP, compressed
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized import change_config
from tests.support.slowness import own_time, slowness

MODULES = [f"model.layers.{i}.{part}" for i in (0, 1, 10) for part in ("mlp.gate", "mlp.up_proj")]
# It doubles the time with every letter of a name.
SLOW = r"(?:(\w|.)+)+[^\w.]"


@pytest.mark.parametrize(
    "text",
    [
        r".*mlp\.gate$",
        r"model\.layers\.\d+\.mlp\.(gate|up)_proj",
        r"^(?!.*layers\.1\.).*up",
        r"(?i)MODEL",
        r"layers",
        r"[^[]model|[m]odel",
    ],
)
def test_they_match_as_re_does(text: str) -> None:
    own = Patterns([f"re:{text}"])
    expected = [re.match(text, module) is not None for module in MODULES]
    assert [own.match(module) for module in MODULES] == expected


def test_a_pattern_that_backtracks_ends_in_an_error() -> None:
    own = Patterns([SLOW], Allowance(0.2))
    with own_time() as spent:
        with pytest.raises(ValueError, match=r"took more than 0\.2 seconds"):
            own.match("model.layers.10.self_attn.q_proj" * 2)
        assert spent() < 1 * slowness()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(?R)*", "calls itself"),
        ("(a)(?1)", "calls itself"),
        ("(?P<x>a)(?&x)", "calls itself"),
        ("(", "malformed"),
        ("(" * 900, "malformed"),
        ("a{9}{9}", "malformed"),
        ("a" * 1001, "1001 characters is too long"),
    ],
)
def test_what_is_no_pattern_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Patterns([f"re:{text}"])


def test_many_patterns_share_the_time() -> None:
    allowance = Allowance(0.05)
    with pytest.raises(ValueError, match="or all patterns together, took more than"):
        ModuleNames([f"re:{i}(?:[a-z]{{0,9}}|x){{0,9}}" for i in range(100_000)], allowance)
    with pytest.raises(ValueError, match="took more than"):
        Patterns(["a"], allowance)


def test_a_module_is_matched_once() -> None:
    own = Patterns(["re:model"], Allowance(0.05))
    for _ in range(100_000):
        assert own.match("model.layers.0.mlp.up_proj")


SECTIONS: dict[str, Any] = {
    "ignore": compressed("pack-quantized", PER_GROUP, ignore=[f"re:{SLOW}"]),
    "targets": compressed("pack-quantized", PER_GROUP),
    "dynamic": GPTQ | {"dynamic": {f"-:{SLOW}": {}}},
    "modules_to_not_convert": AWQ | {"modules_to_not_convert": [f"re:{SLOW}"]},
}
SECTIONS["targets"]["config_groups"]["group_0"]["targets"] = [f"re:{SLOW}"]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_start_with_such_a_pattern_ends_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "_SECONDS", 0.2)
    directory = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    change_config(directory, quantization_config=SECTIONS[name])
    load_config(directory)
    with pytest.raises(ModelLoadError, match=re.escape(f"the pattern {SLOW!r}"[:20])):
        outline_model(directory)
