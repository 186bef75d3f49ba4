"""The bundled demo model: it loads, it fits, it answers, and its oracle files hold."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
CHECKPOINT = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def module(name: str) -> Any:
    """A module of the demo folder, which is a folder of scripts and not a package."""
    if str(DEMO) not in sys.path:
        sys.path.append(str(DEMO))
    return importlib.import_module(name)


grammar, evaluate = module("grammar"), module("evaluate")
demo_tokenizer, demo_stories = module("demo_tokenizer"), module("demo_stories")


@pytest.fixture(scope="module")
def reference() -> Any:
    return evaluate.Reference(DEMO)


@pytest.fixture(scope="module")
def cases() -> list[Any]:
    found: list[Any] = evaluate.load_cases()
    return found


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEMO / "score.json").read_text())
    return found


@pytest.fixture(scope="module")
def answered(reference: Any, cases: list[Any]) -> list[tuple[int, Any, list[int]]]:
    """Every third case with the tokens that transformers answers it by."""
    chosen = list(enumerate(cases))[::3]
    made = reference.greedy_batch([reference.prompt_ids(case) for _, case in chosen])
    return [(i, case, ids) for (i, case), ids in zip(chosen, made, strict=True)]


def test_checkpoint_is_complete_and_small() -> None:
    assert sum((DEMO / name).stat().st_size for name in CHECKPOINT) <= 16 * 2**20


def test_architecture(reference: Any) -> None:
    config = reference.model.config
    assert type(reference.model).__name__ == "LlamaForCausalLM"
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.vocab_size == len(reference.tokenizer)
    assert config.eos_token_id == reference.tokenizer.eos_token_id
    assert reference.model.generation_config.eos_token_id == reference.tokenizer.eos_token_id


def test_training_model_and_transformers_agree(reference: Any) -> None:
    torch = pytest.importorskip("torch")
    demo_model = module("demo_model")
    from safetensors.torch import load_file

    state = load_file(DEMO / "model.safetensors")
    model = demo_model.Model(demo_model.Shape(vocab=len(reference.tokenizer)))
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    ids = torch.tensor([reference.tokenizer("Once upon a time, there was a fox.")["input_ids"]])
    with torch.inference_mode():
        hidden = model(ids, torch.arange(ids.shape[1])[None], torch.zeros_like(ids))
        ours, theirs = hidden @ model.embed_tokens.weight.T, reference.model(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two  spaces\n\ttab",
        "😀👩‍👩‍👧 ❤️",
        "日本語と中文 한국어",
        "naïve Ünïcödé ﷽",
        "\x00\x7f\u200d",
        "12 345.67",
    ],
)
def test_tokenizer_round_trip(reference: Any, text: str) -> None:
    ids = reference.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert reference.tokenizer.decode(ids) == text


def test_tokenizer_knows_every_byte_and_digit(reference: Any) -> None:
    from tokenizers import pre_tokenizers

    vocabulary = reference.tokenizer.get_vocab()
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)
    assert len(reference.tokenizer("2026", add_special_tokens=False)["input_ids"]) == 4


def test_tool_call_marks_are_text(reference: Any) -> None:
    text = "<tool_call>\n{}\n</tool_call>"
    ids = reference.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert reference.tokenizer.decode(ids, skip_special_tokens=True) == text


def test_training_text_is_what_the_template_renders(reference: Any, cases: list[Any]) -> None:
    for case in cases:
        rendered = reference.tokenizer.apply_chat_template(
            case.messages, tools=case.tools or None, tokenize=False
        )
        assert rendered == demo_tokenizer.render(case.messages, case.tools)


def test_template_takes_every_form_of_message(reference: Any) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 2?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": ["integer", "null"]}},
                },
            },
        },
        {"type": "function", "function": {"name": "ping"}},
    ]
    rendered = reference.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|bos|><|system|>Be brief.\nTools:\nadd(a: integer, b: any)\nping()<|end|>"
        "<|user|>What is 1 + 2?<|end|><|assistant|><tool_call>\n"
        '{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|end|>'
        "<|tool|>3<|end|><|assistant|>"
    )


def test_cases_are_those_of_the_generator(cases: list[Any]) -> None:
    assert cases == evaluate.held_out_cases()
    assert len(cases) >= 300
    sizes = {case.task: sum(other.task == case.task for other in cases) for case in cases}
    assert set(sizes) == {*grammar.EXACT, "turns"}
    assert len(set(sizes.values())) == 1


def test_held_out_cases_are_never_drawn_for_training(cases: list[Any]) -> None:
    demo_data = module("demo_data")
    assert all(grammar.held_out(case.key) for case in cases)
    judged = {
        case.messages[0]["content"] for case in cases if len(case.messages) == 1 and not case.tools
    }
    documents, asked = demo_data.Documents(11), set()
    rounds = (0, 1000, demo_data.LATE_FROM, demo_data.LAST_FROM)
    for number in range(20_000):
        text, _ = documents.draw(rounds[number % 4], long=False)
        asked |= set(re.findall(r"<\|user\|>(.*?)<\|end\|>", text, re.DOTALL))
    assert len(asked) > 10_000
    assert not judged & asked


def test_exact_match_on_held_out_cases(
    reference: Any, answered: list[tuple[int, Any, list[int]]], recorded: dict[str, Any]
) -> None:
    wrong = {i for i, case, ids in answered if reference.text(ids).strip() != case.answer.strip()}
    assert 1 - len(wrong) / len(answered) >= 0.90
    expected = {i for i in recorded["failed"] if i % 3 == 0}
    # Another machine may round a tie of two logits the other way: rarely.
    assert len(wrong ^ expected) <= 2


def test_every_answer_stops_by_itself(
    reference: Any, answered: list[tuple[int, Any, list[int]]]
) -> None:
    assert all(reference.stopped(ids) for _, _, ids in answered)


def test_recorded_score(recorded: dict[str, Any]) -> None:
    assert recorded["exact_match"] >= 0.90
    assert recorded["cases"] >= 300
    assert recorded["exact_match"] == round(1 - len(recorded["failed"]) / recorded["cases"], 4)
    readme = (DEMO / "README.md").read_text(encoding="utf-8")
    assert f"Exact match: {100 * recorded['exact_match']:.2f} %" in readme
    for task, share in recorded["per_task"].items():
        assert re.search(rf"^\| `{task}` \| {100 * share:.1f} % \|", readme, re.MULTILINE), task


def test_training_took_less_than_45_minutes(reference: Any) -> None:
    rounds = json.loads((DEMO / "training.json").read_text())
    assert sum(each["wall_seconds"] for each in rounds) < 45 * 60
    assert rounds[-1]["parameters"] == reference.model.num_parameters()


def test_stories_are_coherent(reference: Any) -> None:
    rng = random.Random(5)
    requests = [grammar.draw(rng, "story", judged=True) for _ in range(12)]
    prompts = [reference.prompt_ids(case) for case in requests]
    prompts += [list(reference.tokenizer(raw)["input_ids"]) for raw in evaluate.RAW_PROMPTS]
    known = demo_stories.vocabulary()
    for ids, prompt in zip(reference.greedy_batch(prompts), prompts, strict=True):
        text = reference.text([*prompt, *ids]) if len(prompt) < 20 else reference.text(ids)
        story = text[text.find("Once") :]
        assert reference.stopped(ids), story
        assert 30 <= len(story.split()) <= 150, story
        assert set(re.findall(r"[a-z]+", story.lower())) <= known, story


def test_golden_answers(reference: Any) -> None:
    lines = [
        json.loads(line)
        for line in (DEMO / "golden.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(lines) >= 36
    made = reference.greedy_batch([line["prompt_token_ids"] for line in lines], size=16)
    for line, ids in zip(lines, made, strict=True):
        assert ids == line["token_ids"], line["text"]
        assert reference.text(ids) == line["text"]
        if "messages" in line:
            case = grammar.Case(line["task"], "", line["messages"], "", line["tools"])
            assert reference.prompt_ids(case) == line["prompt_token_ids"]
