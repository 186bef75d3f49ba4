"""Where a checkpoint's tensors of experts go."""

from __future__ import annotations

from typing import NamedTuple

from src.models.config import ExpertsConfig, Names, StackedExperts
from src.models.weights.parameters import Part, Placement, Transform
from src.models.weights.transforms import InHalves, InTurn, Transposed


class ExpertPlacements(NamedTuple):
    """Placements of gate and up [E, 2 I, H], of down [E, H, I], and of their biases, if any."""

    gate_up: list[Placement]
    down: list[Placement]
    gate_up_bias: list[Placement]
    down_bias: list[Placement]


def place_experts(config: ExpertsConfig, prefix: str, inner: int) -> ExpertPlacements:
    """Placements of a layer's experts.

    Parameters
    ----------
    config
        Of the experts.
    prefix
        What the names of the layer's tensors begin with.
    inner
        This rank's intermediate size.
    """
    if isinstance(config.names, StackedExperts):
        return _stacked(config, config.names, prefix, inner)
    if len(config.names) == 2:
        gate_up, down = (f"{prefix}{name}.weight" for name in config.names)
        return ExpertPlacements([Placement(gate_up, shard=1)], [Placement(down, shard=2)], [], [])
    return _apart(config.num_experts, config.names, prefix, inner)


def _apart(count: int, names: Names, prefix: str, inner: int) -> ExpertPlacements:
    placed = ExpertPlacements([], [], [], [])
    for expert in range(count):
        gate, up, last = (f"{prefix}{name.format(expert)}.weight" for name in names)
        placed.gate_up.append(Placement(gate, (expert, slice(0, inner)), 0))
        placed.gate_up.append(Placement(up, (expert, slice(inner, 2 * inner)), 0))
        placed.down.append(Placement(last, (expert,), 1))
    return placed


def _stacked(
    config: ExpertsConfig, names: StackedExperts, prefix: str, inner: int
) -> ExpertPlacements:
    """Each expert is read by itself, so that no more is in memory at a time.

    Ranks do not share these out: a rank's part of gates and ups is no slice of the tensor.
    """
    order = InHalves(2 * inner, 2 * inner) if names.interleaved else None
    turned = None if names.packing is not None else Transposed()
    gate_up, down = f"{prefix}{names.gate_up}", f"{prefix}{names.down}"

    def of_each(tensor: str, *transforms: Transform | None) -> list[Placement]:
        return [
            Placement(
                tensor,
                (expert,),
                transform=_in_turn(*transforms),
                part=Part(expert, config.num_experts),
                packing=names.packing,
            )
            for expert in range(config.num_experts)
        ]

    placed = ExpertPlacements(of_each(gate_up, turned, order), of_each(down, turned), [], [])
    if config.bias:
        along = InHalves(2 * inner, 2 * inner, dim=1) if names.interleaved else None
        placed.gate_up_bias.append(Placement(f"{gate_up}_bias", transform=along))
        placed.down_bias.append(Placement(f"{down}_bias"))
    return placed


def _in_turn(*transforms: Transform | None) -> Transform | None:
    given = tuple(transform for transform in transforms if transform is not None)
    return given[0] if len(given) == 1 else InTurn(given) if given else None
