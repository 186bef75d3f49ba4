"""The configured adapters at a start: room for them, and their loading."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from src.core.config import LoraSection
from src.core.errors import ConfigError, ConflictError, InvalidRequestError, ModelLoadError
from src.engine.execution.worker import Worker
from src.engine.requests.adapters import Adapters
from src.models import Implementation, ServedModel
from src.models.adapters.memory import AdapterRoom
from src.models.adapters.reader import read_adapter


def room_for_adapters(section: LoraSection, implementation: Implementation) -> AdapterRoom | None:
    """The slots that are configured; ``None``: no adapters are served.

    Raises
    ------
    ConfigError
        The model is of an implementation that takes no adapters.
    """
    room = AdapterRoom.of(section)
    if room is not None and not implementation.is_program:
        raise ConfigError(
            "lora: adapters are served with native families only, and transformers computes "
            "this model; leave [lora] out, or serve a checkpoint into which the adapter is merged"
        )
    return room


def load_adapters(
    section: LoraSection, model: ServedModel, worker: Worker, taken: Collection[str]
) -> Adapters:
    """The adapters that requests may name, the configured ones loaded. Blocks.

    Raises
    ------
    ModelLoadError
        The message names the adapter.
    """
    memory, read = model.adapters, None
    if memory is not None:
        read = partial(
            read_adapter,
            targets=memory.targets,
            max_rank=memory.room.rank,
            dtype=model.spec.dtype,
            pinned=model.spec.device.type == "cuda",
            base=memory.base,
        )
    adapters = Adapters(section, read, worker.hold_adapter, worker.drop_adapter, taken)
    for name, path in section.adapters.items():
        try:
            adapters.load_now(name, path)
        except (InvalidRequestError, ConflictError, ModelLoadError) as error:
            raise ModelLoadError(f"lora.adapters: {name[:200]}: {error}") from error
    return adapters
