"""What tests see inside of an open engine. No other file of tests need know these private names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from src.engine.client import AsyncEngine
from src.engine.execution.code_host import CodeHost
from src.engine.execution.group_attention import GroupAttention
from src.engine.execution.kv_cache import KVCache
from src.engine.execution.row_owners import RowOwners
from src.engine.execution.row_state import RowState
from src.engine.execution.step_computer import StepComputer
from src.engine.execution.worker import Worker
from src.engine.loop import EngineLoop
from src.engine.startup import EngineParts

T = TypeVar("T")


class Probe:
    """The parts of an engine that has started, and those of its worker."""

    def __init__(self, engine: AsyncEngine) -> None:
        parts, loop = engine._parts, engine._loop
        assert parts is not None, "the engine has not started, or is closed"
        assert loop is not None
        self.parts: EngineParts = parts
        self.loop: EngineLoop = loop

    @property
    def worker(self) -> Worker:
        return self.parts.worker

    @property
    def code(self) -> CodeHost:
        """What gives the worker's steps their code; counts graphs."""
        return self.worker.code

    @property
    def computer(self) -> StepComputer:
        return self.worker._computer

    @property
    def model(self) -> Any:
        return self.worker._forward_pass.model

    @property
    def kv_cache(self) -> KVCache:
        return self.worker._forward_pass.kv_cache

    @property
    def rows(self) -> RowState:
        return self.worker._rows

    @property
    def row_owners(self) -> RowOwners:
        return self.worker._row_owners

    @property
    def num_grammars(self) -> int:
        """Grammars that the worker keeps."""
        return self.worker._grammars.num_held

    @property
    def owners(self) -> dict[int, GroupAttention]:
        """What owns groups of layers, by the group's number."""
        return self.worker._forward_pass.owners

    async def idle(self) -> None:
        """Until the step behind the last one that somebody heard of has gone too."""
        await asyncio.wait_for(self.loop.wait_idle(), 30)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the device thread, and wait for it."""
        return self.worker.call(function).result()
