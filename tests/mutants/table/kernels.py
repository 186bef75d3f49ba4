"""Of the compiled kernels; each is compiled anew, so they are few."""

from tests.mutants.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = ()
