"""Which chat template is used: the one of a setting, one beside the checkpoint, or its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from src import LLM
from src.core.errors import ModelLoadError
from src.text.tokenizer import Tokenizer
from tests.support.checkpoints import CHAT_TEMPLATE, make_checkpoint
from tests.support.engines import small_config
from tests.support.gguf_files import write_gguf

MESSAGES = [{"role": "user", "content": "hi"}]
BESIDE, CHOSEN = "beside {{ messages[0].content }}", "chosen {{ messages[0].content }}"


@pytest.fixture(params=["directory", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    checkpoint = make_checkpoint(tmp_path / "of" / "tiny", tokenizer=True, num_hidden_layers=1)
    if request.param == "directory":
        return checkpoint
    return write_gguf(tmp_path / "of" / "m.gguf", checkpoint, "llama")


def sources(model: Path, chosen: Path | None = None) -> dict[str, str]:
    return Tokenizer.from_directory(model, chosen).chat_template.sources


def test_a_setting_goes_before_a_file_beside_which_goes_before_the_own(
    model: Path, tmp_path: Path
) -> None:
    assert sources(model) == {"default": CHAT_TEMPLATE}
    folder = model if model.is_dir() else model.parent
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert sources(model) == {"default": "json"}
    (folder / "chat_template.jinja").write_text(BESIDE)
    assert sources(model) == {"default": BESIDE}
    chosen = tmp_path / "own.jinja"
    chosen.write_text(CHOSEN)
    assert sources(model, chosen) == {"default": CHOSEN}


def test_the_setting_reaches_the_engine(model: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "own.jinja"
    chosen.write_text(CHOSEN)
    with LLM(small_config(model, chat__template=str(chosen))) as llm:
        tokenizer = llm.engine.tokenizer
        assert tokenizer.chat_template.render(MESSAGES) == "chosen hi"


BROKEN: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "cannot be read"),
    "no text": (b"\xff\xfe", "cannot be read"),
    "too large": (b"x" * (2**20 + 1), "more than 1048576 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_template_is_refused_by_its_name(
    name: str, model: Path, tmp_path: Path
) -> None:
    content, message = BROKEN[name]
    chosen = tmp_path / "own.jinja"
    if content is not None:
        chosen.write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"own\.jinja.*{message}"):
        Tokenizer.from_directory(model, chosen)
    if content is not None:
        folder = model if model.is_dir() else model.parent
        (folder / "chat_template.jinja").write_bytes(content)
        with pytest.raises(ModelLoadError, match=rf"chat_template\.jinja.*{message}"):
            Tokenizer.from_directory(model)
