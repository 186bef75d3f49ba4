"""Compiled once, whatever the number of layers, tokens and models, and never after that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from src.compile import CompilationError
from src.compile.just_in_time import CompiledFunction
from src.core.settings import CHECKOUT

# Counts what Inductor compiles and finds, and every process that is started for it.
START = """
import json, subprocess, sys
from pathlib import Path

commands = []
popen = subprocess.Popen
class Counting(popen):
    def __init__(self, command, *args, **kwargs):
        commands.append(command if isinstance(command, str) else " ".join(map(str, command)))
        super().__init__(command, *args, **kwargs)
subprocess.Popen = Counting

from src.compile import use_artifact_cache
use_artifact_cache(Path(sys.argv[1]))

import torch
from torch._dynamo.utils import counters
from src.compile.just_in_time import CompiledFunction
from tests.compile.functions import gate_twice

compiled = CompiledFunction(gate_twice, (0, 1), 300)
with torch.inference_mode():
    for count in (8, 1, 300):
        given = torch.randn(count, 144), torch.randn(count, 72), torch.ones(72)
        torch.testing.assert_close(compiled(*given), gate_twice(*given))
print(json.dumps({
    "graphs": counters["stats"]["unique_graphs"],
    "found": counters["inductor"]["fxgraph_cache_hit"],
    "made": counters["inductor"]["fxgraph_cache_miss"],
    "passed by": counters["inductor"]["fxgraph_cache_bypass"],
    "commands": commands,
}))
"""


MOST_TOKENS = 256


class Pair(NamedTuple):
    """A matrix, and a vector that not every model has."""

    weight: Tensor
    bias: Tensor | None


def project(weight: Tensor, x: Tensor) -> Tensor:
    """[T, H] times [H, N]: an external call, so that compiling needs no C++ compiler."""
    return x @ weight


def project_by(count: int, pair: Pair, x: Tensor) -> tuple[Tensor, ...]:
    """The same, ``count`` times over."""
    return (x @ pair.weight,) * count


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.inference_mode():
        yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def frames() -> int:
    """How often anything was to be compiled."""
    return counters["stats"]["unique_graphs"]


def test_any_number_of_tokens_and_layers_is_one_graph() -> None:
    compiled = CompiledFunction(project, (1,), MOST_TOKENS)
    assert compiled.artifact is None
    layers = [torch.randn(4, 6) for _ in range(20)]
    for num_tokens in (8, 1, 2, 3, 64, 1):
        x = torch.randn(num_tokens, 4)
        for weight in layers:
            torch.testing.assert_close(compiled(weight, x), project(weight, x))
    assert graphs() == 1
    assert compiled.artifact is not None


def test_two_hundred_numbers_of_tokens_after_the_first_compile_nothing() -> None:
    compiled = CompiledFunction(project, (1,), MOST_TOKENS)
    weight = torch.randn(4, 6)
    compiled(weight, torch.randn(8, 4))
    before = frames()
    for num_tokens in range(201):
        x = torch.randn(num_tokens, 4)
        torch.testing.assert_close(compiled(weight, x), project(weight, x))
        # Of another layout in memory.
        x = torch.randn(4, num_tokens).t()
        torch.testing.assert_close(compiled(weight, x), project(weight, x))
    assert frames() == before == 1


def test_models_of_one_process_do_not_use_up_each_other_s_limit() -> None:
    limit = torch._dynamo.config.recompile_limit
    for width in range(3, limit + 6):
        compiled = CompiledFunction(project, (1,), MOST_TOKENS)
        weight, x = torch.randn(4, width), torch.randn(5, 4)
        torch.testing.assert_close(compiled(weight, x), project(weight, x))
    assert graphs() == limit + 3


def settled() -> tuple[CompiledFunction, Pair, Tensor]:
    """A function that was compiled, and arguments that it takes beside 2."""
    compiled = CompiledFunction(project_by, (2,), MOST_TOKENS)
    pair, x = Pair(torch.randn(4, 6), None), torch.randn(5, 4)
    compiled(2, pair, x)
    return compiled, pair, x


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"x": torch.randn(5, 4, dtype=torch.float64)}, "float64"),
        ({"x": torch.randn(5, 3)}, "3"),
        ({"x": torch.randn(5, 4, device="meta")}, "meta"),
        ({"weight": torch.randn(4, 6, dtype=torch.float64)}, "float64"),
        ({"weight": torch.randn(4, 7)}, r"shape=\(4, 7\)"),
        ({"weight": torch.randn(6, 4).t()}, r"stride=\(1, 4\)"),
        ({"weight": torch.randn(4, 6, device="meta")}, "meta"),
        ({"bias": torch.randn(6)}, r"shape=\(6,\)"),
        ({"count": 3}, "3"),
    ],
)
def test_what_code_was_not_compiled_for_is_an_error_and_compiles_nothing(
    changed: dict[str, Any], what: str
) -> None:
    compiled, pair, x = settled()
    given = {"count": 2, "x": x, **pair._asdict()} | changed
    before = frames()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"compiled for .*, got .*{what}"):
            compiled(given["count"], Pair(given["weight"], given["bias"]), given["x"])
    torch.testing.assert_close(compiled(2, pair, x), project_by(2, pair, x))
    assert frames() == before == 1


def test_more_tokens_than_it_was_compiled_for_are_an_error() -> None:
    compiled, pair, _ = settled()
    most = torch.randn(MOST_TOKENS, 4)
    torch.testing.assert_close(compiled(2, pair, most), project_by(2, pair, most))
    with pytest.raises(ValueError, match=r"compiled for 256 tokens, got \[257\]"):
        compiled(2, pair, torch.randn(MOST_TOKENS + 1, 4))


def add(left: Tensor, right: Tensor) -> Tensor:
    """Both of as many tokens."""
    return left + right


def test_as_many_tokens_in_each_argument() -> None:
    compiled = CompiledFunction(add, (0, 1), MOST_TOKENS)
    some, others = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(compiled(some, others), some + others)
    for count in (1, 3):
        with pytest.raises(ValueError, match=rf"got \[{count}, 4\]"):
            compiled(some, others[:count])


def gate_many(weight: Tensor, x: Tensor) -> Tensor:
    """Few tokens are another function."""
    return x @ weight if x.shape[0] > 2 else x @ weight + 1


def gate_two(weight: Tensor, x: Tensor) -> Tensor:
    """A bound of which torch takes no notice."""
    return x @ weight if x.shape[0] > 1 else x @ weight + 1


def gate_few(weight: Tensor, x: Tensor) -> Tensor:
    """Many tokens are another function."""
    return x @ weight if x.shape[0] <= 200 else x @ weight + 1


def gate_one(weight: Tensor, x: Tensor) -> Tensor:
    """What torch takes for granted of a size that it does not know."""
    return x @ weight if x.shape[0] != 1 else x @ weight + 1


@pytest.mark.parametrize("function", [gate_many, gate_two, gate_few, gate_one])
def test_code_that_holds_for_some_numbers_of_tokens_does_not_serve(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    compiled = CompiledFunction(function, (1,), MOST_TOKENS)
    with pytest.raises(CompilationError, match=r"gate_\w+ depends on the number of tokens"):
        compiled(torch.randn(4, 6), torch.randn(8, 4))
    assert compiled.artifact is None


def test_others_of_the_process_compile_what_they_like_and_disturb_nobody() -> None:
    compiled, pair, x = settled()
    theirs = torch.compile(lambda y: y + 1, backend="eager", dynamic=False)
    for width in (2, 3):
        torch.testing.assert_close(theirs(torch.ones(width)), torch.full((width,), 2.0))
    assert graphs() == 3
    torch._dynamo.reset()
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(compiled(2, pair, x), project_by(2, pair, x))
    torch.testing.assert_close(compiled(2, pair, x), project_by(2, pair, x))
    assert graphs() == 3


def test_tokens_that_are_another_argument_too_are_refused() -> None:
    compiled = CompiledFunction(project, (1,), MOST_TOKENS)
    both = torch.randn(4, 4)
    with pytest.raises(ValueError, match="two arguments are the same tensor"):
        compiled(both, both)
    assert frames() == 0


def scale_twice(weights: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Two factors, which may be the same tensor."""
    return x * weights[0] @ torch.diag(weights[1])


