"""Sorts a model's weights into parts: embedding, attention, MLP, experts, norms and head."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from src.core.memory_report import WeightPart
from src.models import Model, ServedModel
from src.models.program import Link

EMBEDDING: Final = "embedding"
ATTENTION: Final = "attention"
MLP: Final = "MLP"
EXPERTS: Final = "experts"
NORMS: Final = "norms"
HEAD: Final = "head"
OTHERS: Final = "others"
ADAPTERS: Final = "adapters"
_ORDER: Final = (EMBEDDING, ATTENTION, MLP, EXPERTS, NORMS, HEAD, OTHERS, ADAPTERS)

# Words in the names of a model's modules, where it is not a program: the first that occurs counts.
_WORDS: Final = (
    ("expert", EXPERTS),
    ("router", EXPERTS),
    ("norm", NORMS),
    ("ln_", NORMS),
    ("attn", ATTENTION),
    ("attention", ATTENTION),
    ("mlp", MLP),
    ("ffn", MLP),
    ("feed_forward", MLP),
    ("fc1", MLP),
    ("fc2", MLP),
    ("lm_head", HEAD),
    ("embed_out", HEAD),
    ("embed", EMBEDDING),
    ("wte", EMBEDDING),
    ("wpe", EMBEDDING),
)


def weight_parts(model: ServedModel) -> tuple[WeightPart, ...]:
    """The parts that a model has, in their order; on the meta device as well."""
    parameters: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    if isinstance(model, Model):
        parts = parts_of(model)
        for name, parameter in model.table.items():
            parameters[parts[name]] += math.prod(parameter.shape)
            taken[parts[name]] += model.weights[name].nbytes
        if model.adapters is not None:
            parameters[ADAPTERS] = sum(each.numel() for each in model.adapters.tensors.values())
            taken[ADAPTERS] = model.adapters.nbytes
    else:
        for name, tensor in model.parameters().items():
            part = part_of_name(name)
            parameters[part] += tensor.numel()
            taken[part] += tensor.nbytes
    if isinstance(model, Model) and not parameters[HEAD]:
        # It is said that there is one, which takes nothing.
        parameters[HEAD] = taken[HEAD] = 0
        return tuple(
            WeightPart("head (tied)" if part == HEAD else part, parameters[part], taken[part])
            for part in _ORDER
            if part in parameters
        )
    return tuple(
        WeightPart(part, parameters[part], taken[part]) for part in _ORDER if parameters[part]
    )


def parts_of(model: Model) -> dict[str, str]:
    """Part of each parameter of a program.

    A segment is of attention if a mixer reads what it writes, or if it reads what a mixer writes.
    """
    program = model.program
    given = {name for mixer in program.mixers for name in mixer.reads}
    made = {mixer.writes.name for mixer in program.mixers}
    found: dict[str, str] = {}
    for link, names in links_of(model):
        meets = not given.isdisjoint(link.writes) or not made.isdisjoint(link.reads)
        kinds = {model.table[name].kind for name in names}
        matrices = ATTENTION if meets else EXPERTS if "experts" in kinds else MLP
        for name in names:
            found.setdefault(name, _part(model.table[name].kind, matrices))
    for name, parameter in model.table.items():
        # The head is no call, and a mixer's weights are of attention.
        found.setdefault(name, _part(parameter.kind, ATTENTION))
    return found


def links_of(model: Model) -> Iterator[tuple[Link, list[str]]]:
    """The links of all calls of a program, with the parameters that each of them takes."""
    for call in model.program.calls:
        for link, weights in zip(call.chain.links, call.weights, strict=True):
            yield link, [name for name in _names(weights) if name in model.table]


def part_of_name(name: str) -> str:
    """Part of a parameter by its name, for models that are not programs."""
    lowered = name.lower()
    return next((part for word, part in _WORDS if word in lowered), OTHERS)


def _part(kind: str, matrices: str) -> str:
    return {
        "embedding": EMBEDDING,
        "head": HEAD,
        "classifier": HEAD,
        "vector": NORMS,
        "router": EXPERTS,
        "experts": EXPERTS,
    }.get(kind, matrices)


def _names(weights: Any) -> Iterator[str]:
    if isinstance(weights, str):
        yield weights
    elif isinstance(weights, tuple):
        for item in weights:
            yield from _names(item)
