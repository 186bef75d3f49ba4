"""All mutations that `nox -s mutants` tries, by what they are of."""

from tests.mutants.mutation import Mutation
from tests.mutants.table import (
    answers,
    grammar,
    http,
    kernels,
    loop,
    models,
    prefix_cache,
    prompts,
    sampling,
    scheduling,
    telemetry,
    text,
    weights,
)

MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation
    for module in (
        *(loop, scheduling, prefix_cache, sampling, text, answers, grammar, http, telemetry),
        *(prompts, models, weights, kernels),
    )
    for mutation in module.MUTATIONS
)
