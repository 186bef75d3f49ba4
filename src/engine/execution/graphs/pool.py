"""The captured steps of one engine: captures shapes in order, and finds the graph for a plan."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from src.compile.graphs import CaptureBackend, GraphShape, PaddingLadder
from src.core.collector import frozen_collector
from src.core.plan import StepPlan
from src.engine.execution.drafted_inputs import Propose, has_bounds, only_decodes
from src.engine.execution.forward_pass import Code, ForwardPass
from src.engine.execution.graphs.decode import DecodeCapture, DecodeGraph
from src.engine.execution.graphs.mixed import MixedCapture, MixedGraph
from src.engine.execution.graphs.verify import VerifyCapture, VerifyGraph
from src.engine.execution.inputs import is_decode
from src.engine.execution.row_state import RowState
from src.engine.sampling import Sampler

logger = logging.getLogger(__name__)

AnyGraph = DecodeGraph | MixedGraph | VerifyGraph


class MovedError(AssertionError):
    """A tensor whose address is recorded in graphs was replaced."""


@dataclass
class GraphStats:
    """Counters since the start, written by the device thread.

    Attributes
    ----------
    steps
        Steps by kind of graph: ``decode``, ``verify``, ``mixed``, or ``none`` if no graph fitted.
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
    proposing
        See `VerifyCapture`; ``None``: no step has drafts.
    """

    def __init__(
        self,
        backend: CaptureBackend,
        ladder: PaddingLadder,
        forward: ForwardPass,
        code: Code,
        rows: RowState,
        sampler: Sampler,
        proposing: Callable[[int], Propose] | None = None,
    ) -> None:
        self.stats = GraphStats()
        self.ladder = ladder
        self._backend = backend
        self._forward = forward
        self._rows = rows
        self._sampler = sampler
        self._decode = DecodeCapture(backend, forward, code, rows, sampler, ladder.max_rows)
        self._mixed = MixedCapture(backend, forward, code, rows, ladder.max_mixed_tokens)
        self._verify = (
            None
            if proposing is None
            else VerifyCapture(backend, forward, code, rows, sampler, ladder.max_rows, proposing)
        )
        self._graphs: dict[GraphShape, AnyGraph] = {}
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

    def capture(self, shape: GraphShape) -> AnyGraph:
        """Capture one shape and return it; the caller keeps it."""
        if shape.kind == "verify":
            assert self._verify is not None, "the ladder has shapes with drafts, and nobody drafts"
            rows = shape.num_tokens // shape.width
            return self._verify.capture(rows, shape.width, adapts=shape.adapts)
        capture = self._decode.capture if shape.kind == "decode" else self._mixed.capture
        return capture(shape.num_tokens, adapts=shape.adapts)

    def find(self, plan: StepPlan) -> AnyGraph | None:
        """Find the graph for a step, and count it; ``None`` if no captured graph fits."""
        num_tokens = plan.num_tokens
        for shape in self._candidates(plan):
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

    def _candidates(self, plan: StepPlan) -> list[GraphShape]:
        """The shapes that can serve a plan, best first."""
        adapts = self._rows.uses_adapters(plan)
        if not has_bounds(plan):
            decodes = is_decode(plan)
            return self.ladder.candidates(plan.num_tokens, decodes=decodes, adapts=adapts)
        # Pieces between attention calls are launched with the rows' lengths: the host lacks them.
        if self._verify is None or not only_decodes(plan):
            return []
        width = max(step.num_tokens for step in plan.rows)
        shape = self.ladder.verifying(len(plan.rows), width, adapts=adapts)
        return [] if shape is None else [shape]

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
                "captured %d decode, %d verify and %d mixed shapes in %.1f s, %.0f MiB",
                stats.captured["decode"],
                stats.captured["verify"],
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
            "lengths": self._rows.lengths,
            "decode.buffer": self._decode.buffer,
            "mixed.buffer": self._mixed.buffer,
            "mixed.mixed": self._mixed.mixed,
        }
        if self._verify is not None:
            named["verify.buffer"] = self._verify.buffer
        named |= cache.named()
        named |= self._forward.model.buffers() | self._forward.model.parameters()
        adapters = self._forward.model.adapters
        named |= {} if adapters is None else adapters.tensors
        return {name: tensor.data_ptr() for name, tensor in named.items()}
