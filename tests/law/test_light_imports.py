"""A server's port opens before torch is imported, and a client never needs it at all."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from src.core.settings import CHECKOUT
from tests.support.slowness import slowness

HEAVY = ("torch", "transformers", "huggingface_hub", "tokenizers", "triton", "numpy")
# Seconds of CPU, which a busy machine does not stretch as it stretches the clock.
MOST_SECONDS = 1.5

PROGRAM = """
import json, resource, sys
before = resource.getrusage(resource.RUSAGE_SELF)
import {module}
after = resource.getrusage(resource.RUSAGE_SELF)
seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps([seconds, sorted(set(sys.modules) & set({heavy!r}))]))
"""


# Whether the garbage collector is there at the beginning and the end of an import of torch.
COLLECTOR = """
import asyncio, gc, json, sys
seen = {}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "torch._meta_registrations"):
            seen.setdefault(name, gc.isenabled())
sys.meta_path.insert(0, Watch())
from src import AsyncEngine
from src.core.settings import load_config
config = load_config("configs/demo.toml", overrides=[("compile.startup", "off")])
async def main():
    async with AsyncEngine.open(config):
        print(json.dumps({**seen, "afterwards": gc.isenabled()}))
asyncio.run(main())
"""


def imported(module: str) -> tuple[float, list[str]]:
    """CPU seconds of an import in a fresh process, and which heavy modules it brought in."""
    seconds, heavy = answer_of(PROGRAM.format(module=module, heavy=HEAVY))
    return seconds, heavy


def answer_of(program: str) -> Any:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", ["src", "src.core.settings", "src.engine.client", "src.http"])
def test_import_is_light(module: str) -> None:
    seconds, heavy = imported(module)
    assert "torch" not in heavy
    assert "transformers" not in heavy
    assert seconds < MOST_SECONDS * slowness()


def test_the_process_that_renders_templates_has_no_tokenizer() -> None:
    for module in ("src.text.template_process", "src.text.chat_environment"):
        seconds, heavy = imported(module)
        assert not heavy
        assert seconds < MOST_SECONDS / 2 * slowness()


def test_nobody_looks_for_garbage_while_an_engine_imports_torch() -> None:
    assert answer_of(COLLECTOR) == {
        "torch": False,
        "torch._meta_registrations": False,
        "afterwards": True,
    }


def test_the_probe_sees_a_heavy_import() -> None:
    _, heavy = imported("numpy")
    assert heavy == ["numpy"]
