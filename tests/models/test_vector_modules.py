"""Modules behind the pooling, against the rule that sentence-transformers states for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from src.core.errors import ModelLoadError
from src.models.sentence_transformers import read_recipe, read_vector_modules
from src.models.vector_modules import VectorModules, load_vector_modules
from tests.support.encoders import save_dense, save_modules

MEAN = {"pooling_mode": "mean"}
HIDDEN = 64
CPU = torch.device("cpu")


def loaded(path: Path, *, is_dummy: bool = False) -> VectorModules | None:
    return load_vector_modules(read_vector_modules(path, size=HIDDEN), CPU, is_dummy=is_dummy)


def size_of(path: Path) -> int:
    return read_recipe(path, size=HIDDEN, context=128, is_encoder=True).size


def projected(weights: Any, x: torch.Tensor) -> torch.Tensor:
    """A projection in float64."""
    bias = weights.get("linear.bias", torch.zeros(())).double()
    return x.double() @ weights["linear.weight"].double().T + bias


@pytest.mark.parametrize("new_spelling", [False, True])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("torch.nn.modules.linear.Identity", nn.Identity()),
        ("torch.nn.modules.activation.Tanh", nn.Tanh()),
        ("torch.nn.modules.activation.ReLU", nn.ReLU()),
        ("torch.nn.modules.activation.GELU", nn.GELU()),
        ("torch.nn.modules.activation.SiLU", nn.SiLU()),
        ("torch.nn.modules.activation.Sigmoid", nn.Sigmoid()),
        ("torch.nn.LeakyReLU", nn.LeakyReLU()),
        ("torch.nn.modules.activation.ELU", nn.ELU()),
    ],
)
def test_a_projection_with_each_activation(
    tmp_path: Path, name: str, module: nn.Module, new_spelling: bool
) -> None:
    save_modules(tmp_path, pooling=MEAN, behind=["Dense"], new_spelling=new_spelling)
    weights = save_dense(tmp_path / "2_Dense", HIDDEN, 40, activation=name)
    vectors, modules = torch.randn(5, HIDDEN), loaded(tmp_path)
    assert modules is not None
    want = module(projected(weights, vectors))
    torch.testing.assert_close(modules(vectors).double(), want, rtol=1e-5, atol=1e-5)
    assert size_of(tmp_path) == 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_in_a_row_with_norms_between_them(tmp_path: Path, dtype: torch.dtype) -> None:
    behind = ["Normalize", "Dense", "Dropout", "LayerNorm", "Dense", "Normalize"]
    save_modules(tmp_path, pooling=MEAN, behind=behind)
    first = save_dense(tmp_path / "3_Dense", HIDDEN, 96, bias=False, dtype=dtype)
    norm = tmp_path / "5_LayerNorm"
    norm.mkdir()
    (norm / "config.json").write_text(json.dumps({"dimension": 96}))
    scales = {"norm.weight": torch.randn(96), "norm.bias": torch.randn(96)}
    save_file(scales, norm / "model.safetensors")
    last = save_dense(tmp_path / "6_Dense", 96, 24, dtype=dtype)
    vectors, modules = torch.randn(7, HIDDEN), loaded(tmp_path)
    assert modules is not None
    want = nn.functional.normalize(vectors.double())
    want = projected({name: each.to(dtype) for name, each in first.items()}, want)
    weight, bias = (each.double() for each in scales.values())
    want = nn.functional.layer_norm(want, (96,), weight, bias)
    want = projected({name: each.to(dtype) for name, each in last.items()}, want)
    torch.testing.assert_close(modules(vectors).double(), want, rtol=1e-5, atol=1e-5)
    recipe = read_recipe(tmp_path, size=HIDDEN, context=128, is_encoder=True)
    assert (recipe.size, recipe.normalizes) == (24, True)
    assert modules.nbytes == 4 * (96 * HIDDEN + 2 * 96 + 24 * 96 + 24)


@pytest.mark.parametrize("outputs", [HIDDEN, 32])
def test_what_is_projected_may_be_added(tmp_path: Path, outputs: int) -> None:
    save_modules(tmp_path, pooling=MEAN, behind=["Dense"])
    settings = {"use_residual": True, "module_input_name": "sentence_embedding"}
    name = "torch.nn.modules.activation.Tanh"
    weights = save_dense(tmp_path / "2_Dense", HIDDEN, outputs, activation=name, settings=settings)
    vectors, modules = torch.randn(3, HIDDEN), loaded(tmp_path)
    assert modules is not None
    added = vectors.double()
    if outputs != HIDDEN:
        added = added @ weights["residual.weight"].double().T
    want = projected(weights, vectors).tanh() + added
    torch.testing.assert_close(modules(vectors).double(), want, rtol=1e-5, atol=1e-5)


def test_without_a_name_the_activation_is_the_default(tmp_path: Path) -> None:
    save_modules(tmp_path, pooling=MEAN, behind=["Dense"])
    weights = save_dense(tmp_path / "2_Dense", HIDDEN, 8)
    file = tmp_path / "2_Dense" / "config.json"
    file.write_text(json.dumps({"in_features": HIDDEN, "out_features": 8}))
    vectors, modules = torch.randn(3, HIDDEN), loaded(tmp_path)
    assert modules is not None
    want = projected(weights, vectors).tanh()
    torch.testing.assert_close(modules(vectors).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("behind", [[], ["Normalize"], ["Dropout", "Normalize", "Dropout"]])
def test_where_nothing_is_computed_there_is_nothing(tmp_path: Path, behind: list[str]) -> None:
    save_modules(tmp_path, pooling=MEAN, behind=behind)
    assert loaded(tmp_path) is None
    recipe = read_recipe(tmp_path, size=HIDDEN, context=128, is_encoder=True)
    assert recipe.normalizes == ("Normalize" in behind)


def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    save_modules(tmp_path, pooling=MEAN, behind=["Dense", "Normalize"])
    save_dense(tmp_path / "2_Dense", HIDDEN, 16)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    modules = loaded(tmp_path, is_dummy=True)
    assert modules is not None
    assert modules(torch.randn(2, HIDDEN)).shape == (2, 16)
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_features": 32}, "in_features must be 64, got 32"),
        ({"out_features": 0}, "out_features must be an integer from 1"),
        ({"out_features": True}, "out_features must be an integer from 1"),
        ({"out_features": 10**9}, "out_features must be an integer from 1"),
        ({"bias": "yes"}, "bias must be true or false"),
        ({"bias": False}, "its file has linear.bias"),
        ({"out_features": 15}, r"linear.weight \[15, 64\]"),
        ({"use_residual": True}, "residual.weight"),
        ({"module_input_name": "token_embeddings"}, "module_input_name must be"),
        ({"module_output_name": "other"}, "module_output_name must be"),
        ({"activation_function": "own_code.Tanh"}, "activation_function must be one of"),
        ({"activation_function": "torch.nnx.Tanh"}, "activation_function must be one of"),
        ({"activation_function": "torch.nn.Softmax"}, "activation_function must be one of"),
        ({"activation_function": None}, "activation_function must be one of"),
        ({"temperature": 2.0}, "temperature not supported"),
    ],
)
def test_what_a_projection_does_not_do_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    save_modules(tmp_path, pooling=MEAN, behind=["Dense"])
    save_dense(tmp_path / "2_Dense", HIDDEN, 16)
    file = tmp_path / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises(ModelLoadError, match=message):
        loaded(tmp_path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    save_modules(tmp_path, pooling=MEAN, behind=["Dense"])
    save_dense(tmp_path / "2_Dense", HIDDEN, 16)
    directory = tmp_path / "2_Dense"
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickle checkpoints"):
        loaded(tmp_path)
