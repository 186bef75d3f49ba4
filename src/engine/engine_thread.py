"""Runs an engine on its own event loop in its own thread, and makes sure that the thread ends.

It ends in three ways, and each releases everything in order: ``close``; ``stop``, which does not
wait and may be called anywhere, even from a garbage collector's finalizer; and the end of the
process. The thread is a daemon, because the interpreter waits for other threads *before* it calls
its ``atexit`` functions, so those could not stop it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from src.core.config import Config
from src.engine.client import AsyncEngine

T = TypeVar("T")


class EngineThread:
    """Runs one engine; the constructor returns when the model is ready.

    Raises
    ------
    ConfigError, ModelLoadError
        With one readable reason.
    """

    def __init__(self, config: Config | str | Path | None) -> None:
        # Reentrant: a finalizer may call `stop` wherever memory is allocated.
        self._lock = threading.RLock()
        self._stopping = False
        self._ready: Future[AsyncEngine] = Future()
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve(config))
        self._thread = threading.Thread(target=self._main, name="slipstream-llm", daemon=True)
        _running.add(self)
        self._thread.start()
        try:
            self.engine = self._ready.result()
        except BaseException:
            self.stop()
            raise
        # Registered again, so that it is called before torch's `atexit` functions.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def call(self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """Run a coroutine function on the engine's loop; an interrupted caller cancels it.

        Raises
        ------
        RuntimeError
            The engine was closed.
        """
        call = _Call(function(*arguments))
        future: Future[T] | None = None
        try:
            with self._lock:
                if self._stopping:
                    call.close()
                    raise RuntimeError("the engine was closed")
                future = asyncio.run_coroutine_threadsafe(call.run(), self._loop)
            return future.result()
        except BaseException:
            # For example Ctrl-C, perhaps before the future exists. Cancelling an ended call is
            # harmless.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call.cancel)
            raise
        finally:
            del future, call  # their exceptions refer to this frame

    def stop(self) -> None:
        """Begin to end; returns at once."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._loop.call_soon_threadsafe(self._serving.cancel)

    def close(self) -> None:
        """Abort all requests and release the model, its memory and the threads."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        helpers = _Helpers(thread_name_prefix="slipstream-llm")
        self._loop.set_default_executor(helpers)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)
        finally:
            # Waits for a helper that still loads a model; it releases the model itself.
            helpers.shutdown()
            with self._lock:
                self._stopping = True
                self._loop.close()
            _running.discard(self)

    async def _serve(self, config: Config | str | Path | None) -> None:
        try:
            async with AsyncEngine.open(config) as engine:
                self._ready.set_result(engine)
                del engine
                await asyncio.get_running_loop().create_future()  # until cancelled
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            # The engine is closed, so the remaining calls end too.
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*rest, return_exceptions=True)
            await asyncio.get_running_loop().shutdown_asyncgens()


class _Call(Generic[T]):
    """A coroutine that can be cancelled even before it runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    async def run(self) -> T:
        if self._cancelled:
            self.close()
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        try:
            return await self._coroutine
        finally:
            # A reference cycle otherwise: the task keeps its exception, whose frames refer to this.
            self._task = None

    def cancel(self) -> None:
        """Cancel it. Call this on the loop's thread."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Close the coroutine, which will never run."""
        self._coroutine.close()


class _Helpers(ThreadPoolExecutor):
    """A thread pool. At interpreter exit, when no thread can start, it runs calls inline."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            future: Future[T] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            return future


_running: set[EngineThread] = set()


def _close_all() -> None:
    for thread in list(_running):
        thread.close()


atexit.register(_close_all)
