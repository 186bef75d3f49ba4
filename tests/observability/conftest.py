"""An engine and an application whose spans stay in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette

from src.core.config import (
    CacheSection,
    CompileSection,
    Config,
    DeviceSection,
    ModelSection,
    ObservabilitySection,
    SchedulerSection,
)
from src.http import create_app
from src.observability.tracing import providers
from tests.support.checkpoints import make_checkpoint
from tests.support.compiling import compile_settings


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("traces") / "tiny",
        tokenizer=True,
        num_hidden_layers=2,
        max_position_embeddings=512,
    )


class Spans:
    """What has been exported so far."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def clear(self) -> None:
        self._exporter.clear()

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def wait(self, fits: Callable[[ReadableSpan], bool], seconds: float = 60.0) -> ReadableSpan:
        """The first span that fits, as soon as it has been exported."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for span in self.all():
                if fits(span):
                    return span
            time.sleep(0.02)
        raise AssertionError(f"no such span among {[span.name for span in self.all()]}")

    def root(self, name: str) -> ReadableSpan:
        """The request's span of this name."""
        return self.wait(lambda span: span.name == name)

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """In order of their start."""
        identity = parent.get_span_context()
        assert identity is not None
        found = [
            s for s in self.all() if s.parent is not None and s.parent.span_id == identity.span_id
        ]
        return sorted(found, key=lambda span: span.start_time or 0)


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def spans(patch: pytest.MonkeyPatch) -> Spans:
    """Tracing is on in this module, and exports to here."""
    exporter = InMemorySpanExporter()
    patch.setenv("OTEL_TRACES_EXPORTER", "console")
    patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    patch.setattr(providers, "span_exporters", lambda settings: [exporter])
    return Spans(exporter)


def traced_config(checkpoint: Path, **observability: object) -> Config:
    """Few blocks: two long requests at once cannot both keep their rows."""
    return Config(
        model=ModelSection(path=str(checkpoint), served_model_name=("tiny", "org/alias")),
        device=DeviceSection(type="cpu", num_threads=1),
        cache=CacheSection(block_size=16, num_blocks=24),
        scheduler=SchedulerSection(max_num_seqs=8, max_num_batched_tokens=32),
        compile=CompileSection(**compile_settings()),
        observability=ObservabilitySection(
            stats_interval=0,
            trace_steps=1.0,
            trace_token_events=2,
            trace_content_chars=20,
            **observability,  # type: ignore[arg-type]
        ),
    )


@pytest.fixture(scope="module")
async def app(checkpoint: Path, spans: Spans, anyio_backend: str) -> AsyncIterator[Starlette]:
    app = create_app(traced_config(checkpoint), owns_process=False)
    async with app.router.lifespan_context(app):
        # However long compilers take, where code is compiled first.
        await app.state.server._engine.wait_ready()
        yield app


@pytest.fixture
async def client(app: Starlette, spans: Spans) -> AsyncIterator[httpx.AsyncClient]:
    spans.clear()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=60
    ) as client:
        yield client
