"""Train the demo model from scratch, in Hugging Face layout: `python configs/demo/train.py`.

The length of the run is given in steps, never in time, so that the same seed gives the same text,
the same batches and, on the same kind of machine, the same weights.
"""

# ruff: noqa: E402 - a script first says where its neighbours are

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

# Threads that spin while they wait for each other only burn time on a machine that is shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from demo_data import EARLY_UNTIL, LAST_FROM, LATE_FROM, Documents, Packer
from demo_model import Model, Muon, Shape, export
from demo_tokenizer import BOS, END, MAX_LENGTH, PAD, save_tokenizer, train_tokenizer
from demo_words import every_word
from safetensors.torch import load_file
from tokenizers import Tokenizer

PROMPT_WEIGHT = 0.1  # of a prompt token in the loss; an answer token weighs one
LAST_SHARE = 0.6  # of the third round's weights in the final mean with the second's: less forgotten
PROMPT_SHARE = 0.25  # of the prompt tokens that a loss is taken on, to save the output head's work


@dataclass(frozen=True)
class Plan:
    """The budget of a run: a short warm-up, a plateau, and a straight line down to zero."""

    steps: int
    decay: int
    batch: int = 4096
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    seed: int = 7
    warmup: int = 30
    first: int = 0  # what the text counts the first step as: it changes as the training goes on

    def scale(self, step: int) -> float:
        """The share of the top learning rate."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / self.decay)


class Trainer:
    """Model, optimisers and text, and the step that joins them."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, model: Model) -> None:
        self.plan, self.tokenizer, self.model = plan, tokenizer, model
        matrices = [
            p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n
        ]
        others = [p for n, p in self.model.named_parameters() if p.dim() == 1 or "embed" in n]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, lr=plan.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.packer = Packer(tokenizer, Documents(plan.seed), plan.batch)
        self.tokens = 0

    def loss(
        self, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The weighted loss, with the answers' own losses and the tasks they belong to."""
        hidden = self.model(batch["ids"], batch["positions"], batch["documents"])
        answer = batch["answer"]
        chosen = answer | (batch["prompt"] & (torch.rand(answer.shape) < PROMPT_SHARE))
        logits = F.linear(hidden[chosen], self.model.embed_tokens.weight)
        each = F.cross_entropy(logits, batch["targets"][chosen], reduction="none")
        is_answer = answer[chosen]
        weight = torch.where(is_answer, 1.0, PROMPT_WEIGHT / PROMPT_SHARE)
        return (
            (each * weight).sum() / weight.sum(),
            each[is_answer].detach(),
            batch["tasks"][answer],
        )

    def step(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One batch, one update."""
        batch = self.packer.batch(self.plan.first + number)
        loss, each, tasks = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = self.plan.scale(number)
        self.muon.step(self.plan.muon_lr * scale)
        for group in self.adam.param_groups:
            group["lr"] = self.plan.adam_lr * scale
        self.adam.step()
        for p in self.model.parameters():
            p.grad = None
        self.tokens += int((batch["documents"] >= 0).sum())
        return each, tasks


def sample_texts(seed: int, count: int) -> Iterator[str]:
    """Text for the tokenizer: documents without their marks, and each listed word alone."""
    documents = Documents(seed)
    for _ in range(count):
        yield from re.split(r"<\|?/?\w+\|?>", documents.draw(EARLY_UNTIL, long=False)[0])
    for word in every_word():
        yield from [word, f" {word}"] * (count // 400)


def used() -> float:
    """CPU seconds of this process so far, over all of its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def save(trainer: Trainer, folder: Path) -> None:
    """Write the checkpoint as it stands, tokenizer included."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(trainer.tokenizer, folder)
    vocabulary = trainer.tokenizer.get_vocab()
    bos, eos, pad = (vocabulary[t] for t in (BOS, END, PAD))
    export(trainer.model, folder, bos=bos, eos=eos, pad=pad)


def run(trainer: Trainer, log_every: int, checkpoints: Path | None) -> dict[str, Any]:
    """Train for the planned steps; returns what it took.

    SIGTERM stops at once, SIGUSR1 starts the decay: on a machine that is busier than expected, the
    shorter plan that results is the one to write down and to repeat.
    """
    stopped = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    def wind_down(_signal: int, _frame: FrameType | None) -> None:
        plan = trainer.plan
        trainer.plan = replace(plan, steps=min(plan.steps, steps + plan.decay))

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, wind_down)
    began, cpu, steps = time.monotonic(), used(), 0
    sums: dict[str, list[float]] = {}
    while steps < trainer.plan.steps and not stopped:
        each, tasks = trainer.step(steps)
        steps += 1
        for index, name in enumerate(trainer.packer.documents.names):
            got = each[tasks == index]
            if len(got):
                total = sums.setdefault(name, [0.0, 0.0])
                total[0], total[1] = total[0] + float(got.sum()), total[1] + len(got)
        if steps % log_every == 0 or steps == trainer.plan.steps or stopped:
            wall = time.monotonic() - began
            shown = " ".join(f"{n}={a / b:.3f}" for n, (a, b) in sorted(sums.items()))
            print(
                f"step {steps}/{trainer.plan.steps} {trainer.tokens / 1e6:.2f}M tokens "
                f"{trainer.tokens / wall:.0f}/s wall {wall:.0f}s cpu {used() - cpu:.0f}s | {shown}",
                flush=True,
            )
            sums = {}
        if checkpoints and steps % 100 == 0:
            save(trainer, checkpoints)
    wall = time.monotonic() - began
    return {
        "steps": steps,
        "decay": trainer.plan.decay,
        "tokens": trainer.tokens,
        "wall_seconds": round(wall),
        "cpu_seconds": round(used() - cpu),
        "tokens_per_second": round(trainer.tokens / wall),
        "seed": trainer.plan.seed,
        "batch": trainer.plan.batch,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def first_model(tokenizer: Tokenizer, seed: int, folder: Path | None) -> Model:
    """A model with random weights, or with those of a folder."""
    torch.manual_seed(seed)
    model = Model(Shape(vocab=tokenizer.get_vocab_size(), positions=MAX_LENGTH))
    if folder:
        state = load_file(folder / "model.safetensors")
        model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the checkpoint")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to every 100 steps")
    parser.add_argument("--resume", type=Path, help="folder of a finished round")
    parser.add_argument("--steps", type=int, default=1349, help="steps of the first round")
    parser.add_argument("--decay", type=int, default=350, help="how many of them the decay takes")
    parser.add_argument(
        "--more", type=int, default=400, help="steps of the second round, all decay"
    )
    parser.add_argument("--last", type=int, default=170, help="steps of the third round, all decay")
    parser.add_argument("--batch", type=int, default=4096, help="tokens per step")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument(
        "--eager", action="store_true", help="do without torch.compile (and its C++ compiler)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer(sample_texts(args.seed, 20_000))
    model = first_model(tokenizer, args.seed, args.resume)
    for layer in () if args.eager else model.layers:
        layer.compile(dynamic=False)  # by layer: compiled once, for all of them
    first = Plan(args.steps, args.decay, args.batch, args.muon_lr, args.adam_lr, args.seed)
    second = replace(
        first,
        steps=args.more,
        decay=args.more,
        muon_lr=first.muon_lr * 0.7,
        adam_lr=first.adam_lr * 0.7,
        seed=first.seed + 1,
        first=LATE_FROM,
    )
    rounds = json.loads((args.resume / "training.json").read_text()) if args.resume else []
    third = replace(
        second,
        steps=args.last,
        decay=args.last,
        muon_lr=first.muon_lr * 0.6,
        adam_lr=first.adam_lr * 0.6,
        seed=first.seed + 2,
        first=LAST_FROM,
    )
    for plan in (first, second, third)[len(rounds) :]:
        if plan is not first:  # as drawn after a resume, and so the same without one
            torch.manual_seed(plan.seed)
        trainer = Trainer(plan, tokenizer, model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        rounds.append(run(trainer, args.log_every, args.checkpoints))
        if plan is third:
            after = model.state_dict()
            model.load_state_dict({k: v.lerp(after[k], LAST_SHARE) for k, v in before.items()})
        save(trainer, args.out)
        text = json.dumps(rounds, indent=2) + "\n"
        (args.out / "training.json").write_text(text, encoding="utf-8")
        print(json.dumps(rounds[-1]), flush=True)


if __name__ == "__main__":
    main()
