"""The captured steps of one engine: captures shapes in order, and finds the graph for a plan."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from src.compile.graphs import CaptureBackend, GraphShape, PaddingLadder
from src.core.collector import frozen_collector
from src.core.plan import StepPlan
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs.decode import DecodeCapture, DecodeGraph
from src.engine.execution.graphs.mixed import MixedCapture, MixedGraph
from src.engine.execution.inputs import is_decode
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler

logger = logging.getLogger(__name__)


class MovedError(AssertionError):
    """A tensor whose address is recorded in graphs was replaced."""


@dataclass
class GraphStats:
    """Counters since the start, written by the device thread.

    Attributes
    ----------
    steps
        Steps by kind of graph: ``decode``, ``mixed``, or ``none`` if no graph fitted.
    tokens, padding_tokens
        Tokens of requests and tokens of padding that were computed in graphs.
    captured
        Captured shapes by kind.
    capture_seconds, bytes
        Seconds and device bytes that captures took.
    """

    steps: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    padding_tokens: int = 0
    captured: Counter[str] = field(default_factory=Counter)
    capture_seconds: float = 0.0
    bytes: int = 0


class GraphPool:
    """Captured steps by shape. Use it on the device thread only, except ``stats``.

    Parameters
    ----------
    code
        The code that is captured. Other code needs another pool.
    """

    def __init__(
        self,
        backend: CaptureBackend,
        ladder: PaddingLadder,
        forward: ForwardPass,
        code: Code,
        rows: RowState,
        sampler: Sampler,
    ) -> None:
        self.stats = GraphStats()
        self.ladder = ladder
        self._backend = backend
        self._forward = forward
        self._rows = rows
        self._sampler = sampler
        self._decode = DecodeCapture(backend, forward, code, rows, sampler, ladder.max_rows)
        self._mixed = MixedCapture(backend, forward, code, rows, ladder.max_mixed_tokens)
        self._graphs: dict[GraphShape, DecodeGraph | MixedGraph] = {}
        self._pending = ladder.shapes
        self._addresses = self._addresses_now() if backend.asserts else {}

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to capture."""
        return not self._pending

    def capture_first(self) -> None:
        """Capture the decode shapes of small batches, which do not wait for an idle time."""
        with frozen_collector():
            self._capture_all(self.ladder.first)

    def capture_all(self) -> None:
        """Capture all remaining shapes."""
        with frozen_collector():
            self._capture_all(list(self._pending))

    def capture_next(self) -> None:
        """Capture the largest remaining shape."""
        with frozen_collector(collect=self.stats.captured.total() == 0):
            self._capture_all(self._pending[:1])

    def capture(self, shape: GraphShape) -> DecodeGraph | MixedGraph:
        """Capture one shape and return it; the caller keeps it."""
        capture = self._decode.capture if shape.kind == "decode" else self._mixed.capture
        return capture(shape.num_tokens, adapts=shape.adapts)

    def find(self, plan: StepPlan) -> DecodeGraph | MixedGraph | None:
        """Find the graph for a step, and count it; ``None`` if no captured graph fits."""
        num_tokens, adapts = plan.num_tokens, self._rows.uses_adapters(plan)
        for shape in self.ladder.candidates(num_tokens, decodes=is_decode(plan), adapts=adapts):
            graph = self._graphs.get(shape)
            if graph is not None:
                self.stats.steps[shape.kind] += 1
                self.stats.tokens += num_tokens
                self.stats.padding_tokens += shape.num_tokens - num_tokens
                if self._backend.asserts:
                    self._assert_nothing_moved()
                return graph
        self.stats.steps["none"] += 1
        return None

    def _capture_all(self, shapes: Iterable[GraphShape]) -> None:
        stats, started = self.stats, time.monotonic()
        free = self._backend.free_bytes()
        try:
            for shape in shapes:
                self._pending.remove(shape)
                self._graphs[shape] = self.capture(shape)
                stats.captured[shape.kind] += 1
        except Exception:
            # The error may come again. So no more shapes are captured; the captured ones are used.
            logger.exception("a step could not be captured: no more are")
            self._backend.abandon()
            self._pending.clear()
        stats.bytes += max(0, free - self._backend.free_bytes())
        stats.capture_seconds += time.monotonic() - started
        if self.is_complete:
            logger.info(
                "captured %d decode and %d mixed shapes in %.1f s, %.0f MiB",
                stats.captured["decode"],
                stats.captured["mixed"],
                stats.capture_seconds,
                stats.bytes / 2**20,
            )

    def _assert_nothing_moved(self) -> None:
        now = self._addresses_now()
        moved = [name for name, address in self._addresses.items() if now[name] != address]
        if moved:
            raise MovedError(f"moved since the first capture: {', '.join(moved)}")

    def _addresses_now(self) -> dict[str, int]:
        cache, (floats, ints) = self._forward.kv_cache, self._sampler.state.tables
        named: dict[str, Tensor] = {
            "tokens": self._rows.tokens,
            "block_tables": self._rows.block_tables,
            "adapter_slots": self._rows.adapter_slots,
            "sampling.floats": floats,
            "sampling.ints": ints,
            "decode.buffer": self._decode.buffer,
            "mixed.buffer": self._mixed.buffer,
            "mixed.mixed": self._mixed.mixed,
        }
        named |= cache.named()
        named |= self._forward.model.buffers() | self._forward.model.parameters()
        adapters = self._forward.model.adapters
        named |= {} if adapters is None else adapters.tensors
        return {name: tensor.data_ptr() for name, tensor in named.items()}
