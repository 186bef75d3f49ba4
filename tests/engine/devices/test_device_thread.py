"""The device thread does everything in turn, survives what fails, and ends whatever happens."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from src.core.settings import CHECKOUT
from src.engine.devices.device_thread import DeviceThread

SECONDS = 20

# Ends its main thread while the other one computes, with nobody to close it.
UNCLOSED = """
import time
from src.engine.devices.device_thread import DeviceThread

thread = DeviceThread(lambda: None)
thread.post(lambda: time.sleep(0.5))
thread.post(lambda: print("all done", flush=True))
"""


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    device_thread = DeviceThread(lambda: None)
    yield device_thread
    device_thread.close()


def test_begins_first_and_goes_on_in_turn() -> None:
    done: list[object] = []
    thread = DeviceThread(lambda: done.append(threading.current_thread().name))
    for number in range(100):
        thread.post(lambda number=number: done.append(number))
    thread.close()
    assert done == ["slipstream-device", *range(100)]


def test_knows_whether_a_step_is_next(thread: DeviceThread) -> None:
    hold, seen = threading.Event(), []

    def look() -> None:
        seen.append(thread.next_is_step)

    thread.post(lambda: hold.wait(SECONDS))
    thread.post(look)
    thread.post(look, is_step=True)
    thread.post(look)
    thread.post(lambda: None, is_step=True)
    hold.set()
    thread.close()
    assert seen == [True, False, True]


def test_a_call_has_an_outcome(thread: DeviceThread) -> None:
    assert thread.call(lambda: 3).result(SECONDS) == 3
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(SECONDS)
    # One that nobody wants any more is left out.
    hold = threading.Event()
    thread.post(lambda: hold.wait(SECONDS))
    done: list[int] = []
    unwanted, wanted = thread.call(lambda: done.append(1)), thread.call(lambda: done.append(2))
    assert unwanted.cancel()
    hold.set()
    wanted.result(SECONDS)
    assert done == [2]


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit])
def test_what_fails_is_told_and_stops_nobody(
    thread: DeviceThread, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("the reason")

    with caplog.at_level(logging.ERROR):
        thread.post(fail)
        assert thread.call(lambda: "next").result(SECONDS) == "next"
    assert "the reason" in caplog.text


def test_the_end_waits_for_what_was_given_before() -> None:
    thread, done = DeviceThread(lambda: None), list[int]()
    thread.post(lambda: time.sleep(0.2))
    thread.post(lambda: done.append(1))
    thread.close()
    assert done == [1]
    thread.close()
    with pytest.raises(RuntimeError, match="ended"):
        thread.post(lambda: None)
    with pytest.raises(RuntimeError, match="ended"):
        thread.call(lambda: None)


def test_nothing_is_kept_that_was_done(thread: DeviceThread) -> None:
    class Work:
        def __call__(self) -> None:
            pass

    work = Work()
    kept = weakref.ref(work)
    thread.post(work)
    del work
    thread.call(lambda: None).result(SECONDS)
    deadline = time.monotonic() + SECONDS
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert kept() is None


def test_one_that_nobody_knows_any_more_ends() -> None:
    thread = DeviceThread(lambda: None)
    running = thread._thread
    del thread
    gc.collect()
    running.join(SECONDS)
    assert not running.is_alive()


def test_the_interpreter_ends_after_what_is_computed() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", UNCLOSED],
        cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=SECONDS * 6,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "all done\n", "")
