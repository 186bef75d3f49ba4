"""What sentence-transformers' files say of a checkpoint, in every spelling that is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from src.core.embedding import EmbeddingRecipe
from src.core.errors import ModelLoadError
from src.models.sentence_transformers import read_recipe
from tests.support.encoders import save_modules

OLD_MEAN = {
    "word_embedding_dimension": 64,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
}


def recipe_of(path: Path, *, is_encoder: bool = True) -> EmbeddingRecipe:
    return read_recipe(path, size=64, context=128, is_encoder=is_encoder)


@pytest.mark.parametrize("new_spelling", [False, True])
@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        (OLD_MEAN, "mean"),
        ({**OLD_MEAN, "pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "first"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"embedding_dimension": 64, "pooling_mode": "mean"}, "mean"),
        ({"embedding_dimension": 64, "pooling_mode": "cls"}, "first"),
        ({"embedding_dimension": 64, "pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_both_spellings_of_modules_and_of_pooling(
    tmp_path: Path, settings: dict[str, Any], pooling: str, new_spelling: bool
) -> None:
    save_modules(tmp_path, pooling=settings, new_spelling=new_spelling)
    assert recipe_of(tmp_path).pooling == pooling


def test_without_files_an_encoder_averages_and_a_decoder_takes_the_last(tmp_path: Path) -> None:
    for is_encoder, pooling in ((True, "mean"), (False, "last")):
        recipe = recipe_of(tmp_path, is_encoder=is_encoder)
        assert (recipe.pooling, recipe.normalizes, recipe.max_tokens) == (pooling, False, 128)


@pytest.mark.parametrize("normalizes", [False, True])
def test_a_vector_is_normalized_where_a_module_says_so(tmp_path: Path, normalizes: bool) -> None:
    save_modules(tmp_path, pooling=OLD_MEAN, normalizes=normalizes)
    assert recipe_of(tmp_path).normalizes is normalizes


@pytest.mark.parametrize(("given", "longest"), [(None, 128), (32, 32), (512, 128)])
def test_the_longest_text_is_what_both_the_model_and_its_files_take(
    tmp_path: Path, given: int | None, longest: int
) -> None:
    save_modules(tmp_path, pooling=OLD_MEAN, max_seq_length=given)
    assert recipe_of(tmp_path).max_tokens == longest


def test_prompts_and_which_one_is_the_default(tmp_path: Path) -> None:
    save_modules(tmp_path, pooling=OLD_MEAN, prompts={"query": "q: "}, default_prompt="query")
    recipe = recipe_of(tmp_path)
    assert (recipe.prompts, recipe.default_prompt) == ({"query": "q: "}, "query")


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [16, 32]}, (16, 32)),
    ],
)
def test_to_how_many_numbers_vectors_may_be_cut(
    tmp_path: Path, fields: dict[str, Any], sizes: tuple[int, ...] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert recipe_of(tmp_path).sizes == sizes


def module(kind: str, path: str = "") -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": kind}


KNOWN = "sentence_transformers.models."
TWO = [module(KNOWN + "Transformer"), module(KNOWN + "Pooling", "1_Pooling")]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([*TWO, module(KNOWN + "CNN")], "models.CNN"),
        ([*TWO, module(KNOWN + "Dense", "../2_Dense")], "path must be a directory beside it"),
        ([*TWO, module(KNOWN + "Dense", "/etc")], "path must be a directory beside it"),
        ([*TWO, module(KNOWN + "LSTM")], "models.LSTM"),
        ([*TWO, module("own_code.Pooling")], "own_code.Pooling"),
        ([TWO[0]], "expected Transformer, Pooling"),
        ([TWO[1], TWO[0]], "got Pooling, Transformer"),
        ([*TWO, *TWO], "got Transformer, Pooling, Transformer, Pooling"),
    ],
)
def test_a_module_that_is_not_known_refuses_the_start(
    tmp_path: Path, modules: list[dict[str, Any]], message: str
) -> None:
    save_modules(tmp_path, pooling=OLD_MEAN, modules=modules)
    with pytest.raises(ModelLoadError, match=message):
        recipe_of(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling must be one of"),
        ({"pooling_mode": "max"}, "pooling must be one of"),
        ({"pooling_mode": ["mean", "cls"]}, "pooling must be one of"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pooling must be"),
        ({}, "pooling must be one of"),
        ({"pooling_mode": "mean", "embedding_dimension": 32}, "embedding_dimension must be 64"),
    ],
)
def test_pooling_of_another_kind_refuses_the_start(
    tmp_path: Path, pooling: dict[str, Any], message: str
) -> None:
    save_modules(tmp_path, pooling=pooling)
    with pytest.raises(ModelLoadError, match=message):
        recipe_of(tmp_path)


@pytest.mark.parametrize(
    ("mode", "given", "pools"),
    [
        ("mean", {"include_prompt": False}, False),
        ("cls", {"include_prompt": False}, False),
        # The last token is none of a prompt.
        ("lasttoken", {"include_prompt": False}, True),
        ("mean", {"include_prompt": True}, True),
        ("mean", {}, True),
    ],
)
def test_whether_prompts_are_pooled(
    tmp_path: Path, mode: str, given: dict[str, bool], pools: bool
) -> None:
    save_modules(tmp_path, pooling={"pooling_mode": mode, **given}, prompts={"query": "q: "})
    assert recipe_of(tmp_path).pools_prompt == pools


@pytest.mark.parametrize("asks", [False, True])
def test_code_that_is_passed_over_is_said_once_where_a_model_embeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asks: bool
) -> None:
    fields = {"auto_map": {"AutoModel": "modeling.Own"}} if asks else {}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert recipe_of(tmp_path, is_encoder=False).pooling == "last"
    assert "auto_map" not in caplog.text
    save_modules(tmp_path, pooling=OLD_MEAN)
    recipe_of(tmp_path, is_encoder=False)
    assert caplog.text.count("(auto_map), which is not run") == asks


def test_settings_that_would_change_vectors_refuse_the_start(tmp_path: Path) -> None:
    save_modules(tmp_path, pooling={**OLD_MEAN, "include_prompt": "no"}, prompts={"a": "b"})
    with pytest.raises(ModelLoadError, match="include_prompt must be true or false, got 'no'"):
        recipe_of(tmp_path)
    save_modules(tmp_path, pooling=OLD_MEAN, prompts={"a": "b"}, default_prompt="c")
    with pytest.raises(ModelLoadError, match="default_prompt_name"):
        recipe_of(tmp_path)
    save_modules(tmp_path, pooling=OLD_MEAN, prompts={"a": "b"}, default_prompt=["a"])  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="default_prompt_name"):
        recipe_of(tmp_path)
    save_modules(tmp_path, pooling={"pooling_mode": [{}]})
    with pytest.raises(ModelLoadError, match="pooling"):
        recipe_of(tmp_path)
    save_modules(tmp_path, pooling=OLD_MEAN, max_seq_length=0)
    with pytest.raises(ModelLoadError, match="max_seq_length"):
        recipe_of(tmp_path)
    save_modules(tmp_path, pooling=OLD_MEAN)
    settings = {"max_seq_length": 8, "do_lower_case": True}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match="do_lower_case"):
        recipe_of(tmp_path)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        recipe_of(tmp_path)
