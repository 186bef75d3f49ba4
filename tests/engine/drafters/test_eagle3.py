"""EAGLE-3's layer computes what its authors' code does, and heads are told apart or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from src.core.config import Config
from src.core.errors import ConfigError
from src.core.plan import RowInstall, RowStep
from src.core.sampling_params import SamplingParams
from src.engine.drafters.eagle3 import EagleHead
from src.engine.drafters.loading import load_drafts, taps_for
from src.engine.drafters.source import DraftPlace, DraftSource
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler, SamplingState
from src.models import Model, load_model
from src.models.loading.options import LoadOptions
from src.models.program import run_chain
from tests.models.harness import dense_mix
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.drafts import device_request, make_eagle3, write_drafter
from tests.support.engines import small_config

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=7)


def config(checkpoint: Path, head: Path) -> Config:
    return small_config(checkpoint, speculation__method="eagle3", speculation__model=str(head))


def loaded(checkpoint: Path, head: Path, *, outlines: bool = False) -> tuple[Model, EagleHead]:
    """A model with the taps of its head, and the head."""
    asked = config(checkpoint, head)
    target = load_model(checkpoint, LoadOptions(taps=taps_for(asked, checkpoint)))
    source = load_drafts(asked, target, None, outlines=outlines)
    assert isinstance(source, EagleHead)
    return target, source


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def rotated(x: Tensor) -> Tensor:
    """[T, heads, 16] by positions from 0 on, halves as pairs."""
    angles = torch.outer(
        torch.arange(len(x), dtype=torch.float32), 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    )
    cos, sin = (part(angles).repeat(1, 2)[:, None] for part in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def layer(
    tensors: dict[str, Tensor], embedded: Tensor, feature: Tensor, *, name: str, early: bool
) -> Tensor:
    """The layer over a whole sequence, in plain PyTorch: [T, H]."""
    own = {key.removeprefix(f"{name}."): value for key, value in tensors.items()}
    normed = rms(feature, own["hidden_norm.weight"])
    residual = normed if early else feature
    both = torch.cat((rms(embedded, own["input_layernorm.weight"]), normed), dim=-1)
    query, key, value = (
        functional.linear(both, own[f"self_attn.{each}_proj.weight"]).unflatten(-1, (-1, 16))
        for each in "qkv"
    )
    query, key = rotated(query), rotated(key).repeat_interleave(2, dim=1)
    value = value.repeat_interleave(2, dim=1)
    attended = functional.scaled_dot_product_attention(
        *(each.transpose(0, 1) for each in (query, key, value)), is_causal=True
    )
    flat = attended.transpose(0, 1).flatten(1)
    residual = residual + functional.linear(flat, own["self_attn.o_proj.weight"])
    normed = rms(residual, own["post_attention_layernorm.weight"])
    gate, up = (
        functional.linear(normed, own[f"mlp.{each}_proj.weight"]) for each in ("gate", "up")
    )
    return residual + functional.linear(functional.silu(gate) * up, own["mlp.down_proj.weight"])


def plain(
    tensors: dict[str, Tensor],
    embedding: Tensor,
    features: Tensor,
    tokens: list[int],
    count: int,
    *,
    name: str = "midlayer",
    early: bool = False,
    allowed: Sequence[int] | None = None,
    head: Tensor | None = None,
) -> list[int]:
    """What a head says next, over the whole text again for each token."""
    known = list(tokens)
    for _ in range(count):
        embedded = embedding[torch.tensor(known[1:])]
        left = layer(tensors, embedded, features, name=name, early=early)
        out = tensors["lm_head.weight"] if head is None else head
        scores = functional.linear(rms(left[-1], tensors["norm.weight"]), out)
        if allowed is not None:
            targets = torch.arange(len(scores)) + tensors["d2t"]
            scores[~torch.isin(targets, torch.tensor(allowed))] = float("-inf")
        best = int(scores.argmax())
        known.append(best + int(tensors["d2t"][best]) if "d2t" in tensors else best)
        features = torch.cat((features, left[-1:]))
    return known[len(tokens) :]


class Bench:
    """A drafter that goes on from hidden states, with rows of its own."""

    def __init__(self, head: DraftSource) -> None:
        plan = KVCachePlan(4, 48, bytes_per_block=1)
        cache = allocate_kv_cache(head.memory.layers, plan, CPU, poison=True)
        self.rows = RowState(max_num_seqs=3, max_model_len=64, block_size=4, device=CPU)
        self.sampler = Sampler(SamplingState(3, 320, CPU))
        self.drafter = head.drafter(DraftPlace(self.rows, self.sampler, cache))

    def install(self, row: int, tokens: list[int]) -> None:
        blocks = list(range(16 * row, 16 * row + 16))
        self.rows.install(RowInstall(row, 1, row, tokens, len(tokens), [blocks]))
        self.sampler.state.install(row, device_request(row, len(tokens), GREEDY), 1)
        self.drafter.vacate(row)

    def step(self, *steps: tuple[int, int, int], **asked: int) -> dict[int, list[int]]:
        wanted = {int(name[1:]): count for name, count in asked.items()}
        rows = [RowStep(row, 1, start, count, True) for row, start, count in steps]
        with torch.inference_mode():
            self.drafter.compute(rows, wanted)
        return {row: guess.token_ids for row, guess in self.drafter.guesses.items()}


LAYOUTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "all tokens": {"head_size": None},
    "named layers": {"taps": [0, 3, 6], "naming": "layers.0"},
    "the model's embedding": {"has_embedding": False},
    "the model's head": {"has_head": False, "head_size": None},
    "no taps": {"uses_taps": False},
    "norm before": {"norm_before_residual": True},
    "wider model": {"hidden": 32, "target_hidden": 64, "target_hidden_size": 64},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_guesses_equal_the_published_computation(
    layout: str, checkpoint: Path, tmp_path: Path
) -> None:
    form = LAYOUTS[layout]
    tensors = make_eagle3(tmp_path, **form)
    target, head = loaded(checkpoint, tmp_path)
    embedding = tensors.get("embed_tokens.weight", target.weights["embedding"])
    name, early = form.get("naming", "midlayer"), "norm_before_residual" in form
    bench = Bench(head)
    generator = torch.Generator().manual_seed(3)
    width = (1 + len(target.options.taps)) * 64
    tokens, other = [5, 9, 60, 7, 33, 8], [90, 4, 77]
    hidden = torch.randn(20, width, generator=generator)
    others = torch.randn(20, width, generator=generator)

    def said(known: list[int], states: Tensor, count: int) -> list[int]:
        states = states[: len(known) - 1]
        features = states[:, :64]
        if "fc.weight" in tensors:
            features = functional.linear(states[:, 64:], tensors["fc.weight"])
        own = None if "lm_head.weight" in tensors else target.weights["head"]
        assert own is None or isinstance(own, Tensor)
        return plain(tensors, embedding, features, known, count, name=name, early=early, head=own)

    bench.install(0, tokens)
    bench.install(2, other)
    # A prompt in two steps, another one beside it.
    assert bench.step((0, 0, 4)) == {}
    bench.drafter.keep_all({0: (1, 0, 4)}, torch.cat((torch.zeros(1, width), hidden[:4])))
    assert bench.step((0, 4, 2), (2, 0, 3)) == {}
    bench.drafter.keep_all({0: (0, 4, 2), 2: (2, 0, 3)}, torch.cat((hidden[4:6], others[:3])))
    for row, text in ((0, tokens), (2, other)):
        bench.rows.tokens[row, len(text)] = 44
        text.append(44)
    before = bench.rows.tokens.clone()
    found = bench.step((0, 6, 1), (2, 3, 1), r0=4, r2=2)
    assert found == {0: said(tokens, hidden, 4), 2: said(other, others, 2)}
    assert torch.equal(bench.rows.tokens, before)
    # Two guesses of the first one hold: the step has computed three positions that count.
    new = [*found[0][:2], 50]
    bench.rows.tokens[0, 7:10] = torch.tensor(new, dtype=torch.int32)
    tokens += new
    bench.drafter.keep_all({0: (0, 6, 3)}, hidden[6:9])
    assert bench.step((0, 9, 1), r0=3) == {0: said(tokens, hidden, 3)}
    # Steps without guesses are read later, together.
    for _ in range(2):
        bench.drafter.keep_all({0: (0, len(tokens) - 1, 1)}, hidden[len(tokens) - 1 :])
        bench.rows.tokens[0, len(tokens)] = 51
        tokens.append(51)
        assert bench.step((0, len(tokens) - 1, 1)) == {}
    assert bench.step((0, len(tokens) - 1, 1), r0=3) == {0: said(tokens, hidden, 3)}


def test_a_row_whose_hidden_states_are_missing_has_no_guess(
    checkpoint: Path, tmp_path: Path
) -> None:
    make_eagle3(tmp_path)
    _, head = loaded(checkpoint, tmp_path)
    bench = Bench(head)
    bench.install(0, [5, 6, 7, 8])
    bench.drafter.keep_all({0: (0, 0, 2)}, torch.randn(2, 256))
    assert bench.step((0, 3, 1), r0=2) == {}
    bench.drafter.vacate(0)
    assert bench.step((0, 3, 1), r0=2) == {}


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseekv3"])
def test_what_is_tapped_is_what_layers_read(family: str, tmp_path: Path) -> None:
    """As transformers gives hidden states; the model's own stay what they are."""
    path = make_checkpoint(tmp_path, family, num_hidden_layers=6)
    model, own = load_model(path, LoadOptions(taps=(0, 3, 6))), load_model(path)
    reference = load_reference(path)
    tokens = torch.tensor([5, 9, 60, 7, 33])
    with torch.inference_mode():
        hidden = model.forward(model.functions, tokens, torch.arange(5), dense_mix(model))
        alone = own.forward(own.functions, tokens, torch.arange(5), dense_mix(own))
        assert torch.equal(hidden[:, :64], alone)
        assert torch.equal(
            model.logits(model.functions, hidden), own.logits((run_chain,) * 99, alone)
        )
        seen: list[Tensor] = []
        layers = reference.model.layers
        for number in (0, 3):
            layers[number].register_forward_pre_hook(
                lambda _, given, kwargs: seen.append((*given, *kwargs.values())[0][0]),
                with_kwargs=True,
            )
        layers[5].register_forward_hook(
            lambda *arguments: seen.append(
                arguments[-1][0] if arguments[-1][0].dim() == 2 else arguments[-1][0][0]
            )
        )
        reference(tokens[None])
    for number, expected in enumerate(seen, 1):
        tapped = hidden[:, 64 * number : 64 * number + 64]
        assert torch.allclose(tapped, expected, atol=1e-4), number


