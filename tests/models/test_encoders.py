"""Encoders against transformers, on small random checkpoints: hidden states of whole sequences."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.errors import ModelLoadError
from src.models import load_model
from src.models.loading.options import LoadOptions
from src.models.registry import has_family
from tests.models.harness import PagedSequence, dense_mix
from tests.support.checkpoints import make_checkpoint
from tests.support.encoders import (
    BOTH_WAYS,
    ENCODER_CLASSES,
    load_encoder_reference,
    make_encoder,
)

TOLERANCE = 1e-4
LEAST_COSINE = 1 - 1e-5
ALL = (*ENCODER_CLASSES, *BOTH_WAYS)


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 320), k=length)


@torch.inference_mode()
def reference_states(reference: Any, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).last_hidden_state[0].float()


@torch.inference_mode()
def states_of(model: Any, tokens: list[int]) -> torch.Tensor:
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    return model.forward(model.functions, ids, positions, dense_mix(model)).float()


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    cosines = torch.nn.functional.cosine_similarity(got.double(), want.double(), dim=-1)
    assert cosines.min() > LEAST_COSINE


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("has_head", [False, True])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, name: str, has_head: bool) -> None:
    directory = make_encoder(tmp_path, name, has_head=has_head)
    model, reference = load_model(directory), load_encoder_reference(directory)
    for length in (1, 3, 90):
        want = reference_states(reference, prompt_of(length))
        check(states_of(model, prompt_of(length)), want)
        paged = PagedSequence(model, block_size=4)
        check(paged.append(prompt_of(length)), want)


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_is_as_near_as_rounding_lets_it(tmp_path: Path, name: str) -> None:
    directory = make_encoder(tmp_path, name)
    model = load_model(directory, LoadOptions(dtype="bfloat16"))
    want = reference_states(load_encoder_reference(directory), prompt_of(60))
    got = states_of(model, prompt_of(60))
    cosines = torch.nn.functional.cosine_similarity(got.double(), want.double(), dim=-1)
    assert cosines.mean() > 0.999


@pytest.mark.parametrize("name", ALL)
def test_the_longest_sequence_is_what_the_table_of_positions_holds(
    tmp_path: Path, name: str
) -> None:
    directory = make_encoder(tmp_path, name)
    model = load_model(directory)
    longest = model.spec.max_positions
    check(
        states_of(model, prompt_of(longest)),
        reference_states(load_encoder_reference(directory), prompt_of(longest)),
    )
    with pytest.raises(ModelLoadError, match=f"from 1 to {longest}"):
        load_model(directory, LoadOptions(max_model_len=longest + 1))


def test_an_encoder_of_another_type_is_not_taken_for_this_one() -> None:
    assert has_family({"architectures": ["BertModel"], "model_type": "bert"})
    assert not has_family({"architectures": ["BertModel"], "model_type": "nomic_bert"})


@pytest.mark.parametrize("architecture", ["lfm2", "llama4"])
def test_a_decoder_that_cannot_see_later_tokens_says_so(tmp_path: Path, architecture: str) -> None:
    directory = make_checkpoint(tmp_path, architecture)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_causal": False}))
    with pytest.raises(ModelLoadError, match="is_causal must be true"):
        load_model(directory)


@pytest.mark.parametrize("name", ["modernbert", "gemma3_text", "qwen2"])
@pytest.mark.parametrize("far", [1, 6, 7, 8, 11, 12])
def test_a_window_is_as_wide_on_both_sides_as_that_of_transformers(
    tmp_path: Path, name: str, far: int
) -> None:
    """One layer with a window: a token's state changes with its neighbours' up to the window."""
    layers = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    directory = make_encoder(tmp_path, name, **layers)
    model, reference = load_model(directory), load_encoder_reference(directory)
    tokens = prompt_of(40)
    for other in (20 - far, 20 + far):
        changed = [*tokens]
        changed[other] = tokens[other] % 300 + 5
        moves = [
            bool((states(tokens)[20] - states(changed)[20]).abs().max() > 1e-6)
            for states in (partial(states_of, model), partial(reference_states, reference))
        ]
        assert moves[0] == moves[1] == (far <= _SIDES[name])


_SIDES = {"modernbert": 6, "gemma3_text": 7, "qwen2": 11}


@pytest.mark.parametrize("name", ["gemma3_text", "qwen2", "mistral"])
def test_a_head_that_nobody_asks_takes_no_memory(tmp_path: Path, name: str) -> None:
    directory = make_encoder(tmp_path, name, has_head=True, tie_word_embeddings=False)
    model = load_model(directory)
    assert "head" not in model.table
    assert all(layer.lasts == "step" for layer in model.kv_cache_spec())


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"num_attention_heads": 3}, "over 3 heads"),
        ("roberta", {"max_position_embeddings": 1}, "max_position_embeddings"),
        ("modernbert", {"norm_bias": True}, "norm_bias"),
        ("modernbert", {"local_attention": 1}, "local_attention"),
        ("modernbert", {"num_attention_heads": 3}, "over 3 heads"),
        ("modernbert", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
        ("gemma3_text", {"sliding_window": 1}, "sliding_window"),
    ],
)
def test_what_an_encoder_does_not_do_is_refused_by_name(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    directory = make_encoder(tmp_path, name, config_fields=fields)
    with pytest.raises(ModelLoadError, match=message):
        load_model(directory)
