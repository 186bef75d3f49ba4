"""Step inputs that families declare: embeddings, positions with axes, a target's hidden states."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

from src import AsyncEngine, SamplingParams
from src.core.errors import InvalidRequestError
from src.models import load_model, registry
from src.models.builder import ProgramBuilder
from src.models.config import AttentionConfig, ModelConfig
from src.models.decoder import write_embedding, write_end, write_layer
from src.models.families.llama import Llama
from src.models.families.qwen2 import Qwen2
from src.models.fields import Fields
from src.models.parts import RESIDUAL
from src.models.program import StepInput
from tests.models.harness import PagedSequence
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, small_config
from tests.support.probe import Probe

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONGER = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TARGET_HIDDEN = "target_hidden"
# Tokens 4 to 15 are an image of 3 rows and 4 columns.
BEFORE, HEIGHT, WIDTH = 4, 3, 4
BROUGHT = BEFORE + HEIGHT * WIDTH
WAYS: dict[str, dict[str, Any]] = {
    "depth 1": {"scheduler__pipeline_depth": 1},
    "depth 2": {"scheduler__pipeline_depth": 2},
    "chunked": {"scheduler__max_num_batched_tokens": 8},
    "preempted": {"cache__num_blocks": 18, "model__max_model_len": 64},
    "deterministic": {"model__deterministic": True},
}
COMPILED = {"compile__enforce_eager": False, "compile__startup": "wait"}


class Seeing(Qwen2):
    """Qwen2-VL's text model: embeddings in place of ids, and positions with three axes."""

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        config = super().describe(fields)
        layers = []
        for layer in config.layers:
            assert isinstance(layer.attention, AttentionConfig)
            sections = sections_of(layer.attention.head_dim)
            layers.append(replace(layer, attention=replace(layer.attention, sections=sections)))
        return replace(config, layers=tuple(layers), takes_embeddings=True)


