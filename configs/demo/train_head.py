"""Train an EAGLE-3 head for the demo model: `python configs/demo/train_head.py`.

It learns what the model itself says: prompts are drawn as for the model's own training, the engine
answers them, half of them with the likeliest tokens and half at temperature 1, and the head learns
the model's distributions along these texts. Each batch takes several steps, of which each goes on
from what the step before has left, as in serving.

It takes 560 seconds of processor time. The length is given in texts and steps, never in time.
"""

# ruff: noqa: E402 - a script first says where its neighbours are

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

# Threads that spin while they wait for each other only burn time on a machine that is shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from demo_data import LAST_FROM, Documents
from demo_head import STEP_WEIGHT, Head, export, losses
from demo_model import Model, Muon, Shape
from demo_tokenizer import MAX_LENGTH
from safetensors.torch import load_file
from tokenizers import Tokenizer

SEED = 23
SAID = 160  # the most tokens that are taken of an answer
ROW = 256
PROMPT_WEIGHT = 0.05  # of a token of a prompt in the loss; one that the model said weighs one
# Shares of the prompts: of random tokens, where the model makes up what it says; and of long talks.
RANDOM, LONG = 0.1, 0.05


class Text(NamedTuple):
    """Tokens of a prompt, and of what the model said behind it."""

    prompt: list[int]
    said: list[int]


def prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Beginnings of documents like those that the model was trained on, none of them held out."""
    documents, source = Documents(seed), random.Random(seed)
    found: list[list[int]] = []
    while len(found) < count:
        if source.random() < RANDOM:
            size = tokenizer.get_vocab_size()
            found.append([source.randrange(7, size) for _ in range(source.randint(4, 32))])
            continue
        # As its first round saw them, and its last.
        step = source.choice((1000, LAST_FROM))
        text, name = documents.draw(step, long=source.random() < LONG)
        if name == "raw_story":
            words = text.split(" ")
            text = " ".join(words[: source.randint(2, max(2, len(words) // 2))])
        else:
            mark = "<|assistant|>"
            text = text[: text.rindex(mark) + len(mark)]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) + SAID < MAX_LENGTH:
            found.append(ids)
    return found


def answers(folder: Path, asked: Sequence[list[int]], threads: int) -> list[Text]:
    """What the model says, by the engine."""
    from src import LLM, SamplingParams
    from src.core.settings import load_config

    overrides = [
        ("model.path", str(folder)),
        ("device.type", "cpu"),
        ("device.num_threads", str(threads)),
    ]
    params = [
        SamplingParams(temperature=float(at % 2), seed=at, max_tokens=SAID)
        for at in range(len(asked))
    ]
    with LLM(load_config(None, overrides=overrides)) as llm:
        results = llm.generate(asked, params, progress=False)
    # The end token is among what was said, where it was said.
    return [
        Text(prompt, list(result.token_ids)) for prompt, result in zip(asked, results, strict=True)
    ]


def frequent(texts: Sequence[Text], vocab: int, count: int) -> torch.Tensor:
    """The ``count`` tokens that the model says most often, ascending."""
    said = torch.tensor([token for text in texts for token in text.said])
    counts = torch.bincount(said, minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def packed(texts: Sequence[Text], batch: int, source: random.Random) -> list[dict[str, Any]]:
    """Batches of about ``batch`` tokens: rows of one length, each with one text or several."""
    shuffled = [text for text in texts if len(text.prompt) + len(text.said) > 2]
    source.shuffle(shuffled)
    rows: dict[int, list[list[Text]]] = {ROW: [], MAX_LENGTH: []}
    room: dict[int, list[int]] = {ROW: [], MAX_LENGTH: []}
    for text in shuffled:
        length = len(text.prompt) + len(text.said)
        width = ROW if length <= ROW else MAX_LENGTH
        # The rows before the last few are full enough.
        places = range(max(0, len(room[width]) - 24), len(room[width]))
        at = next((place for place in places if room[width][place] >= length), None)
        if at is None:
            at = len(room[width])
            rows[width].append([])
            room[width].append(width)
        rows[width][at].append(text)
        room[width][at] -= length
    made = []
    for width, whole in rows.items():
        size = max(1, batch // width)
        made += [tensors(whole[at : at + size], width) for at in range(0, len(whole), size)]
    source.shuffle(made)
    return made


def tensors(rows: Sequence[Sequence[Text]], width: int) -> dict[str, Any]:
    """A batch as `losses` takes it."""
    shape = (len(rows), width)
    out = {name: torch.zeros(shape, dtype=torch.long) for name in ("ids", "positions")}
    out |= {"documents": torch.full(shape, -1), "weights": torch.zeros(shape)}
    for at, row in enumerate(rows):
        begin = 0
        for number, text in enumerate(row):
            ids = [*text.prompt, *text.said]
            span = slice(begin, begin + len(ids))
            out["ids"][at, span] = torch.tensor(ids)
            out["positions"][at, span] = torch.arange(len(ids))
            out["documents"][at, span] = number
            out["weights"][at, span] = PROMPT_WEIGHT
            out["weights"][at, begin + len(text.prompt) : span.stop] = 1.0
            begin = span.stop
    return out


class Trainer:
    """A head, its optimisers, and the step that joins them."""

    def __init__(self, model: Model, head: Head, *, total: int, steps: int) -> None:
        self.model, self.head, self.total, self.steps = model, head, total, steps
        matrices = [
            p for n, p in head.named_parameters() if p.dim() == 2 and not n.startswith("lm_head")
        ]
        others = [p for n, p in head.named_parameters() if p.dim() == 1 or n.startswith("lm_head")]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, number: int, batch: dict[str, Any]) -> list[float]:
        """One update; the part of tokens that were right, by step."""
        found = losses(self.head, self.model, batch, self.steps)
        shares = [STEP_WEIGHT**at for at in range(self.steps)]
        loss = sum(share * each.mean() for share, each in zip(shares, found, strict=True))
        (loss / sum(shares)).backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        scale = min(1.0, (number + 1) / 20, (self.total - number) / (0.6 * self.total))
        self.muon.step(0.02 * scale)
        for group in self.adam.param_groups:
            group["lr"] = 0.003 * scale
        self.adam.step()
        self.head.zero_grad(set_to_none=True)
        return [each.hits() for each in found]


def load_model(folder: Path) -> Model:
    """The checkpoint in plain PyTorch, which stays as it is."""
    state = load_file(folder / "model.safetensors")
    names = {name.removeprefix("model."): value for name, value in state.items()}
    vocab, hidden = names["embed_tokens.weight"].shape
    model = Model(Shape(vocab=vocab, hidden=hidden, positions=MAX_LENGTH))
    model.load_state_dict(names)
    return model.requires_grad_(False)


def train(
    folder: Path, *, count: int, updates: int, steps: int, batch: int, tokens: int, threads: int
) -> tuple[Head, dict[str, Any]]:
    """Returns the head, and what its training took."""
    torch.manual_seed(SEED)
    torch.set_num_threads(threads)
    begun, used = time.monotonic(), time.process_time()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = answers(folder, prompts(tokenizer, count, SEED), threads)
    said = time.monotonic() - begun
    print(f"{len(texts)} texts, {sum(len(t.said) for t in texts)} tokens said, {said:.0f} s")
    model = load_model(folder)
    head = Head(model, frequent(texts, model.s.vocab, tokens))
    trainer = Trainer(model, head, total=updates, steps=steps)
    source = random.Random(SEED)
    waiting: list[dict[str, Any]] = []
    hits = [0.0] * steps
    for number in range(updates):
        waiting = waiting or packed(texts, batch, source)
        right = trainer.step(number, waiting.pop())
        weight = max(0.05, 1 / (number + 1))
        hits = [(1 - weight) * a + weight * b for a, b in zip(hits, right, strict=True)]
        if number % 20 == 19 or number == updates - 1:
            shown = " ".join(f"{each:.3f}" for each in hits)
            print(f"{number + 1}/{updates} {time.monotonic() - begun:.0f} s, right: {shown}")
            sys.stdout.flush()
    return head, {
        "texts": len(texts),
        "tokens_said": sum(len(text.said) for text in texts),
        "updates": updates,
        "batch": batch,
        "steps": steps,
        "seed": SEED,
        "parameters": sum(p.numel() for p in head.parameters()),
        "seconds_saying": round(said),
        "seconds": round(time.monotonic() - begun),
        "cpu_seconds": round(time.process_time() - used),
        "right_by_step": [round(each, 3) for each in hits],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=HERE / "eagle3", help="folder of the head")
    parser.add_argument("--texts", type=int, default=4000, help="that the model says")
    parser.add_argument("--updates", type=int, default=420)
    parser.add_argument("--steps", type=int, default=4, help="of the head in each batch")
    parser.add_argument("--batch", type=int, default=2048, help="tokens of an update")
    parser.add_argument("--tokens", type=int, default=1024, help="that the head can say")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    head, took = train(
        args.model,
        count=args.texts,
        updates=args.updates,
        steps=args.steps,
        batch=args.batch,
        tokens=args.tokens,
        threads=args.threads,
    )
    export(head, args.out)
    text = json.dumps(took, indent=2) + "\n"
    (args.out / "training.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
