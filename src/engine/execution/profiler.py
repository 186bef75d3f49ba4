"""Runs torch's profiler around some steps, started and stopped on the device thread."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

# Limit of the gzipped trace, which is kept in memory.
MAX_TRACE_BYTES: Final = 64 * 1024 * 1024


class ProfileTooLargeError(RuntimeError):
    """The trace has more than ``MAX_TRACE_BYTES``."""


class OnDeviceThread(Protocol):
    """Runs a function on the device thread, between two steps."""

    def __call__(self, function: Callable[[], T]) -> Future[T]:
        """Queue ``function`` behind the launched steps."""


class StepProfiler:
    """One profile at a time: `start`, steps, `stop`, `export`.

    The profiler records the thread that starts it, so it starts and stops on the device thread.
    """

    def __init__(self, on_device_thread: OnDeviceThread) -> None:
        self._on_device_thread = on_device_thread
        self._profile: Any = None

    def start(self) -> Future[None]:
        """Record from the next step on."""
        return self._on_device_thread(self._start)

    def stop(self) -> Future[None]:
        """Stop recording behind the launched steps. Does nothing if none was started."""
        return self._on_device_thread(self._stop)

    def export(self) -> bytes:
        """The gzipped Chrome trace of what was recorded. Blocks.

        Raises
        ------
        ProfileTooLargeError
            It has more than ``MAX_TRACE_BYTES``.
        """
        recorded, self._profile = self._profile, None
        with tempfile.TemporaryDirectory(prefix="slipstream-profile-") as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            trace = gzip.compress(path.read_bytes(), compresslevel=3)
        if len(trace) > MAX_TRACE_BYTES:
            raise ProfileTooLargeError(f"{len(trace)} bytes, at most {MAX_TRACE_BYTES}")
        return trace

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        started = profile(activities=activities)
        started.start()
        self._profile = started

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