def sections_of(head_dim: int) -> tuple[int, int, int]:
    pairs = head_dim // 2
    return pairs - 2 * (pairs // 3), pairs // 3, pairs // 3


@dataclass(frozen=True)
class Sum:
    """The static part of `fuse`."""


def fuse(spec: Sum, weights: tuple[()], residual: Tensor, hidden: Tensor) -> Tensor:
    """What a head starts from: the token's embedding and the target's hidden state."""
    return residual + hidden


def copied(spec: Sum, weights: tuple[()], residual: Tensor) -> Tensor:
    return residual.clone()


class Head(Llama):
    """A speculative head, which reads the hidden states that its target ended with."""

    @classmethod
    def write(cls, builder: ProgramBuilder, config: ModelConfig) -> None:
        embedding = write_embedding(builder, config)
        hidden = builder.step_input(
            StepInput(builder.step_tensor(TARGET_HIDDEN, config.hidden_size))
        )
        residual = builder.step_tensor(RESIDUAL, config.hidden_size)
        builder.segment(fuse, Sum(), (), (RESIDUAL, hidden.name), (residual,))
        for number in range(len(config.layers)):
            write_layer(builder, config, number)
        write_end(builder, config, embedding)


class Target(Llama):
    """A target whose first layer's result a head may read."""

    @classmethod
    def write(cls, builder: ProgramBuilder, config: ModelConfig) -> None:
        embedding = write_embedding(builder, config)
        write_layer(builder, config, 0)
        builder.segment(
            copied, Sum(), (), (RESIDUAL,), (builder.step_tensor("tap", config.hidden_size),)
        )
        builder.output("tap")
        for number in range(1, len(config.layers)):
            write_layer(builder, config, number)
        write_end(builder, config, embedding)


def answers_to(monkeypatch: pytest.MonkeyPatch, family: type[Llama] | type[Qwen2]) -> None:
    """Let the family load the checkpoints of the one that it is derived from."""
    monkeypatch.setitem(registry._BY_ARCHITECTURE, family.architectures[0], family)
    monkeypatch.setitem(registry._BY_MODEL_TYPE, family.model_type, family)


class Reference:
    """transformers' text model of Qwen2-VL with the weights of a Qwen2."""

    def __init__(self, directory: Path) -> None:
        plain = load_reference(directory)
        own = plain.config.to_dict()
        own["rope_parameters"] |= {
            "mrope_section": list(sections_of(plain.model.layers[0].self_attn.head_dim)),
            "rope_type": "default",
        }
        kept = {"model_type", "architectures", "transformers_version", "layer_types"}
        config = Qwen2VLTextConfig(**{key: own[key] for key in own.keys() - kept})
        config._attn_implementation = "eager"
        self.model = Qwen2VLTextModel(config).eval()
        self.model.load_state_dict(plain.model.state_dict())
        self.head = plain.lm_head

    @torch.inference_mode()
    def greedy(self, prompt: list[int], given: dict[str, np.ndarray], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            embeddings = self.model.embed_tokens(torch.tensor([ids]))
            positions = np.tile(np.arange(len(ids)), (3, 1))
            if given:
                brought = given["rope_positions"]
                embeddings[0, BEFORE:BROUGHT] = torch.from_numpy(
                    given["embeddings"][BEFORE:BROUGHT]
                )
                onwards = int(brought.max()) + 1 + np.arange(len(ids) - len(brought))
                positions = np.concatenate((brought.T, np.tile(onwards, (3, 1))), axis=1)
            hidden = self.model(
                inputs_embeds=embeddings, position_ids=torch.from_numpy(positions)[:, None]
            ).last_hidden_state
            ids.append(int(self.head(hidden[0, -1]).argmax()))
        return ids[len(prompt) :]


def image(hidden_size: int, seed: int) -> dict[str, np.ndarray]:
    """What a request brings with an image: values for the tokens up to its end."""
    source = np.random.default_rng(seed)
    positions = np.tile(np.arange(BROUGHT)[:, None], (1, 3))
    rows, columns = np.divmod(np.arange(HEIGHT * WIDTH), WIDTH)
    positions[BEFORE:] = BEFORE + np.stack((np.zeros_like(rows), rows, columns), axis=1)
    is_embedded = np.zeros(BROUGHT, np.int64)
    is_embedded[BEFORE:] = 1
    return {
        "embeddings": source.normal(size=(BROUGHT, hidden_size)).astype(np.float32),
        "is_embedded": is_embedded,
        "rope_positions": positions,
    }


Seen = tuple[Path, Reference, int]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = make_checkpoint(tmp_path_factory.mktemp("seen"), "qwen2", tokenizer=True)
    reference = Reference(directory)
    return directory, reference, reference.model.config.hidden_size


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> Seen:
    answers_to(monkeypatch, Seeing)
    return seen


async def check_images(
    engine: AsyncEngine, reference: Reference, hidden_size: int, *, preempts: bool = False
) -> None:
    """Prompts of equal tokens with images, and one without, together and again."""
    params = LONGER if preempts else GREEDY
    prompt = [7, 9, 30, 31, *[5] * (HEIGHT * WIDTH), 40, 41, 42]
    given = [image(hidden_size, seed) for seed in range(4)] + [{}]
    expected = [reference.greedy(prompt, each, params.max_tokens or 0) for each in given]
    assert len({tuple(each) for each in expected}) == len(given)
    if preempts:
        given, expected = given * 3, expected * 3
    for _ in range(2):
        results = await asyncio.gather(
            *(engine.generate(prompt, params, step_inputs=each) for each in given)
        )
        assert [result.token_ids for result in results] == expected
    assert_idle(engine)
    assert (engine.stats.preemptions > 0) == preempts
    if preempts:
        # What was known has made room.
        return
    # Other values are another prompt, and the same ones are known.
    for each in (given[0], image(hidden_size, seed=9)):
        result = await engine.generate(prompt, GREEDY, step_inputs=each)
        assert (result.usage.cached_tokens > 0) == (each is given[0])


@pytest.mark.parametrize("way", WAYS)
async def test_embeddings_and_positions_with_axes_are_those_of_transformers(
    seeing: Seen, way: str
) -> None:
    directory, reference, hidden_size = seeing
    async with AsyncEngine.open(small_config(directory, **WAYS[way])) as engine:
        await check_images(engine, reference, hidden_size, preempts=way == "preempted")


@pytest.mark.compilers
async def test_compiled_code_takes_them_call_by_call(seeing: Seen) -> None:
    directory, reference, hidden_size = seeing
    async with AsyncEngine.open(small_config(directory, **COMPILED)) as engine:
        assert engine.stats.compiled
        await check_images(engine, reference, hidden_size)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"pixels": np.zeros((2, 3))}, "no step input 'pixels'"),
    "shape": ({"rope_positions": np.zeros((2, 2), np.int64)}, r"expected \[n, 3\]"),
    "no array": ({"rope_positions": [[1, 2, 3], [4]]}, "expected an array"),
    "scalar": ({"is_embedded": 1}, r"expected \[n\], got \[\]"),
    "none": ({"is_embedded": np.zeros(0, np.int64)}, "0 values"),
    "too many": ({"is_embedded": np.zeros(5, np.int64)}, "5 values for a prompt of 4"),
    "numbers": ({"rope_positions": np.zeros((2, 3))}, "expected integers"),
    "text": ({"is_embedded": ["a", "b"]}, "expected integers"),
    "negative": ({"rope_positions": np.full((2, 3), -1)}, "from 0 up to"),
    "large": ({"is_embedded": np.full(2, 2)}, "from 0 up to 1"),
    "beyond": ({"rope_positions": np.full((2, 3), 10**6)}, "from 0 up to"),
}


