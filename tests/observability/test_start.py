"""A start as a timeline: one table in the log, a trace and metrics, which tell the same."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from src.compile import CompilationClosedError, CompilationError
from src.core.config import CompileSection, Config
from src.core.errors import ModelLoadError
from src.engine import startup
from src.engine.client import AsyncEngine
from src.engine.execution import compilation
from src.models import Implementation
from src.observability.tracing import providers
from tests.observability.conftest import traced_config

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

FOLLOWING = ["importing", "configuration", "weights", "kv_cache"]
# Compilation begins while the configuration is being read.
COMPILED = ["importing", "configuration", "compile", "weights", "kv_cache", "ready"]
TOOK = "slipstream_startup_phase_seconds"
BEGAN = "slipstream_startup_phase_began_seconds"


class Compiler:
    """In the place of one: what it makes is there once ``done`` is set, or it fails."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def load(self, *arguments: Any) -> None:
        assert self.done.wait(60)
        if self.error is not None:
            raise self.error


class Jobs:
    """In the place of a compilation in other processes."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(compilation, "Compilation", Jobs)
    monkeypatch.setattr(compilation.ProgramCompilation, "_load", compiler.load)
    # Closing does not wait for what a test has left.
    monkeypatch.setattr(Jobs, "close", lambda self: compiler.done.set())
    return compiler


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What was exported when the engine is closed."""
    memory = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setattr(providers, "span_exporters", lambda settings: [memory])
    return memory


def compiling(checkpoint: Path, mode: Literal["background", "wait"]) -> Config:
    return msgspec.structs.replace(traced_config(checkpoint), compile=CompileSection(startup=mode))


def tables(caplog: pytest.LogCaptureFixture) -> list[dict[str, tuple[float, str]]]:
    """Of each table in the log: per part when it began, and how long it is said to have taken."""
    found = []
    for record in caplog.records:
        lines = (record.stack_info or "").splitlines()
        if " ready in " in record.getMessage():
            assert record.levelno == logging.INFO
            assert record.name == "src.engine.telemetry.start_observer"
            rows = [line.split(maxsplit=2) for line in lines[1:]]
            found.append({name: (float(began), rest) for name, began, rest in rows})
    return found


