"""Checks of a model: what its files say that it does, and whether it does so."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from src.cli.doctor.finding import Finding
from src.core.config import Config
from src.core.errors import SlipstreamError
from src.core.settings import CHECKOUT

if TYPE_CHECKING:
    from src.core.embedding import EmbeddingRecipe
    from src.core.scoring import LabelRecipe
    from src.core.status import ModelInfo
    from src.engine.client import AsyncEngine

# Two sentences that mean nearly the same, and one that does not.
LIKE: Final = ("A happy dog plays in the garden.", "A glad puppy runs around outside.")
UNLIKE: Final = "The central bank raised its interest rate."
QUERY: Final = "What is the capital of France?"
# The one that answers it, and one that does not.
DOCUMENTS: Final = ("Paris is the capital of France.", "Bake the apple pie for one hour.")
_POOLED: Final = {
    "first": "the first token's hidden state",
    "last": "the last token's hidden state",
    "mean": "the mean of the tokens' hidden states",
    "all": "every token's hidden state",
}
# Of one text, alone and beside others: what rounding to 8 bits may make of it at most.
_SAME: Final = 0.99
_SHOWN_NAMES: Final = 8
_COMPARE: Final = "compare pooling, prompts and template with the model's card"


def tasks(config: Config) -> Iterator[Finding]:
    """What the model's files say that it does, and how. Reads no weights.

    Nothing for the model that is served if none is named.
    """
    place = Path(config.model.path).expanduser()
    if place.resolve() == (CHECKOUT / Config().model.path).resolve():
        return
    if not place.exists():
        text = f"{config.model.path} is not on this machine: a start fetches it"
        yield Finding("tasks", "unchecked", text)
        return
    from src.engine.sizing.planning import tasks_of
    from src.models.sentence_transformers import module_kinds
    from src.models.tasks import describe_scoring

    try:
        path, found = tasks_of(config)
    except SlipstreamError as error:
        yield Finding("tasks", "broken", str(error))
        return
    yield Finding("tasks", "good", f"{config.model.path}: {', '.join(found.tasks)}")
    if found.embedding is not None and {"embed", "token_embed"} & set(found.tasks):
        yield Finding("vectors", "good", _vectors(found.embedding))
        kinds = module_kinds(path)
        told = ", ".join(kinds) if kinds else "no modules.json; the pooling is this engine's choice"
        yield Finding("modules", "good", told)
        yield Finding("prompts", "good", _prompts(found.embedding))
    if found.labels is not None:
        yield Finding("labels", "good", _labels(found.labels))
    if found.scoring is not None and "score" in found.tasks:
        yield Finding("scores", "good", describe_scoring(found.scoring).removeprefix("scores: "))


def _vectors(recipe: EmbeddingRecipe) -> str:
    length = ", scaled to length 1" if recipe.normalizes else ", not scaled"
    if recipe.sizes is None:
        cut = "may not be cut"
    else:
        cut = f"may be cut to {', '.join(map(str, recipe.sizes)) or 'any size'}"
    return (
        f"{_POOLED[recipe.pooling]}, {recipe.size} numbers{length}; {cut}; texts of up to "
        f"{recipe.max_tokens} tokens"
    )


def _prompts(recipe: EmbeddingRecipe) -> str:
    if not recipe.prompts:
        return "none: texts are taken as they are"
    default = recipe.default_prompt
    told = f"{default} unless a request names another" if default else "none unless a request does"
    return f"{_some(list(recipe.prompts))}; {told}"


def _labels(recipe: LabelRecipe) -> str:
    count = len(recipe.labels)
    return (
        f"{count} {'label' if count == 1 else 'labels'} of {_POOLED[recipe.pooling]} "
        f"({_some(list(recipe.labels))}), activation {recipe.activation}"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(ascii(name)[1:-1] for name in names[:_SHOWN_NAMES]) + more


def self_test(config: Config) -> list[Finding]:
    """Load the model and ask it for what it does beside text."""
    return asyncio.run(_asked(config))


async def _asked(config: Config) -> list[Finding]:
    from src.engine.client import AsyncEngine

    # Compilation takes longer than the few texts do without it.
    compiled = msgspec.structs.replace(config.compile, startup="off")
    config = msgspec.structs.replace(config, compile=compiled)
    async with AsyncEngine.open(config) as engine:
        return [found async for found in _answers(engine, engine.model_info)]


async def _answers(engine: AsyncEngine, info: ModelInfo) -> AsyncIterator[Finding]:
    own = set(info.tasks)
    if "embed" in own:
        yield await _cosines(engine, info)
    if "classify" in own:
        (one,) = await engine.classify([LIKE[0]])
        best = max(one.probs)
        yield Finding("self-test", "good", f'"{LIKE[0]}" has the label {one.label} ({best:.3f})')
    if "score" in own and info.scoring is not None and info.scoring.joins != "apart":
        yield await _scores(engine)
    if not own & {"embed", "classify", "score"}:
        text = f"there is none for {', '.join(info.tasks)}; the model loads"
        yield Finding("self-test", "good", text)


async def _cosines(engine: AsyncEngine, info: ModelInfo) -> Finding:
    """Vectors of two sentences that are alike, and of one that is not."""
    assert info.embedding is not None
    one, other, third = [
        array("f", vector.numbers) for vector in await engine.embed([*LIKE, UNLIKE])
    ]
    (again,) = await engine.embed([LIKE[0]])
    same = _cosine(one, array("f", again.numbers))
    if not same >= _SAME:
        text = f"the vector of one text alone and beside others has the cosine {same:.4f}"
        return Finding("self-test", "broken", text)
    near, far = _cosine(one, other), _cosine(one, third)
    text = f"{len(one)} numbers; two sentences that are alike have the cosine {near:.3f}, two "
    text += f"that are not have {far:.3f}"
    # A model that is made to generate need not tell them apart.
    if near <= far and "score" in info.tasks:
        return Finding("self-test", "unchecked", f"{text}: is this so?", _COMPARE)
    return Finding("self-test", "good", text)


async def _scores(engine: AsyncEngine) -> Finding:
    """Scores of a query with a document that answers it, and with one that does not."""
    right, wrong = [one.score for one in await engine.score([(QUERY, text) for text in DOCUMENTS])]
    text = f"the document that answers a query has the score {right:.4f}, another one {wrong:.4f}"
    if right <= wrong:
        return Finding("self-test", "unchecked", f"{text}: is this so?", _COMPARE)
    return Finding("self-test", "good", text)


def _cosine(one: array[float], other: array[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / lengths if lengths else math.nan
