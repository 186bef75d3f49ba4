"""Training documents out of the grammar, and their packing into rows of one length."""

from __future__ import annotations

import random

import demo_stories
import grammar
import torch
from demo_tokenizer import BOS, END, MAX_LENGTH, render
from demo_tools import TOOLS
from demo_words import SYSTEMS
from tokenizers import Tokenizer

# How often a task is drawn. Sums need many examples, lists and copies a fair share.
WEIGHTS = {
    "add": 16,
    "subtract": 12,
    "compare": 3,
    "count": 5,
    "tally": 7,
    "sort_numbers": 8,
    "sort_words": 6,
    "lookup_plain": 8,
    "json": 6,
    "echo": 6,
    "fact": 5,
    "chat": 5,
    "recall": 2,
}
# Copying is learnt in one sudden step: early on, more of the tasks that reward it bring it forward.
EARLY = {"echo": 30, "lookup_plain": 10, "json": 10}
EARLY_UNTIL = 300  # steps
# The second round dwells on what is learnt last, keeps the rest alive, and quotes rows of tables.
LATE = {
    "add": 6, "subtract": 14, "compare": 12, "count": 8, "tally": 18, "sort_numbers": 14,
    "sort_words": 5, "lookup_marked": 20, "json": 4, "echo": 6, "fact": 3, "chat": 4, "recall": 2,
}  # fmt: skip
LAST = {
    "add": 4, "subtract": 26, "compare": 4, "count": 7, "tally": 20, "sort_numbers": 8,
    "sort_words": 3, "lookup": 30, "json": 4, "echo": 5, "fact": 3, "chat": 3, "recall": 2,
}  # fmt: skip
LAST_FROM = 200_000  # steps, for the third round
LATE_FROM = 100_000  # steps: the second round counts on from here
STORIES, TOOLED = 0.06, 0.10  # shares of the documents
ROW = 256
LONG_FROM, LONG_EVERY = 200, 8  # one batch in so many holds rows of the full length


class Documents:
    """An endless, seeded supply of documents, all from the training side of the split."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = ("raw_story", "mixed", *grammar.TASKS)

    def draw(self, step: int, *, long: bool) -> tuple[str, str]:
        """A document and the task it is counted under; `long` asks for many turns."""
        rng, kind = self.rng, self.rng.random() * (2 if step >= LATE_FROM else 1)
        if not long and kind < STORIES:
            if rng.random() < 0.4:
                return f"{BOS}{demo_stories.draw(rng).text}{END}", "raw_story"
            return self._conversation(["story"])
        if kind < STORIES + TOOLED and not long:
            return self._tooled()
        if long:
            turns = rng.randint(12, 30)
        else:
            chance = min(1.0, step / 200) * 0.4
            turns = rng.choice((2, 2, 3, 4, 5)) if rng.random() < chance else 1
        weights = WEIGHTS | EARLY if step < EARLY_UNTIL else WEIGHTS
        weights = LAST if step >= LAST_FROM else LATE if step >= LATE_FROM else weights
        tasks = rng.choices(list(weights), list(weights.values()), k=turns)
        if long and rng.random() < 0.5:
            tasks.insert(rng.randrange(len(tasks)), "story")
        return self._conversation(tasks)

    def _system(self, share: float = 0.2) -> list[grammar.Message]:
        rng = self.rng
        return [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < share else []

    def _conversation(self, tasks: list[str]) -> tuple[str, str]:
        messages = self._system()
        for task in tasks:
            case = grammar.draw(self.rng, task)
            messages += [*case.messages, {"role": "assistant", "content": case.answer}]
        return render(messages), tasks[0] if len(tasks) == 1 else "mixed"

    def _tooled(self) -> tuple[str, str]:
        """One to three turns with tools at hand; now and then a turn that needs none of them."""
        rng, messages = self.rng, self._system(0.3)
        tools = [t.drawn(rng) for t in rng.sample(TOOLS, rng.choice((1, 1, 2, 3)))]
        task = "tool_call"
        for _ in range(rng.choice((1, 1, 2, 3))):
            if rng.random() < 0.15:
                case = grammar.draw(rng, rng.choice(("chat", "fact", "echo")))
            else:
                draw = rng.choice((grammar.tool_call, grammar.tool_result))
                case = draw(rng, tools)
                while grammar.held_out(case.key):
                    case = draw(rng, tools)
                task = case.task
            messages += [*case.messages, {"role": "assistant", "content": case.answer}]
            if case.task == "tool_call":
                break
        return render(messages, [t.schema() for t in tools]), task


class Packer:
    """Fills rows with whole documents; a token's position starts anew with each document."""

    def __init__(self, tokenizer: Tokenizer, documents: Documents, batch: int) -> None:
        self.tokenizer, self.documents, self.size = tokenizer, documents, batch
        self.end, self.bos, self.assistant = (
            tokenizer.token_to_id(t) for t in (END, BOS, "<|assistant|>")
        )
        self.roles = {
            tokenizer.token_to_id(f"<|{r}|>") for r in ("system", "user", "assistant", "tool")
        }
        self.waiting: list[tuple[list[int], int]] = []
        self.count = 0

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The next batch; early batches hold short documents only."""
        self.count += 1
        long = step >= LONG_FROM and self.count % LONG_EVERY == 0
        length = MAX_LENGTH if long else ROW
        rows: list[list[tuple[list[int], int]]] = [[] for _ in range(self.size // length)]
        room = [length + 1] * len(rows)
        pending = [] if long else self.waiting
        misses: list[tuple[list[int], int]] = []
        while len(misses) < 12:
            item = pending.pop() if pending else self._draw(step, long, length)
            fits = [i for i, r in enumerate(room) if r > len(item[0])]
            if not fits:
                misses.append(item)
                continue
            best = min(fits, key=lambda i: room[i])
            rows[best].append(item)
            room[best] -= len(item[0])
        if not long:
            self.waiting = misses
        return self._tensors(rows, length)

    def _draw(self, step: int, long: bool, length: int) -> tuple[list[int], int]:
        while True:
            # A long row is filled up with short documents once no long one fits.
            text, name = self.documents.draw(step, long=long and self.documents.rng.random() < 0.3)
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) <= length:
                return ids, self.documents.names.index(name)

    def _tensors(
        self, rows: list[list[tuple[list[int], int]]], length: int
    ) -> dict[str, torch.Tensor]:
        shape = (len(rows), length)
        out = {
            k: torch.zeros(shape, dtype=torch.long)
            for k in ("ids", "positions", "targets", "tasks")
        }
        out |= {k: torch.zeros(shape, dtype=torch.bool) for k in ("answer", "prompt")}
        out["documents"] = torch.full(shape, -1)
        for r, row in enumerate(rows):
            at = 0
            for number, (ids, task) in enumerate(row):
                n = len(ids) - 1  # the last token, the end, is a target only
                span = slice(at, at + n)
                out["ids"][r, span] = torch.tensor(ids[:-1])
                out["targets"][r, span] = torch.tensor(ids[1:])
                out["positions"][r, span] = torch.arange(n)
                out["documents"][r, span] = number
                out["tasks"][r, span] = task
                answer = torch.tensor(self._answers(ids))
                out["answer"][r, span] = answer
                out["prompt"][r, span] = ~answer
                at += n
        return out

    def _answers(self, ids: list[int]) -> list[bool]:
        """For each target token, whether the assistant (or a raw story) is speaking."""
        speaking = ids[1] not in self.roles
        out = []
        for now in ids[:-1]:
            if now == self.assistant:
                speaking = True
            elif now in self.roles or now == self.end:
                speaking = False
            out.append(speaking)
        return out
