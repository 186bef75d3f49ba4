"""Checks engines with and without captured steps against transformers.

A small model with the heads of Llama 3.1 8B answers the same prompts greedily both ways. Its tokens
are compared with the logits that transformers computes in float32 on the CPU from the same weights,
given the same preceding tokens. No choice may be worse there than rounding explains.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from benchmarks.gpu.session import Session
from benchmarks.gpu.table import Row
from benchmarks.record import Figure
from src import AsyncEngine, SamplingParams
from src.core.config import Config
from src.engine import startup
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import random_prompts

_VOCAB = 1024
# Heads of an 8 B model; weights with enough variance that most choices are clear.
_MODEL: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.08,
}
_MOST_TOKENS = 64
_DTYPES: Final = (torch.float32, torch.bfloat16)
# Maximal gap between a chosen token and the best, in standard deviations of the position's logits.
_MOST_GAP: Final = {torch.float32: 0.01, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class Answers:
    """Output tokens of one engine, and its number of replayed steps."""

    token_ids: list[list[int]]
    replayed: dict[str, int]


def figures(options: argparse.Namespace) -> list[str]:
    return [figure for dtype in _DTYPES for figure in _figures_of(dtype)]


def _figures_of(dtype: torch.dtype) -> tuple[str, str, str]:
    """Names of the figures: with graphs, without, and the comparison of both."""
    name = str(dtype).removeprefix("torch.")
    return (
        f"{name}, graphs: worst choice",
        f"{name}, no graphs: worst choice",
        f"{name}: answers that graphs change",
    )


def run(session: Session) -> None:
    # Imported here because every section's process imports this module.
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        for dtype in _DTYPES:
            with session.attempt(*_figures_of(dtype)):
                checkpoint = make_checkpoint(
                    Path(folder) / str(dtype), dtype=dtype, vocab_size=_VOCAB, tokenizer=True,
                    **_MODEL,
                )  # fmt: skip
                _compare(session, checkpoint, dtype)


def _compare(session: Session, checkpoint: Path, dtype: torch.dtype) -> None:
    with_graphs, without, changed = _figures_of(dtype)
    quick = session.options.quick
    prompts = random_prompts(4 if quick else 12, longest=40, vocab_size=_VOCAB)
    params = SamplingParams(temperature=0, max_tokens=8 if quick else 32, ignore_eos=True)
    reference = load_reference(checkpoint)
    said: dict[str, Answers] = {}

    def judge(figure: str, cuda_graphs: str) -> None:
        with session.attempt(figure):
            config = _configuration(session, checkpoint, dtype, cuda_graphs)
            answers = asyncio.run(_answers(config, prompts, params))
            if cuda_graphs != "off" and not all(answers.replayed.values()):
                raise RuntimeError(f"replayed steps by kind: {answers.replayed}")
            gaps = [
                worst_gap(reference, prompt, output)
                for prompt, output in zip(prompts, answers.token_ids, strict=True)
            ]
            session.record(figure, {"gap": Figure.of("std", gaps)}, config=config)
            session.row(Row(figure, "std", max(gaps), goal=_MOST_GAP[dtype]))
            said[figure] = answers

    judge(without, "off")
    if startup.capture_backend(session.device) is None:
        session.without([with_graphs, changed], "impossible", "a CPU captures nothing")
        return
    judge(with_graphs, "wait")
    with session.attempt(changed):
        if len(said) < 2:
            raise RuntimeError("one of the two engines gave no answers")
        pairs = zip(said[without].token_ids, said[with_graphs].token_ids, strict=True)
        different = sum(one != other for one, other in pairs)
        # Padding may select another kernel for a product: in bfloat16, near ties may then differ.
        goal = 0 if dtype == torch.float32 else None
        session.row(Row(changed, f"of {len(prompts)}", different, goal=goal))


def _configuration(
    session: Session, checkpoint: Path, dtype: torch.dtype, cuda_graphs: str
) -> Config:
    # Compile only the dtype that is served in practice; the other one is for finding errors.
    is_compiled = session.on_cuda and dtype == torch.bfloat16 and not session.options.eager
    sections: dict[str, Any] = {
        "model": {"path": str(checkpoint)},
        # Too small for several threads.
        "device": {"type": session.device.type, "num_threads": 1},
        "cache": {"num_blocks": 256},
        # No step exceeds the largest captured shape.
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": _MOST_TOKENS},
        "compile": {
            "startup": "wait" if is_compiled else "off",
            "cuda_graphs": cuda_graphs,
            "cuda_graph_max_tokens": _MOST_TOKENS,
        },
        "observability": {"stats_interval": 0},
    }
    return msgspec.convert(sections, Config)


async def _answers(config: Config, prompts: list[list[int]], params: SamplingParams) -> Answers:
    async with AsyncEngine.open(config) as engine:
        results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        replayed = {
            kind: int(engine.metrics.value("slipstream_graph_steps_total", kind=kind))
            for kind in ("decode", "mixed")
        }
    return Answers([result.token_ids for result in results], replayed)


def worst_gap(model: Any, prompt: list[int], output: list[int]) -> float:
    """The largest gap of these tokens to the best one, in standard deviations of the logits."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    return float(((logits.amax(1) - chosen) / logits.std(1)).max())
