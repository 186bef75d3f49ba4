"""`lm-eval` with `local-completions`: its log-likelihoods are those of transformers.

Runs in the project's environment, which has torch; the client does not.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.common import BASE_URL, MODEL

CHECKPOINT = "configs/demo"
SECONDS = 400
QUESTIONS = [
    ("A baby dog is called a", [" puppy", " kitten", " calf. The cow is large"]),
    ("The capital of Italy is", [" Rome.", " Paris.", " a city in the south"]),
    ("Once upon a time", [" there was a fox", " zzz", ", in a small town"]),
    ("1, 2, 3, 4,", [" 5", " 9", " red"]),
]
TEXTS = ["Once upon a time there was a fox.", "A duck has two legs and a dog has four legs."]

CHOICE = """
task: demo_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
ROLLING = """
task: demo_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""
GENERATE = """
task: demo_generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
target_delimiter: ""
generation_kwargs: {until: ["."], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
"""


class Reference:
    """The same model in transformers."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        self.model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @torch.inference_mode()
    def score(self, ids: list[int], start: int) -> tuple[float, bool]:
        """Log-likelihood of ``ids[start:]`` after those before, and whether it is greedy."""
        logits = self.model(torch.tensor([ids])).logits[0, start - 1 : -1]
        expected = torch.tensor(ids[start:])
        rows = logits.log_softmax(-1).gather(1, expected[:, None])
        return rows.sum().item(), bool((logits.argmax(-1) == expected).all())


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the client noted down for each task."""
    folder = tmp_path_factory.mktemp("lm-eval")
    questions, texts = folder / "questions.jsonl", folder / "texts.jsonl"
    questions.write_text(
        "".join(json.dumps({"question": q, "choices": c}) + "\n" for q, c in QUESTIONS)
    )
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for task, data in ((CHOICE, questions), (GENERATE, questions), (ROLLING, texts)):
        name = task.split()[1]
        (folder / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    arguments = f"model={MODEL},base_url={BASE_URL}/completions,tokenizer={CHECKPOINT}"
    command = ["lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "demo_choice,demo_rolling,demo_generate"]
    command += ["--include_path", str(folder), "--output_path", str(folder / "out")]
    done = subprocess.run(
        [*command, "--log_samples"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        name: read_samples(folder, name)
        for name in ("demo_choice", "demo_rolling", "demo_generate")
    }


def read_samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.joinpath("out").rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["doc_id"])


def test_log_likelihoods(samples: dict[str, Any], reference: Reference) -> None:
    greedy_seen = set()
    for (question, choices), sample in zip(QUESTIONS, samples["demo_choice"], strict=True):
        start = len(reference.encode(question))
        for choice, ((value, greedy),) in zip(choices, sample["resps"], strict=True):
            expected, expected_greedy = reference.score(reference.encode(question + choice), start)
            assert float(value) == pytest.approx(expected, abs=1e-3)
            assert (str(greedy) == "True") == expected_greedy
            greedy_seen.add(expected_greedy)
    # Otherwise the comparison of greedy answers would say nothing.
    assert greedy_seen == {True, False}


def test_rolling_log_likelihoods(samples: dict[str, Any], reference: Reference) -> None:
    # What it puts before a text that has no context.
    prefix = reference.tokenizer.bos_token_id
    for text, sample in zip(TEXTS, samples["demo_rolling"], strict=True):
        expected, _ = reference.score([prefix, *reference.encode(text)], 1)
        ((value,),) = sample["resps"]
        assert float(value) == pytest.approx(expected, abs=1e-3)


def test_generation(samples: dict[str, Any], reference: Reference) -> None:
    for (question, _), sample in zip(QUESTIONS, samples["demo_generate"], strict=True):
        ids = torch.tensor([reference.encode(question)])
        made = reference.model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        text = reference.tokenizer.decode(made, skip_special_tokens=True).partition(".")[0]
        assert sample["resps"][0][0] == text
