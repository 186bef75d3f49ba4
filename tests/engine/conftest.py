"""A small real checkpoint, and transformers' own model of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import load_reference, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), tokenizer=True)


@pytest.fixture(autouse=True)
def poisoned_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV memory starts as NaN: a read of what was never written shows in every logit."""
    from src.engine import startup
    from src.engine.kv_cache import allocate_kv_cache

    monkeypatch.setattr(startup, "allocate_kv_cache", partial(allocate_kv_cache, poison=True))


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Any:
    return load_reference(checkpoint)
