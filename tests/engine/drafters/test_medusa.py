"""Medusa's heads compute what their authors' code does, and are told apart or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from src.core.config import Config
from src.core.errors import ConfigError
from src.core.plan import RowInstall, RowStep
from src.core.sampling_params import SamplingParams
from src.engine.drafters.loading import load_drafts
from src.engine.drafters.medusa import MedusaDrafter, MedusaHeads
from src.engine.execution.row_state import POISON, RowState
from src.engine.sampling import SampleBatch, Sampler, SamplingState
from src.models import Model, load_model
from tests.support.checkpoints import make_checkpoint
from tests.support.drafts import device_request, make_medusa, write_drafter
from tests.support.engines import small_config

NAMINGS = ("{head}.{layer}", "medusa_heads.{head}.{layer}", "medusa_head.{head}.{layer}", "vllm")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Model:
    return load_model(checkpoint)


class ResBlock(nn.Module):
    """As the paper has it: x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def plain(tensors: dict[str, Tensor], head: int, layers: int, naming: str) -> nn.Sequential:
    """A head in plain PyTorch."""
    blocks = []
    for layer in range(layers):
        block = ResBlock(64)
        if naming == "vllm":
            block.linear.weight.data = tensors[f"blocks.{head}.layers.{layer}.weight"]
            block.linear.bias.data.zero_()
        else:
            name = naming.format(head=head, layer=layer)
            block.linear.weight.data = tensors[f"{name}.linear.weight"]
            block.linear.bias.data = tensors[f"{name}.linear.bias"]
        blocks.append(block)
    out = nn.Linear(64, 320, bias=False)
    name = f"lm_heads.{head}" if naming == "vllm" else naming.format(head=head, layer=layers)
    out.weight.data = tensors[f"{name}.weight"]
    return nn.Sequential(*blocks, out)


def config(checkpoint: Path, drafts: Path | None, method: str = "medusa", **changes: Any) -> Config:
    model = None if drafts is None else str(drafts)
    return small_config(checkpoint, speculation__method=method, speculation__model=model, **changes)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_heads_equal_the_published_computation(
    naming: str, layers: int, checkpoint: Path, target: Model, tmp_path: Path
) -> None:
    tensors = make_medusa(tmp_path, layers=layers, naming=naming)
    source = load_drafts(config(checkpoint, tmp_path), target, None)
    assert isinstance(source, MedusaHeads)
    hidden = torch.randn(5, 64)
    for number, head in enumerate(source.heads):
        reference = plain(tensors, number, layers, naming)
        with torch.no_grad():
            expected = reference(hidden)
        assert torch.allclose(head.logits(hidden), expected, atol=1e-4)


@pytest.fixture
def place() -> tuple[RowState, Sampler]:
    rows = RowState(max_num_seqs=3, max_model_len=24, block_size=4, device=torch.device("cpu"))
    return rows, Sampler(SamplingState(3, 320, torch.device("cpu")))


def install(
    place: tuple[RowState, Sampler], row: int, tokens: list[int], params: SamplingParams
) -> None:
    rows, sampler = place
    rows.install(RowInstall(row, 1, row, tokens, len(tokens), [[0, 1, 2]]))
    sampler.state.install(row, device_request(row, len(tokens), params), 1)


def steps(*rows: tuple[int, int]) -> list[RowStep]:
    """Decoding rows, by row and number of tokens."""
    return [RowStep(row, 1, known - 1, 1, True) for row, known in rows]


def test_a_rows_guesses_come_from_its_own_hidden_state(
    target: Model, checkpoint: Path, tmp_path: Path, place: tuple[RowState, Sampler]
) -> None:
    make_medusa(tmp_path)
    source = load_drafts(config(checkpoint, tmp_path), target, None)
    assert isinstance(source, MedusaHeads)
    drafter = MedusaDrafter(source.heads, *place)
    greedy = SamplingParams(temperature=0)
    for row, count in ((0, 4), (2, 6)):
        install(place, row, list(range(5, 5 + count)), greedy)
    hidden = torch.randn(4, 64)
    drafter.keep({0: (1, 4), 2: (3, 6)}, hidden)
    before = place[0].tokens.clone()
    drafter.compute(steps((0, 4), (2, 6)), {0: 2, 2: 5})
    for row, index, count in ((0, 1, 2), (2, 3, 3)):
        expected = [int(head.logits(hidden[[index]]).argmax()) for head in source.heads[:count]]
        guess = drafter.propose(row, np.empty(0), 5)
        assert guess is not None
        assert guess.token_ids == expected
    assert torch.equal(place[0].tokens, before)


def test_without_its_hidden_state_a_row_has_no_guess(
    target: Model, checkpoint: Path, tmp_path: Path, place: tuple[RowState, Sampler]
) -> None:
    """As behind a failed step, and where a row has another request."""
    make_medusa(tmp_path)
    source = load_drafts(config(checkpoint, tmp_path), target, None)
    assert isinstance(source, MedusaHeads)
    drafter = MedusaDrafter(source.heads, *place)
    for row in (0, 1):
        install(place, row, [5, 6, 7, 8, 9], SamplingParams(temperature=0))
    drafter.keep({0: (0, 4), 1: (1, 5)}, torch.randn(2, 64))
    drafter.vacate(1)
    drafter.compute(steps((0, 5), (1, 5)), {0: 2, 1: 2})
    assert drafter.guesses == {}
    assert (place[0].tokens[:2, 5:] == POISON).all()


