"""Engines that serve GGUF files: the text, the prompt and the end that transformers has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from src import LLM, SamplingParams
from src.core.errors import ModelLoadError
from src.core.status import served_names
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import greedy, random_prompts, small_config
from tests.support.gguf_files import Type, restore, write_gguf

CHAT = [{"role": "user", "content": "Once upon a time?"}]
PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("of") / "tiny", "llama", tokenizer=True)


@pytest.fixture(scope="module")
def file(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("file")

    def type_of(name: str) -> Type:
        return Type.Q8_0 if "embd" in name or "ffn_down" in name else Type.Q4_1

    return write_gguf(folder / "tiny.Q4_1.gguf", checkpoint, "llama", type_of)


def test_a_file_serves_what_transformers_makes_of_it(
    checkpoint: Path, file: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    reference = load_reference(restore(file, checkpoint, "llama", tmp_path / "decoded"))
    theirs = AutoTokenizer.from_pretrained(checkpoint)
    prompts = random_prompts(6, longest=60)
    # Its own precision would be bfloat16, in which near choices differ.
    with LLM(
        small_config(file, model__dtype="float32", scheduler__max_num_batched_tokens=32)
    ) as llm:
        for _ in range(2):  # the second time from the prefix cache
            results = llm.generate(prompts, PARAMS)
            for prompt, result in zip(prompts, results, strict=True):
                assert result.token_ids == greedy(reference, prompt, 12)
        (chat,) = llm.chat(CHAT, PARAMS)
    prompt = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert chat.prompt_token_ids == prompt
    assert chat.token_ids == greedy(reference, prompt, 12)
    assert chat.text == theirs.decode(chat.token_ids, skip_special_tokens=True)


def test_its_own_precision_and_its_name(file: Path) -> None:
    config = small_config(file)
    assert served_names(config.model) == ("tiny.Q4_1",)
    with LLM(config) as llm:
        assert llm.engine.model_info.dtype == "bfloat16"
        (result,) = llm.generate(["Once upon"], PARAMS)
        assert len(result.token_ids) > 0


def test_a_directory_with_one_file_is_that_file(file: Path, checkpoint: Path) -> None:
    with LLM(small_config(file.parent)) as one, LLM(small_config(file)) as other:
        (mine,), (theirs,) = (
            one.generate(["Once upon"], PARAMS),
            other.generate(["Once upon"], PARAMS),
        )
        assert mine.token_ids == theirs.token_ids


REFUSED: dict[str, tuple[Callable[[Path], Path], dict[str, object], str]] = {
    "there is none": (lambda file: file.with_name("no.gguf"), {}, "there is no file"),
    "a revision": (
        lambda file: file,
        {"model__revision": "main"},
        "is a local file, which has none",
    ),
    "transformers": (
        lambda file: file,
        {"model__implementation": "transformers"},
        "GGUF files are for native families",
    ),
    "rounding again": (
        lambda file: file,
        {"model__quantization": "int4"},
        "quantized already",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, file: Path) -> None:
    path_of, changes, message = REFUSED[name]
    with pytest.raises(ModelLoadError, match=message), LLM(small_config(path_of(file), **changes)):
        pass


def test_another_architecture_is_refused_by_name(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "m.gguf"
    other.write_bytes(file.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ModelLoadError, match="'mamba' is not served from GGUF files; served are"):
        LLM(small_config(other)).close()


def test_a_file_that_ends_early_is_one_clear_error(file: Path, tmp_path: Path) -> None:
    short = tmp_path / "m.gguf"
    short.write_bytes(file.read_bytes())
    os.truncate(short, file.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match=r"m.gguf: .* ends at byte"):
        LLM(small_config(short)).close()