def test_what_a_head_takes_is_known_without_its_weights(checkpoint: Path, tmp_path: Path) -> None:
    tensors = make_eagle3(tmp_path)
    memories = [loaded(checkpoint, tmp_path, outlines=which)[1].memory for which in (False, True)]
    assert [len(memory.layers) for memory in memories] == [1, 1]
    numbers = sum(each.numel() for name, each in tensors.items() if name not in ("d2t", "t2d"))
    assert memories[0].parts[0].parameters == numbers
    # Whether it brings an embedding is seen in its tensors alone.
    assert memories[1].parts[0].parameters == numbers - tensors["embed_tokens.weight"].numel()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"hidden": 32, "target_hidden": 32}, "hidden_size must be 64, the model's"),
    "vocabulary": ({"vocab_size": 300}, "vocab_size must be 320, as the model's, got 300"),
    "layers": ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
    "head": ({"draft_vocab_size": 90}, r"lm_head\.weight \(expected \[90, 64\], got \[96, 64\]\)"),
    "many": ({"taps": [1, 2, 8]}, r"must be from 0 to 7, got \[1, 2, 8\]"),
    "order": ({"taps": [3, 2, 4]}, r"a list of ascending layers, got \[3, 2, 4\]"),
    "two": ({"taps": [2, 4]}, r"fc\.weight \(expected \[64, 128\], got \[64, 192\]\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_heads_of_another_model_are_refused_by_name(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    changes, message = WRONG[name]
    make_eagle3(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"speculation\.model: .*{message}"):
        loaded(checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("d2t", "d2t is missing: its head knows 96 of 320 tokens"),
        ("fc.weight", r"missing: fc\.weight"),
        ("midlayer.hidden_norm.weight", r"missing: midlayer\.hidden_norm\.weight"),
    ],
)
def test_a_missing_tensor_is_named(
    missing: str, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    import json

    tensors = make_eagle3(tmp_path)
    del tensors[missing]
    fields = json.loads((tmp_path / "config.json").read_text())
    write_drafter(tmp_path, tensors, fields, file="model.safetensors")
    with pytest.raises(ConfigError, match=message):
        loaded(checkpoint, tmp_path)


def test_a_model_of_few_layers_needs_their_numbers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "target", num_hidden_layers=3)
    make_eagle3(tmp_path / "head")
    with pytest.raises(ConfigError, match="must be given for a model of 3 layers"):
        loaded(path, tmp_path / "head")
