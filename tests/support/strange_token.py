"""A model whose tokenizer has one token more than its embedding, as a fine-tune may leave it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from src.core.settings import CHECKOUT

STRANGE = "<|new|>"
STRANGE_ID = 2048


def with_a_strange_token(directory: Path) -> Path:
    """A copy of the bundled model in ``directory``, which must not be there yet."""
    shutil.copytree(CHECKOUT / "configs" / "demo", directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": STRANGE_ID, "content": STRANGE, **flags, "special": True})
    file.write_text(json.dumps(content))
    return directory