async def test_bad_values_are_refused_and_disturb_nobody(seeing: Seen) -> None:
    directory, reference, hidden_size = seeing
    prompt = [3, 4, 5, 6]
    async with AsyncEngine.open(small_config(directory)) as engine:
        for given, reason in REFUSED.values():
            with pytest.raises(InvalidRequestError, match=reason) as refused:
                await engine.generate(prompt, GREEDY, step_inputs=given)
            assert refused.value.param == "step_inputs"
        last = Probe(engine).model.spec.max_positions - 1
        with pytest.raises(InvalidRequestError, match="the last token would have"):
            await engine.generate(
                prompt, GREEDY, step_inputs={"rope_positions": np.full((2, 3), last)}
            )
        bad = np.full((2, hidden_size), np.inf)
        with pytest.raises(InvalidRequestError, match="finite"):
            await engine.generate(prompt, GREEDY, step_inputs={"embeddings": bad})
        result = await engine.generate(prompt, GREEDY)
        assert result.token_ids == reference.greedy(prompt, {}, 10)
        assert_idle(engine)


async def test_a_model_without_any_refuses_them(checkpoint: Path) -> None:
    async with AsyncEngine.open(small_config(checkpoint)) as engine:
        with pytest.raises(InvalidRequestError, match="it has: none"):
            await engine.generate([3, 4], GREEDY, step_inputs={"embeddings": np.zeros((1, 2))})


@pytest.mark.parametrize("way", ["depth 1", "depth 2", "chunked"])
async def test_a_head_reads_the_hidden_states_of_its_target(
    checkpoint: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_to(monkeypatch, Head)
    model = load_reference(checkpoint)
    prompts = [list(range(5, 30)), list(range(40, 47))]
    given, expected = [], []
    with torch.inference_mode():
        for prompt in prompts:
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
            given.append({TARGET_HIDDEN: hidden.numpy()})
            ids = list(prompt)
            for _ in range(GREEDY.max_tokens or 0):
                embedded = model.model.embed_tokens(torch.tensor([ids]))
                embedded[0, : len(prompt)] += hidden
                ids.append(int(model(inputs_embeds=embedded).logits[0, -1].argmax()))
            expected.append(ids[len(prompt) :])
    async with AsyncEngine.open(small_config(checkpoint, **WAYS[way])) as engine:
        results = await asyncio.gather(
            *(
                engine.generate(prompt, GREEDY, step_inputs=values)
                for prompt, values in zip(prompts, given, strict=True)
            )
        )
    assert [result.token_ids for result in results] == expected


def test_a_target_gives_what_a_head_reads_of_every_token(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(5, 30))
    plain = PagedSequence(load_model(checkpoint)).append(prompt)
    answers_to(monkeypatch, Target)
    model = load_model(checkpoint)
    reference = load_reference(checkpoint)
    sequence, taps, logits = PagedSequence(model), [], []
    for chunk in (prompt[:9], prompt[9:24], prompt[24:]):
        outputs: dict[str, Tensor] = {}
        logits.append(sequence.append(chunk, outputs))
        assert outputs.keys() == {"tap"}
        taps.append(outputs["tap"])
    with torch.inference_mode():
        states = reference.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(torch.cat(taps), states[1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(logits), plain, atol=1e-4, rtol=1e-4)
    # Nobody has to want them.
    torch.testing.assert_close(PagedSequence(model).append(prompt), plain, atol=1e-4, rtol=1e-4)
