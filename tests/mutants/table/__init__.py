"""All mutations that `nox -s mutants` tries, by what they are of."""

from tests.mutants.mutation import Mutation
from tests.mutants.table import (
    answers,
    browsers,
    calls,
    files,
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

TABLES = (
    answers,
    browsers,
    calls,
    files,
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
    mutation for module in TABLES for mutation in module.MUTATIONS
)