def said(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(what in record.getMessage() for record in caplog.records)


def value(engine: AsyncEngine, name: str, phase: str) -> float | None:
    seconds: float | None = engine.metrics.registry.get_sample_value(name, {"phase": phase})
    return seconds


async def took(engine: AsyncEngine, phase: str) -> float:
    """As soon as it is known."""
    async with asyncio.timeout(30):
        while (seconds := value(engine, TOOK, phase)) is None:
            await asyncio.sleep(0.01)
    return seconds


def edges(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def trace_of(memory: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
    """The start's span, and those below it, each of which is there once."""
    spans = memory.get_finished_spans()
    (root,) = [span for span in spans if span.name == "startup"]
    identity = root.get_span_context()
    assert identity is not None
    below = [s for s in spans if s.parent is not None and s.parent.span_id == identity.span_id]
    parts = {span.name: span for span in below}
    assert len(parts) == len(below)
    return root, parts


async def test_a_start_that_waits_for_the_compiler(
    checkpoint: Path,
    compiler: Compiler,
    memory: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler.done.set()
    with caplog.at_level(logging.INFO, "src"):
        async with AsyncEngine.open(compiling(checkpoint, "wait")) as engine:
            (table,) = tables(caplog)
            assert list(table) == COMPILED
            moments = [began for began, _ in table.values()]
            assert moments == sorted(moments)
            assert moments[0] == 0
            for phase, (began, rest) in table.items():
                assert value(engine, BEGAN, phase) == pytest.approx(began, abs=0.006)
                if phase != "ready":
                    seconds, bar = rest.split()
                    assert value(engine, TOOK, phase) == pytest.approx(float(seconds), abs=0.006)
                    assert set(bar) == {"#"}
            assert value(engine, TOOK, "ready") is None
            known = {phase: value(engine, TOOK, phase) for phase in COMPILED[:-1]}
    assert len(tables(caplog)) == said(caplog, "compiled in") == 1
    root, parts = trace_of(memory)
    assert parts.keys() == known.keys()
    began, ended = edges(root)
    for name, span in parts.items():
        start, end = edges(span)
        assert began <= start <= end <= ended, name
        assert (end - start) / 1e9 == pytest.approx(known[name], abs=1e-5), name
    # From before weights are read until code is there, when everything else is.
    compiled = edges(parts["compile"])
    assert edges(parts["configuration"])[0] <= compiled[0] < edges(parts["weights"])[0]
    assert edges(parts["kv_cache"])[1] <= compiled[1]


async def test_a_compiler_in_the_background_is_told_of_when_its_code_serves(
    checkpoint: Path,
    compiler: Compiler,
    memory: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "src"):
        async with AsyncEngine.open(compiling(checkpoint, "background")) as engine:
            (table,) = tables(caplog)
            assert list(table) == COMPILED
            assert table["compile"][1].startswith("goes on")
            assert said(caplog, "compiled in") == 0
            assert value(engine, BEGAN, "compile") == pytest.approx(table["compile"][0], abs=0.006)
            assert value(engine, TOOK, "compile") is None
            await asyncio.sleep(0.2)
            compiler.done.set()
            seconds = await took(engine, "compile")
            ready, compiling_since = value(engine, BEGAN, "ready"), table["compile"][0]
            assert ready is not None
            assert seconds >= ready - compiling_since + 0.19
            assert said(caplog, "compiled in") == 1
    assert len(tables(caplog)) == 1
    root, parts = trace_of(memory)
    assert parts.keys() == {*FOLLOWING, "compile"}
    # The others fill the start.
    marks = [edges(root)[0], *(edges(parts[name])[1] for name in FOLLOWING)]
    assert marks == [*(edges(parts[name])[0] for name in FOLLOWING), edges(root)[1]]
    start, end = edges(parts["compile"])
    assert edges(parts["configuration"])[0] <= start < edges(parts["weights"])[0]
    assert end >= edges(root)[1] + 190_000_000
    assert (end - start) / 1e9 == pytest.approx(seconds, abs=1e-5)
    assert parts["compile"].status.is_unset


@pytest.mark.parametrize("error", [CompilationError("no compiler"), ZeroDivisionError()])
async def test_a_compiler_that_fails_in_the_background(
    error: Exception,
    checkpoint: Path,
    compiler: Compiler,
    memory: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "src"):
        async with AsyncEngine.open(compiling(checkpoint, "background")) as engine:
            compiler.error = error
            compiler.done.set()
            assert await took(engine, "compile") > 0
    assert len(tables(caplog)) == 1
    assert said(caplog, "compiled in") == 0
    root, parts = trace_of(memory)
    assert root.status.is_unset
    assert not parts["compile"].status.is_ok
    assert parts["compile"].attributes is not None
    assert parts["compile"].attributes["error.type"] == type(error).__name__


async def test_a_compiler_that_fails_while_it_is_waited_for(
    checkpoint: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.error = CompilationError("no compiler")
    compiler.done.set()
    with caplog.at_level(logging.INFO, "src"):
        async with AsyncEngine.open(compiling(checkpoint, "wait")):
            pass
    (table,) = tables(caplog)
    assert table["compile"][1].endswith("failed")
    assert not any(
        rest.endswith("failed") for phase, (_, rest) in table.items() if phase != "compile"
    )


async def test_closing_tells_of_no_compiler_that_had_not_ended(
    checkpoint: Path, compiler: Compiler, memory: InMemorySpanExporter
) -> None:
    compiler.error = CompilationClosedError("closed")
    async with AsyncEngine.open(compiling(checkpoint, "background")):
        pass
    _, parts = trace_of(memory)
    assert list(parts) == FOLLOWING


async def test_a_start_that_fails_is_a_trace_with_the_part_that_did(
    checkpoint: Path,
    compiler: Compiler,
    memory: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise ModelLoadError("no weights")

    refusing = Implementation("native", is_program=True, load=refuse)
    monkeypatch.setattr(startup, "choose_implementation", lambda *given: refusing)
    with caplog.at_level(logging.INFO, "src"), pytest.raises(ModelLoadError):
        async with AsyncEngine.open(compiling(checkpoint, "background")):
            pass
    assert tables(caplog) == []
    root, parts = trace_of(memory)
    assert list(parts) == ["importing", "configuration", "compile", "weights"]
    assert edges(parts["weights"])[1] == edges(parts["compile"])[1] == edges(root)[1]
    failed = [
        span.attributes["error.type"]
        for span in (root, *parts.values())
        if span.attributes is not None and "error.type" in span.attributes
    ]
    assert failed == ["ModelLoadError", "ModelLoadError"]
    assert "error.type" in (parts["weights"].attributes or {})