def test_a_sampled_guess_has_its_positions_noise(
    target: Model, checkpoint: Path, tmp_path: Path, place: tuple[RowState, Sampler]
) -> None:
    """What a row's parameters change of the model's logits they change of a head's."""
    tensors = make_medusa(tmp_path, heads=2, layers=0)
    source = load_drafts(config(checkpoint, tmp_path), target, None)
    assert isinstance(source, MedusaHeads)
    drafter = MedusaDrafter(source.heads, *place)
    hidden = torch.randn(1, 64)
    asked = {
        0: SamplingParams(seed=3),
        1: SamplingParams(seed=3, temperature=0.3),
        2: SamplingParams(seed=3, allowed_token_ids=(7, 8), presence_penalty=2.0),
    }
    for row, params in asked.items():
        install(place, row, [5, 6, 7], params)
        drafter.keep({row: (0, 3)}, hidden)
    drafter.compute(steps((0, 3), (1, 3), (2, 3)), dict.fromkeys(asked, 2))
    rows, sampler = place
    for row, params in asked.items():
        guess = drafter.propose(row, np.empty(0), 2)
        assert guess is not None
        assert len(guess.token_ids) == 2
        for index, token_id in enumerate(guess.token_ids):
            logits = hidden @ tensors[f"{index}.0.weight"].T
            # As the model draws its own token there, when it has accepted those before.
            rows.tokens[row, 3 : 3 + index] = torch.tensor(guess.token_ids[:index])
            drawn = sampler.sample(logits, SampleBatch([row], [3 + index]), rows.tokens)
            assert drawn.token_ids.tolist() == [token_id], params


def test_what_heads_take_is_known_without_their_weights(
    target: Model, checkpoint: Path, tmp_path: Path
) -> None:
    tensors = make_medusa(tmp_path, heads=2, layers=3)
    asked = config(checkpoint, tmp_path)
    loaded, outlined = (
        load_drafts(asked, target, None, outlines=outlines) for outlines in (False, True)
    )
    assert loaded is not None
    assert outlined is not None
    assert loaded.memory == outlined.memory
    assert loaded.memory.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert loaded.memory.layers == ()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden": 32}, r"0\.0\.linear\.weight: expected \[64, 64\] .*got \[32, 32\]"),
    "vocabulary": ({"vocab_size": 300}, r"0\.1\.weight: expected \[320, 64\] .*got \[300, 64\]"),
    "fewer heads": ({"medusa_num_heads": 4}, r"3\.0\.linear\.weight of shape .* is missing"),
    "layers": ({"medusa_num_layers": 2}, r"no tensor of the first of 3 heads"),
    "no number": ({"medusa_num_heads": None}, "medusa_num_heads must be the number"),
    "many": ({"medusa_num_heads": 65}, "medusa_num_heads must be at most 64, got 65"),
    "a text": ({"medusa_num_heads": "3"}, "medusa_num_heads must be a positive integer"),
    "vllm, hidden": ({"naming": "vllm", "hidden": 32}, "hidden_size must be 64, as the model's"),
    "vllm, words": ({"naming": "vllm", "vocab_size": 9}, "vocab_size must be 320, as the model's"),
}


@pytest.mark.parametrize("name", WRONG)
def test_heads_of_another_model_are_refused_by_name(
    name: str, target: Model, checkpoint: Path, tmp_path: Path
) -> None:
    changes, message = WRONG[name]
    make_medusa(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"speculation\.model: .*{message}"):
        load_drafts(config(checkpoint, tmp_path), target, None)


def test_a_tensor_of_codes_is_refused(target: Model, checkpoint: Path, tmp_path: Path) -> None:
    tensors = make_medusa(tmp_path, heads=1, layers=0)
    codes = {name: tensor.to(torch.int8) for name, tensor in tensors.items()}
    write_drafter(tmp_path, codes, {"medusa_num_heads": 1, "medusa_num_layers": 0})
    with pytest.raises(ConfigError, match=r"0\.0\.weight: expected numbers, got torch\.int8"):
        load_drafts(config(checkpoint, tmp_path), target, None)


@pytest.mark.parametrize(
    ("method", "named", "message"),
    [
        ("medusa", False, r"method = medusa needs speculation\.model"),
        ("draft", False, r"method = draft needs speculation\.model"),
        ("suffix", True, r"speculation\.model = .* is for .*draft or eagle3 or medusa, got suffix"),
        ("off", True, r"speculation\.model = .* is for .*draft or eagle3 or medusa, got off"),
    ],
)
def test_a_method_and_a_model_go_together(
    method: str, named: bool, message: str, target: Model, checkpoint: Path, tmp_path: Path
) -> None:
    asked = config(checkpoint, tmp_path if named else None, method)
    with pytest.raises(ConfigError, match=message):
        load_drafts(asked, target, None)


def test_a_directory_that_is_not_there_is_named(target: Model, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.model: there is no directory"):
        load_drafts(config(checkpoint, Path("/nowhere/heads")), target, None)


def test_a_method_without_weights_loads_nothing(target: Model, checkpoint: Path) -> None:
    assert load_drafts(config(checkpoint, None, "suffix"), target, None) is None
