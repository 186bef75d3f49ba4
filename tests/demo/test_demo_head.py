"""The demo model's EAGLE-3 head: its file, what it guesses in an engine, and its training."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.acceptance import configuration, measure
from src import AsyncEngine, ChatOptions, SamplingParams
from src.engine.speculation import Widths, verification
from tests.support.engines import small_config

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
HEAD = DEMO / "eagle3"
if str(DEMO) not in sys.path:
    sys.path.append(str(DEMO))
demo_head, train_head = (importlib.import_module(name) for name in ("demo_head", "train_head"))

GOLDEN = [json.loads(line) for line in (DEMO / "golden.jsonl").read_text().splitlines()]


def test_the_head_is_small_and_as_published_ones_are() -> None:
    assert (HEAD / "model.safetensors").stat().st_size <= 2_000_000
    tensors = load_file(HEAD / "model.safetensors")
    config = json.loads((HEAD / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(demo_head.TAPS)
    targets = torch.arange(config["draft_vocab_size"]) + tensors["d2t"]
    assert torch.equal(targets, tensors["t2d"].nonzero().flatten())
    assert len(tensors["lm_head.weight"]) == len(targets)
    floats = [each for each in tensors.values() if each.is_floating_point()]
    assert {each.dtype for each in floats} == {torch.bfloat16}


@pytest.mark.anyio
async def test_answers_are_those_of_off_in_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, and at least half of the guesses are right, of four in a row."""
    monkeypatch.setattr(verification, "Widths", partial(Widths, always=True))
    cases = GOLDEN[1::2]
    head = {
        "speculation__method": "eagle3",
        "speculation__model": str(HEAD),
        "speculation__num_speculative_tokens": 4,
    }
    found = []
    for changes in ({}, head):
        config = small_config(DEMO, model__deterministic=True, **changes)
        async with AsyncEngine.open(config) as engine:
            results = await asyncio.gather(
                *(
                    engine.generate(
                        case.get("messages", case.get("prompt")),
                        SamplingParams(temperature=at % 2, seed=at, max_tokens=40, logprobs=1),
                        chat=ChatOptions(tools=case.get("tools") or None),
                    )
                    for at, case in enumerate(cases)
                )
            )
            said = [(each.token_ids, each.text, each.completions[0].logprobs) for each in results]
            found.append((said, engine.metrics.draft_counts))
    (off, _), (on, (drafted, accepted)) = found
    assert on == off
    assert drafted > sum(len(each[0]) for each in off) / 2
    assert accepted > 0.5 * drafted


async def _acceptance(method: str) -> dict[str, float]:
    lines = [json.loads(line) for line in (DEMO / "eval.jsonl").read_text().splitlines()]
    config = configuration(method, 4, ["compile.enforce_eager=true", "device.num_threads=1"])
    return await measure(config, lines[::12], 40, 0.0)


@pytest.mark.anyio
async def test_it_guesses_more_than_look_ups_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "Widths", partial(Widths, always=True))
    head, suffix = await _acceptance("eagle3"), await _acceptance("suffix")
    assert head["tokens a step"] > 2
    assert head["tokens a step"] > suffix["tokens a step"] + 0.5
    # Each guess behind the first goes on from the head's own feature.
    assert head["place 1"] >= head["place 2"] >= head["place 3"] > 0.3


def test_training_runs_and_what_it_writes_is_a_head(tmp_path: Path) -> None:
    head, took = train_head.train(
        DEMO, count=4, updates=2, steps=2, batch=256, tokens=256, threads=1
    )
    assert (took["texts"], took["updates"], len(head.tokens)) == (4, 2, 256)
    demo_head.export(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == load_file(HEAD / "model.safetensors").keys()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == 256


def test_updates_bring_the_head_nearer_to_the_model() -> None:
    model = train_head.load_model(DEMO)
    torch.manual_seed(2)
    head = demo_head.Head(model, torch.arange(0, 1024))
    texts = [
        train_head.Text(case["prompt_token_ids"], case["token_ids"][:24]) for case in GOLDEN[:12]
    ]
    [batch] = train_head.packed(texts, 4096, random.Random(1))
    before = [float(each.mean().detach()) for each in demo_head.losses(head, model, batch, 2)]
    trainer = train_head.Trainer(model, head, total=60, steps=2)
    for number in range(12):
        trainer.step(number, batch)
    after = [float(each.mean().detach()) for each in demo_head.losses(head, model, batch, 2)]
    assert all(late < early - 0.5 for early, late in zip(before, after, strict=True))


def test_no_prompt_of_the_training_is_held_out() -> None:
    """Prompts are made of cases on the training side; random ones are tokens, and no text."""
    tokenizer = train_head.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    held = [json.loads(line) for line in (DEMO / "eval.jsonl").read_text().splitlines()]
    # Of other tasks the same words may ask for something else.
    tasks = ("add", "subtract", "compare", "tally", "sort_numbers", "sort_words")
    questions = {line["messages"][-1]["content"] for line in held if line["task"] in tasks}
    asked = train_head.prompts(tokenizer, 400, 5)
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in asked]
    last = [text.rsplit("<|user|>", 1)[-1].split("<|end|>")[0] for text in texts]
    kinds = [text.endswith("<|assistant|>") for text in texts]
    assert 200 < sum(kinds) < 400
    assert not questions & {text for text, kind in zip(last, kinds, strict=True) if kind}


def test_steps_of_the_loss_go_on_as_in_serving() -> None:
    """Each step of a chain, computed at once for all positions, equals the chain by itself."""
    model = train_head.load_model(DEMO)
    torch.manual_seed(1)
    head = demo_head.Head(model, torch.arange(0, 2048, 2))
    # Two texts in a row; the chain begins in the second one.
    source = random.Random(3)
    first, second = ([source.randrange(7, 2048) for _ in range(size)] for size in (9, 14))
    text = train_head.Text
    batch = train_head.tensors([[text(first, [5]), text(second[:6], second[6:])]], 32)
    seen: list[torch.Tensor] = []
    step = demo_head.Head.step

    def recording(self: Any, *given: Any) -> Any:
        left, scores = step(self, *given)
        seen.append(scores)
        return left, scores

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(demo_head.Head, "step", recording)
        demo_head.losses(head, model, batch, 3)
        together, begin = [each[0] for each in seen], len(first) + 1
        # What serving does: positions one by one, each step's key where its position is.
        place = 7
        positions = torch.arange(len(second))[None]
        states, _ = demo_head.taps(
            model, torch.tensor([second]), positions, torch.zeros(1, len(second), dtype=torch.long)
        )
        features = list(head.fc(states)[0, : place + 1])
        for number in range(3):
            end = place + number
            length = end + 1
            causal = torch.ones(1, length, length, dtype=torch.bool).tril()
            embedded = model.embed_tokens(torch.tensor([second[1 : length + 1]]))
            left, scores = step(
                head,
                embedded,
                torch.stack(features)[None],
                demo_head.Past(causal),
                model.cos[positions[:, :length]][:, None],
                model.sin[positions[:, :length]][:, None],
            )
            assert torch.allclose(scores[0, -1], together[number][begin + end], atol=1e-4), number
            features.append(left[0, -1])