def test_a_weight_that_comes_twice_does_so_in_every_call() -> None:
    compiled = CompiledFunction(scale_twice, (1,), MOST_TOKENS)
    x = torch.randn(5, 4)
    for _ in range(3):
        weight = torch.randn(4)
        torch.testing.assert_close(compiled((weight, weight), x), scale_twice((weight, weight), x))
    others = torch.randn(4), torch.randn(4)
    with pytest.raises(ValueError, match="compiled for"):
        compiled(others, x)
    assert frames() == 1


@pytest.mark.parametrize(
    ("function", "asked"),
    [(gate_many, r"3 <= L\['x'\]"), (gate_two, r"x\.shape\[0\] > 1.*in gate_two")],
)
def test_a_refusal_says_what_was_asked(
    function: Callable[[Tensor, Tensor], Tensor], asked: str
) -> None:
    """By torch's own words, or with the line of code that asked."""
    compiled = CompiledFunction(function, (1,), MOST_TOKENS)
    with pytest.raises(CompilationError) as raised:
        compiled(torch.randn(4, 6), torch.randn(8, 4))
    assert re.search(f"depends on the number of tokens: (.|\n)*{asked}", str(raised.value))


def test_a_process_without_its_compiler_gets_no_compiled_function() -> None:
    compiled = CompiledFunction(project, (1,), MOST_TOKENS)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(CompilationError, match="made no graph of project"),
    ):
        compiled(torch.randn(4, 6), torch.randn(5, 4))
    assert compiled.artifact is None


def compilations(commands: list[str]) -> list[str]:
    # What is only preprocessed becomes a key of Inductor's cache of headers.
    return [command for command in commands if " -o " in command and " -E " not in command]


@pytest.mark.timeout(600)
def test_the_second_start_traces_again_and_compiles_nothing(tmp_path: Path) -> None:
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

    def start() -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", START, str(tmp_path)],
            cwd=CHECKOUT,
            env={name: value for name, value in os.environ.items() if name not in caches},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return seen

    first, second = start(), start()
    assert (first["graphs"], first["found"], first["made"]) == (1, 0, 1)
    assert compilations(first["commands"])
    assert (second["graphs"], second["found"], second["made"]) == (1, 1, 0)
    assert first["passed by"] == second["passed by"] == 0
    assert compilations(second["commands"]) == []
