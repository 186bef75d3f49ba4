"""All mutations that `nox -s mutants` tries, by what they are of: those of every module here."""

import importlib
import pkgutil

from tests.mutants.mutation import Mutation

_MODULES = sorted(module.name for module in pkgutil.iter_modules(__path__))

MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation
    for name in _MODULES
    for mutation in importlib.import_module(f"{__name__}.{name}").MUTATIONS
)
