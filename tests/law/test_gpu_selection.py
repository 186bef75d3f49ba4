"""What a run of the tests for a GPU relies on, where minutes on the device are few."""

from __future__ import annotations

import ast
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest
from tests.law.test_house import TESTS, ids, nodes_of
from tests.support import lost_device


def test_a_missing_package_of_files_stops_no_collection() -> None:
    """Modules take `gguf` from one place, which skips them where the package is missing."""
    found = {
        ids(path)
        for path, node in nodes_of(TESTS)
        if (isinstance(node, ast.Import) and any(a.name == "gguf" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "gguf")
    }
    assert not found


class Named:
    """A test with one mark, and with those that it is given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: list[pytest.MarkDecorator] = []

    def get_closest_marker(self, name: str) -> str | None:
        return name if name == self.name else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.given.append(marker)


@pytest.mark.parametrize("is_worker", [False, True])
def test_what_measures_the_device_is_left_out_beside_others(
    is_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if is_worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    left_out: list[Any] = []

    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config: Any = SimpleNamespace(getoption=lambda name: False, hook=hook)
    alone, other = Named("alone"), Named("gpu")
    items: list[Any] = [alone, other]
    conftest.pytest_collection_modifyitems(config, items)
    assert left_out == ([alone] if is_worker else [])
    assert items == ([other] if is_worker else [alone, other])


@pytest.mark.parametrize("has_device", [False, True])
def test_without_a_device_what_needs_one_is_skipped_with_the_reason(
    has_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    config: Any = SimpleNamespace(getoption=lambda name: False)
    of_gpu, other = Named("gpu"), Named("anyio")
    items: list[Any] = [of_gpu, other]
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    conftest.pytest_collection_modifyitems(config, items)
    (skip,) = of_gpu.given
    assert (skip.name, skip.args) == ("skipif", (not has_device,))
    assert skip.kwargs == {"reason": "there is no CUDA device"}
    assert other.given == []


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that is lost; returns the codes with which this process would have ended."""

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    codes: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_a_worker_whose_device_is_lost_ends(
    broken: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    lost_device.end_if_lost("tests/some.py::test")
    assert broken == [70]
    assert "the device is lost behind tests/some.py::test: CUDA error" in capfd.readouterr().err


def test_a_run_without_workers_ends_with_its_report(
    broken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with pytest.raises(pytest.exit.Exception, match=r"behind tests/some\.py::test") as ended:
        lost_device.end_if_lost("tests/some.py::test")
    assert ended.value.returncode == 70
    assert broken == []


def test_a_device_that_answers_ends_nothing(
    broken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    lost_device.end_if_lost("tests/some.py::test")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    lost_device.end_if_lost("tests/some.py::test")
    assert broken == []


def test_every_test_is_watched(request: pytest.FixtureRequest) -> None:
    assert "lost_device" in request.fixturenames
