"""Which modules of a checkpoint may have adapters, and where these go in fused parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from src.core.errors import ModelLoadError
from src.models.weights.parameters import Parameter, Placement
from src.models.weights.transforms import InHalves

# Why a module has no place for an adapter, by its parameter's kind.
_WITHOUT = {
    "embedding": "the embedding",
    "head": "the head",
    "experts": "an expert",
    "router": "a router",
    "latent": "the projection that latent attention absorbs",
    "vector": "no projection",
    "classifier": "the classifier's head",
}


def in_halves(parameter: Parameter) -> Parameter:
    """The same, of a checkpoint whose rows are in halves already, see `InHalves`."""
    placements = tuple(
        replace(each, transform=None) if isinstance(each.transform, InHalves) else each
        for each in parameter.placements
    )
    return replace(parameter, placements=placements)


@dataclass(frozen=True, slots=True)
class Target:
    """A module's place in a parameter.

    Attributes
    ----------
    part
        Its index among the parameter's parts.
    begin, end
        Its rows of the parameter.
    inputs
        Its number of inputs.
    placement
        Of its weight.
    """

    parameter: str
    part: int
    begin: int
    end: int
    inputs: int
    placement: Placement

    @property
    def outputs(self) -> int:
        """Its number of outputs."""
        return self.end - self.begin


class Targets:
    """The modules of a model's checkpoint that may have adapters, by name.

    Attributes
    ----------
    parts
        Name of each parameter that may have them -> its targets, by part.
    """

    def __init__(self, table: Mapping[str, Parameter]) -> None:
        self.parts: dict[str, tuple[Target, ...]] = {}
        self._by_module: dict[str, Target] = {}
        self._without: dict[str, str] = {}
        for parameter in table.values():
            if parameter.kind == "matrix" and all(map(_is_of_rows, parameter.placements)):
                self._add(parameter)
            else:
                for placement in parameter.placements:
                    what = _WITHOUT.get(parameter.kind, "stored in a form without rows")
                    self._without.setdefault(_module(placement.tensor), what)

    def _add(self, parameter: Parameter) -> None:
        rows, inputs = parameter.shape
        targets = []
        for part, placement in enumerate(parameter.placements):
            begin, end = 0, rows
            for index in placement.index:
                assert isinstance(index, slice)
                begin, end, _ = index.indices(rows)
            target = Target(parameter.name, part, begin, end, inputs, placement)
            targets.append(target)
            self._by_module[_module(placement.tensor)] = target
        self.parts[parameter.name] = tuple(targets)

    def find(self, module: str) -> Target:
        """The place of a module.

        Raises
        ------
        ModelLoadError
            The model has no such module, or it may have no adapter.
        """
        # An adapter of a model without its head lacks what names of the whole one begin with.
        whole = (module, *(f"{body}.{module}" for body in self._bodies))
        for name in whole:
            if (target := self._by_module.get(name)) is not None:
                return target
        reason = self._without.get(module)
        if reason is None:
            raise ModelLoadError(f"{module[:200]} is no module of this model")
        raise ModelLoadError(f"{module[:200]} is {reason}: adapters of it are not supported")

    @functools.cached_property
    def _bodies(self) -> tuple[str, ...]:
        """What names of modules begin with."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self._by_module))

    @property
    def num_modules(self) -> int:
        """How many modules may have adapters."""
        return len(self._by_module)

    def most_values(self, rank: int) -> int:
        """The most values of an adapter of this rank."""
        every = self._by_module.values()
        return sum(rank * (target.inputs + target.outputs) for target in every)


def _is_of_rows(placement: Placement) -> bool:
    """Whether a checkpoint stores the matrix as rows, plain or permuted."""
    is_whole = placement.part is None and placement.packing is None
    slices = [isinstance(index, slice) for index in placement.index]
    return is_whole and placement.tensor.endswith(".weight") and slices in ([], [True])


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]
