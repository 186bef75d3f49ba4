"""An adapter comes to the device while steps are launched there, and waits for none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from src.models import load_model
from src.models.adapters.memory import AdapterRoom
from src.models.adapters.reader import read_adapter
from src.models.loading.options import LoadOptions
from tests.support.adapters import make_adapter

# A device that is not the host.
AWAY = torch.device("meta")


class Copies(TorchDispatchMode):
    """Remembers what was copied from the host to the device: source, place, whether it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device == AWAY:
            non_blocking = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
            self.seen.append((args[1], args[0], not non_blocking))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_copied_from_pinned_memory_alone(
    dtype: torch.dtype,
    checkpoint: Path,
    reference: torch.nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model(
        checkpoint, LoadOptions(device=torch.device("cpu"), adapters=AdapterRoom(2, 4))
    )
    assert model.adapters is not None
    path = make_adapter(tmp_path / "it", reference)
    weights = read_adapter(path, model.adapters.targets, max_rank=4, dtype=torch.float32)
    memory = model.adapters
    for name, tensor in memory.tensors.items():
        memory.tensors[name] = tensor.to(AWAY, dtype if tensor.is_floating_point() else None)
    pinned: list[Tensor] = []

    def pin_memory(self: Tensor) -> Tensor:
        pinned.append(self)
        return self

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    with Copies() as copies:
        memory.bring(1, 1, weights)
    # Ranks of every parameter, and two factors of each that the adapter has.
    assert len(copies.seen) == len(memory.targets.parts) + 2 * len(weights.updates)
    for source, place, waits in copies.seen:
        assert not waits
        assert any(source is each for each in pinned)
        assert source.dtype == place.dtype
        assert source.is_contiguous()
