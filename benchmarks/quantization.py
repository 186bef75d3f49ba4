"""The loss of quality by quantization: the bundled model on its held-out cases, by kind.

    python -m benchmarks.quantization              # float32, bfloat16, int8, int4 of 32 to 256
                                                   # weights, the latter with rounded inputs too
    python -m benchmarks.quantization --cases 96   # of each kind, instead of all

Exact match is of greedy answers. Perplexity is of the tokens of the right answers, including their
end, each given the prompt and the right tokens before it. For stories, which have no single right
answer, it is of held-out stories.

The model's rows of 192 weights cannot be divided into groups of 128. For larger groups, the model
is widened with zeros to 256 channels, which computes the same. So a row of 192 becomes a group of
128 weights and one of 64 with "groups of 128", and one of 192 with "groups of 256". Rows of 256 and
512 (whose inputs come from attention and from the gated layer) are divided as the names say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmarks.record import Figure, Recorder, add_common
from src import AsyncEngine, Config, SamplingParams
from src.core.settings import CHECKOUT, load_config

DEMO = CHECKOUT / "configs" / "demo"
sys.path.insert(0, str(DEMO))

from evaluate import load_cases, tally  # noqa: E402
from grammar import Case, draw  # noqa: E402

KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4, groups of 32": {"dtype": "bfloat16", "quantization": "int4"},
    "int4, groups of 64": {"dtype": "bfloat16", "quantization": "int4", "group": "64"},
    "bfloat16, widened": {"dtype": "bfloat16"},
    "int4, groups of 128, widened": {
        "dtype": "bfloat16",
        "quantization": "int4",
        "group": "128",
    },
    "int4, groups of 256, widened": {
        "dtype": "bfloat16",
        "quantization": "int4",
        "group": "256",
    },
}
_WIDENED = ", widened"
_WIDTH = 256
_ROUNDED = ", inputs too"
_MAX_TOKENS = 160


class Asked(NamedTuple):
    """Token ids of a case."""

    prompt: list[int]
    answer: list[int]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantization",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, metavar="N", help="of the held-out ones; default: all")
    parser.add_argument("--stories", type=int, default=96, metavar="N")
    add_common(parser, repeats=1)
    return parser.parse_args()


def widened(directory: Path) -> Path:
    """The bundled model with additional zero channels, which computes the same."""
    config = json.loads((DEMO / "config.json").read_text())
    share = config["hidden_size"] / _WIDTH
    # A norm averages over more channels, so the original channels become larger; compensate.
    changes = {"hidden_size": _WIDTH, "rms_norm_eps": config["rms_norm_eps"] * share}
    weights = {}
    for name, weight in load_file(DEMO / "model.safetensors").items():
        if weight.dim() == 1:
            weight = weight * share**0.5
        # Matrices that output hidden channels have them as rows, all others as columns.
        axis = 0 if weight.dim() == 1 or name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        shape = list(weight.shape)
        shape[axis] = _WIDTH - shape[axis]
        weights[name] = torch.cat([weight, weight.new_zeros(shape)], axis)
    shutil.copytree(DEMO, directory, ignore=shutil.ignore_patterns("*.py", "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(config | changes))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def configuration(kind: str, wide: Path) -> Config:
    wanted = dict(KINDS[kind.removesuffix(_ROUNDED)])
    group = wanted.pop("group", "32")
    overrides = [(f"model.{name}", value) for name, value in wanted.items()]
    overrides += [("model.quantization_group_size", group), ("compile.startup", "wait")]
    overrides.append(("model.quantize_activations", str(kind.endswith(_ROUNDED)).lower()))
    if _WIDENED in kind:
        overrides.append(("model.path", str(wide)))
    return load_config(CHECKOUT / "configs" / "demo.toml", overrides=overrides)


def asked(tokenizer: Any, case: Case) -> Asked:
    text = tokenizer.apply_chat_template(
        case.messages, tools=case.tools or None, add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = tokenizer(case.answer, add_special_tokens=False)["input_ids"]
    return Asked(list(prompt), [*answer, tokenizer.eos_token_id])


async def perplexity(engine: AsyncEngine, cases: Sequence[Asked]) -> float:
    """Perplexity of the answers' tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    async def likelihoods(case: Asked) -> list[float]:
        result = await engine.generate(case.prompt + case.answer, params)
        assert result.prompt_logprobs is not None
        scores = result.prompt_logprobs[len(case.prompt) :]
        assert [score.token_id for score in scores if score is not None] == case.answer
        return [score.logprob for score in scores if score is not None]

    found = await asyncio.gather(*map(likelihoods, cases))
    scores = [score for each in found for score in each]
    return math.exp(-sum(scores) / len(scores))


async def measure(
    kind: str,
    config: Config,
    cases: Sequence[Case],
    stories: Sequence[Asked],
    tokenizer: Any,
    recorder: Recorder,
) -> None:
    ids = [asked(tokenizer, case) for case in cases]
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    async with AsyncEngine.open(config) as engine:
        results = await asyncio.gather(*(engine.generate(each.prompt, params) for each in ids))
        said = [tokenizer.decode(each.token_ids, skip_special_tokens=True) for each in results]
        figures = {
            "exact match": Figure.of("%", [100 * tally(cases, said)["exact_match"]]),
            "perplexity of answers": Figure.of("", [await perplexity(engine, ids)]),
            "perplexity of stories": Figure.of("", [await perplexity(engine, stories)]),
        }
    recorder.add(kind, figures, config=config, kind=kind, cases=len(cases), stories=len(stories))


async def run(options: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    cases = load_cases()
    if options.cases is not None:
        cases = random.Random(1).sample(cases, min(options.cases, len(cases)))
    chance = random.Random(2)
    stories = [asked(tokenizer, draw(chance, "story", judged=True)) for _ in range(options.stories)]
    recorder = Recorder("quantization", save=not options.no_save)
    with tempfile.TemporaryDirectory() as scratch:
        wide = widened(Path(scratch) / "widened")
        for kind, settings in KINDS.items():
            for name in (kind, kind + _ROUNDED)[: 1 + ("quantization" in settings)]:
                config = configuration(name, wide)
                await measure(name, config, cases, stories, tokenizer, recorder)


if __name__ == "__main__":
    asyncio.run(run(parse()))
