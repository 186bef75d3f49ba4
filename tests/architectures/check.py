"""Serves one architecture and compares it with transformers.

`python -m tests.architectures.check MODEL_TYPE` prints one JSON line: what serves it, the largest
error of a log-probability, or why there is none. Imports at once whatever that takes, so that
processes which are forked from one that has this module are quick.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers.generation
import transformers.modeling_utils

from src import AsyncEngine, SamplingParams
from src.core.errors import ModelLoadError
from src.engine import startup
from tests.architectures.page import ENCODER, HEAD
from tests.architectures.tiny import make_tiny, make_tiny_classifier, make_tiny_encoder
from tests.support.engines import assert_idle, random_prompts, small_config

__all__ = ["check", "startup", "transformers"]

NEW_TOKENS = 5
TOP = 3


async def served(directory: Path) -> tuple[str, list[Any], list[Any]]:
    """What serves it; answers with scores of prompts, in chunks; answers with cached prefixes."""
    prompts = [*random_prompts(2, longest=40, seed=1), list(range(100, 131))]
    scored = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=TOP)
    with_prompt = scored.__replace__(prompt_logprobs=TOP)
    config = small_config(
        directory,
        compile__enforce_eager=True,
        scheduler__max_num_batched_tokens=8,
        cache__memory_bytes=16 << 20,
    )
    async with AsyncEngine.open(config) as engine:
        chunked = await asyncio.gather(*(engine.generate(p, with_prompt) for p in prompts))
        cached = await asyncio.gather(*(engine.generate(p, scored) for p in prompts))
        assert sum(result.usage.cached_tokens for result in cached) > 0
        assert_idle(engine)
        name = engine.model_info.implementation
    pairs = zip(prompts, chunked, strict=True), zip(prompts, cached, strict=True)
    return name, list(pairs[0]), list(pairs[1])


def largest_error(reference: Any, prompt: list[int], result: Any) -> float:
    """Of all log-probabilities of an answer, and of its prompt, where it has those."""
    return max(errors_of(reference, prompt, result), default=0.0)


def errors_of(reference: Any, prompt: list[int], result: Any) -> list[float]:
    """Of each log-probability of an answer, and of its prompt, where it has those."""
    ids = prompt + result.token_ids
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    wanted = logits.log_softmax(-1)
    entries = [*(result.prompt_logprobs or [None] * len(prompt)), *result.completions[0].logprobs]
    errors: list[float] = []
    for position, entry in enumerate(entries):
        if entry is None:
            continue
        pairs = [(entry.token_id, entry.logprob), *entry.top]
        errors += [abs(float(wanted[position - 1, i]) - value) for i, value in pairs]
    return errors


async def pooled(directory: Path, *, has_head: bool) -> tuple[str, list[Any]]:
    """What serves it; texts and what they get, alone and together, in one step or several."""
    prompts = [*random_prompts(6, longest=60, seed=1), list(range(100, 131))]
    config = small_config(
        directory,
        compile__enforce_eager=True,
        model__max_model_len=64,
        scheduler__max_num_batched_tokens=70,
        cache__memory_bytes=16 << 20,
    )
    async with AsyncEngine.open(config) as engine:

        async def made(texts: list[list[int]]) -> list[Any]:
            if has_head:
                return list(await engine.classify(texts, use_activation=False))
            return list(await engine.embed(texts))

        together = await made(prompts)
        alone = [(await made([prompt]))[0] for prompt in prompts]
        assert_idle(engine)
        name = engine.model_info.implementation
        assert engine.model_info.tasks[0] == ("classify" if has_head else "embed")
    return name, [*zip(prompts, together, strict=True), *zip(prompts, alone, strict=True)]


def error_of_vector(reference: Any, prompt: list[int], embedding: Any) -> float:
    """The largest of any number, in parts of the vector's root mean square."""
    with torch.inference_mode():
        wanted = reference(input_ids=torch.tensor([prompt]))[0][0].mean(0).double()
    found = torch.tensor(embedding.vector, dtype=torch.float64)
    return float((found - wanted).abs().max() / wanted.square().mean().sqrt())


def error_of_labels(reference: Any, prompt: list[int], result: Any) -> float:
    """The largest of the head's numbers."""
    with torch.inference_mode():
        wanted = reference(input_ids=torch.tensor([prompt])).logits[0].double()
    found = torch.tensor(result.probs.tolist(), dtype=torch.float64)
    return float((found - wanted).abs().max())


def check_encoder(model_type: str, line: str, *, has_head: bool) -> dict[str, Any]:
    """The line of one encoder, which is called ``line``."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    make, kind, error_of = make_tiny_encoder, AutoModel, error_of_vector
    if has_head:
        kind, error_of = AutoModelForSequenceClassification, error_of_labels
        make = make_tiny_classifier
    found: dict[str, Any] = {"model_type": line, "date": time.strftime("%Y-%m-%d")}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        try:
            found["class"] = make(directory, model_type).__name__
        except Exception as error:
            return found | {"failed": f"no tiny model: {_told(error)}"}
        try:
            served_by = asyncio.run(pooled(directory, has_head=has_head))
            found["implementation"], answers = served_by
        except ModelLoadError as error:
            return found | {"refused": str(error)}
        except Exception as error:
            return found | {"failed": _told(error)}
        reference = kind.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        found["error"] = max(error_of(reference, *one) for one in answers)
    return found


def check(model_type: str) -> dict[str, Any]:
    """The line of one architecture; of an encoder if its name begins with `ENCODER` or `HEAD`."""
    for beginning in (ENCODER, HEAD):
        if model_type.startswith(beginning):
            name, has_head = model_type.removeprefix(beginning), beginning == HEAD
            return check_encoder(name, model_type, has_head=has_head)
    started = time.monotonic()
    found: dict[str, Any] = {"model_type": model_type, "date": time.strftime("%Y-%m-%d")}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        try:
            found["class"] = make_tiny(directory, model_type).__name__
        except Exception as error:
            return found | {"failed": f"no tiny model: {_told(error)}"}
        try:
            found["implementation"], *answers = asyncio.run(served(directory))
        except ModelLoadError as error:
            return found | {"refused": str(error)}
        except Exception as error:
            return found | {"failed": _told(error)}
        from transformers import AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        found["error"] = max(largest_error(reference, *one) for pairs in answers for one in pairs)
    return found | {"seconds": round(time.monotonic() - started, 1)}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: " + " ".join(str(error).split())[:150]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_type")
    print(json.dumps(check(parser.parse_args().model_type)))
