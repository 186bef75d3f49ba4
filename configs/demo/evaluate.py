"""Score the demo model on held-out cases, and write the cases, the score and the golden answers.

`score` takes any function from a case to the answer's text, so that the engine's own tests can put
the same questions to the engine: `score(load_cases(), lambda c: ask(c.messages, c.tools))`.

    python configs/demo/evaluate.py            # judge the checkpoint, print the table
    python configs/demo/evaluate.py --write    # and write the files and the README's table
"""

# ruff: noqa: E402 - a script first says where its neighbours are

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

import grammar
from grammar import Case

PER_TASK = 24
SEED = 20240
MAX_NEW_TOKENS = 200
SCORE_MARKS = ("<!-- score -->", "<!-- /score -->")
RAW_PROMPTS = (
    "Once upon a time",
    "Once upon a time, there was a little fox named Mia.",
    "Once upon a time, a brave lion",
    "Once upon a time, in a deep cave, there lived",
)


def held_out_cases(per_task: int = PER_TASK, seed: int = SEED) -> list[Case]:
    """A balanced list of held-out cases, the same for the same seed."""
    cases: list[Case] = []
    for task in (*grammar.EXACT, "turns"):
        rng = random.Random(f"{seed} {task}")
        seen: set[str] = set()
        while len(seen) < per_task:
            case = _after_turns(rng) if task == "turns" else grammar.draw(rng, task, judged=True)
            shown = json.dumps([case.messages, case.tools])
            if shown not in seen:
                seen.add(shown)
                cases.append(dataclasses.replace(case, task=task))
    return cases


def _after_turns(rng: random.Random) -> Case:
    """A held-out question at the end of a longer conversation."""
    messages: list[grammar.Message] = []
    tasks = ("add", "subtract", "compare", "count", "lookup", "json", "echo", "fact", "sort_words")
    for _ in range(rng.randint(3, 9)):
        case = grammar.draw(rng, rng.choice(tasks))
        messages += [*case.messages, {"role": "assistant", "content": case.answer}]
    last = grammar.draw(rng, rng.choice(tasks), judged=True)
    return dataclasses.replace(last, messages=[*messages, *last.messages])


def load_cases(path: Path = HERE / "eval.jsonl") -> list[Case]:
    """The fixed cases of the repository."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Case(**json.loads(line)) for line in lines]


def score(cases: Sequence[Case], answer: Callable[[Case], str]) -> dict[str, Any]:
    """Exact match, overall and per task, and the failures; white space around does not count."""
    return tally(cases, [answer(case) for case in cases])


def tally(cases: Sequence[Case], answers: Iterable[str]) -> dict[str, Any]:
    """The score of answers that are there already."""
    hits: dict[str, list[bool]] = {}
    failures, failed = [], []
    for number, (case, said) in enumerate(zip(cases, answers, strict=True)):
        right = said.strip() == case.answer.strip()
        hits.setdefault(case.task, []).append(right)
        if not right:
            failed.append(number)
            failures.append(
                {
                    "task": case.task,
                    "prompt": case.messages[-1],
                    "wanted": case.answer,
                    "said": said,
                }
            )
    total = [hit for each in hits.values() for hit in each]
    return {
        "exact_match": round(sum(total) / len(total), 4),
        "cases": len(total),
        "per_task": {task: round(sum(each) / len(each), 4) for task, each in hits.items()},
        "failed": failed,
        "failures": failures,
    }


class Reference:
    """The checkpoint in transformers, float32 and greedy: what the engine has to agree with."""

    def __init__(self, folder: Path = HERE) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt_ids(self, case: Case) -> list[int]:
        """The prompt of a case through the chat template."""
        text = self.tokenizer.apply_chat_template(
            case.messages, tools=case.tools or None, add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def greedy(self, ids: list[int], limit: int = MAX_NEW_TOKENS) -> list[int]:
        """Greedy tokens after one prompt, the end token included where it came."""
        with self.torch.inference_mode():
            out = self.model.generate(
                self.torch.tensor([ids]), max_new_tokens=limit, do_sample=False,
                attention_mask=self.torch.ones(1, len(ids), dtype=self.torch.long),
            )  # fmt: skip
        return [int(t) for t in out[0, len(ids) :]]

    def greedy_batch(
        self, prompts: Sequence[list[int]], limit: int = MAX_NEW_TOKENS, size: int = 32
    ) -> list[list[int]]:
        """Greedy tokens after many prompts, in left-padded batches of prompts of like length."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        out: dict[int, list[int]] = {}
        for at in range(0, len(order), size):
            group = order[at : at + size]
            width = max(len(prompts[i]) for i in group)
            pad = self.tokenizer.pad_token_id
            ids = self.torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in group])
            mask = self.torch.tensor(
                [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in group]
            )
            with self.torch.inference_mode():
                made = self.model.generate(
                    ids, attention_mask=mask, max_new_tokens=limit, do_sample=False
                )
            for i, row in zip(group, made[:, width:].tolist(), strict=True):
                end = self.tokenizer.eos_token_id
                out[i] = row[: row.index(end) + 1] if end in row else row
        return [out[i] for i in range(len(prompts))]

    def text(self, ids: Sequence[int]) -> str:
        """Tokens as text, without the special ones."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def stopped(self, ids: Sequence[int]) -> bool:
        """Whether the model ended its answer itself."""
        return bool(ids) and ids[-1] == self.tokenizer.eos_token_id


def golden_cases() -> list[Case]:
    """Two held-out cases of each task and a few stories: what the golden answers are made for."""
    cases = held_out_cases(2, SEED + 1)
    rng = random.Random(SEED)
    return cases + [grammar.draw(rng, "story", judged=True) for _ in range(4)]


def write_golden(reference: Reference, path: Path) -> None:
    """Greedy answers of transformers, one prompt at a time, with their token ids."""
    lines = []
    for case in golden_cases():
        prompt = reference.prompt_ids(case)
        ids = reference.greedy(prompt)
        head: dict[str, Any] = {"task": case.task, "messages": case.messages, "tools": case.tools}
        lines.append(
            head | {"prompt_token_ids": prompt, "text": reference.text(ids), "token_ids": ids}
        )
    for raw in RAW_PROMPTS:
        prompt = list(reference.tokenizer(raw)["input_ids"])
        ids = reference.greedy(prompt)
        lines.append({"task": "raw_story", "prompt": raw, "prompt_token_ids": prompt,
                      "text": reference.text(ids), "token_ids": ids})  # fmt: skip
    write_lines(path, lines)


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """JSON lines in UTF-8."""
    path.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
    )


def write_readme(path: Path, found: dict[str, Any]) -> None:
    """Put the score between the marks of the README, where a reader looks for it."""
    rows = [f"| `{task}` | {100 * share:.1f} % |" for task, share in found["per_task"].items()]
    table = [
        f"Exact match: {100 * found['exact_match']:.2f} % of {found['cases']} held-out cases; "
        f"{100 * found['stopped']:.1f} % of the answers stop by themselves.",
        "",
        "| Task | Exact match |",
        "| --- | --- |",
        *rows,
    ]
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(SCORE_MARKS[0])
    after = rest.split(SCORE_MARKS[1])[1]
    body = "\n".join(table)
    text = f"{before}{SCORE_MARKS[0]}\n\n{body}\n\n{SCORE_MARKS[1]}{after}"
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=HERE, help="folder of the checkpoint")
    parser.add_argument(
        "--write", action="store_true", help="write the cases, answers and score there"
    )
    parser.add_argument("--failures", type=int, default=20, help="how many failures to print")
    args = parser.parse_args()
    reference, cases = Reference(args.model), held_out_cases()
    made = reference.greedy_batch([reference.prompt_ids(case) for case in cases])
    found = tally(cases, [reference.text(ids) for ids in made])
    failures = found.pop("failures")
    found["stopped"] = round(sum(map(reference.stopped, made)) / len(made), 4)
    for failure in failures[: args.failures]:
        print(json.dumps(failure, ensure_ascii=False))
    print(json.dumps(found, indent=2))
    if args.write:
        write_lines(args.model / "eval.jsonl", (dataclasses.asdict(case) for case in cases))
        write_golden(reference, args.model / "golden.jsonl")
        text = json.dumps(found, indent=2) + "\n"
        (args.model / "score.json").write_text(text, encoding="utf-8")
        write_readme(args.model / "README.md", found)


if __name__ == "__main__":
    main()
