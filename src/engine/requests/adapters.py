"""The adapters that requests may name: loading, finding and unloading them by name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from src.core.adapter import Adapter
from src.core.config import MIB, LoraSection
from src.core.errors import ConflictError, InvalidRequestError, ModelLoadError, ModelNotFoundError

if TYPE_CHECKING:
    from src.models.adapters.reader import AdapterWeights

logger = logging.getLogger(__name__)

_MAX_NAME: Final = 256


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter that is loaded.

    Attributes
    ----------
    created
        When, in seconds since 1970.
    nbytes
        Bytes that it takes in host memory.
    users
        Requests that use it.
    unused
        Set while there are none.
    """

    adapter: Adapter
    created: int
    nbytes: int
    users: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)


class Adapters:
    """All loaded adapters. Use it on the event loop, except `load_now`.

    Parameters
    ----------
    read
        Reads a directory; ``None``: the model takes no adapters.
    hold, drop
        Give an adapter to the worker, and take it away, by its key.
    taken
        Names that no adapter may have: those of the model.
    """

    def __init__(
        self,
        section: LoraSection,
        read: Callable[[Path], AdapterWeights] | None,
        hold: Callable[[int, AdapterWeights], None],
        drop: Callable[[int], None],
        taken: Collection[str],
    ) -> None:
        self._section = section
        self._read = read
        self._hold, self._drop = hold, drop
        self._taken = frozenset(taken)
        self._keys = itertools.count(1)
        # By name. Those that are unloaded, or were replaced, and are still used are in `_leaving`.
        self._loaded: dict[str, LoadedAdapter] = {}
        self._leaving: set[LoadedAdapter] = set()
        # One is read at a time: reading takes memory.
        self._reading = asyncio.Lock()

    @property
    def loaded(self) -> dict[str, LoadedAdapter]:
        """The loaded adapters by name, for reading only."""
        return self._loaded

    def load_now(self, name: str, path: str) -> None:
        """Read an adapter before anything is served. Blocks.

        Raises
        ------
        ModelLoadError, InvalidRequestError
            With the reason.
        """
        self._check(name, replaces=False)
        self._add(name, path, *self._take_in(path))

    async def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Read an adapter in a thread; requests are served meanwhile.

        If it ``replaces`` one of the same name, requests that run go on with the former one. Once
        its file is being read, an adapter is loaded even if the caller is cancelled.

        Raises
        ------
        ModelLoadError
            It cannot be read, or does not fit the model or the memory for adapters.
        InvalidRequestError, ConflictError
            The name cannot be used, or is in use.
        ShuttingDownError
            The engine was closed meanwhile.
        """
        await self._reading.acquire()
        # A thread cannot be cancelled. So a caller who goes away must not let the next one read.
        loading = asyncio.ensure_future(self._load(name, path, replaces=replaces))
        loading.add_done_callback(self._end_reading)
        await asyncio.shield(loading)

    async def _load(self, name: str, path: str, *, replaces: bool) -> None:
        self._check(name, replaces=replaces)
        weights, nbytes = await asyncio.to_thread(self._take_in, path)
        # The former one may have been taken into use, or unloaded, meanwhile.
        self._require_place(name)
        former = self._loaded.get(name)
        self._add(name, path, weights, nbytes)
        if former is not None:
            self._leave(former)

    def _end_reading(self, loading: asyncio.Future[None]) -> None:
        self._reading.release()
        if not loading.cancelled():
            # Its caller may be gone, and an error that nobody has seen would be logged as a fault.
            loading.exception()

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter at once, and release it when no request uses it.

        Raises
        ------
        ModelNotFoundError
            No adapter of this name is loaded.
        """
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise ModelNotFoundError(f"no adapter `{name[:200]}` is loaded", param="lora_name")
        self._leave(adapter)
        await adapter.unused.wait()

    @contextlib.contextmanager
    def using(self, name: str | None) -> Iterator[Adapter | None]:
        """Keep an adapter while a request uses it; ``None`` is the model alone.

        Raises
        ------
        ModelNotFoundError
            No adapter of this name is loaded.
        """
        if name is None:
            yield None
            return
        used = self._loaded.get(name)
        if used is None:
            raise ModelNotFoundError(f"no adapter `{name[:200]}` is loaded", param="model")
        used.users += 1
        used.unused.clear()
        try:
            yield used.adapter
        finally:
            used.users -= 1
            if not used.users:
                used.unused.set()
                self._release_unused(used)

    def _check(self, name: str, *, replaces: bool) -> None:
        if self._read is None:
            raise InvalidRequestError(
                "this server has no slots for adapters: lora.slots sets their number",
                code="lora_disabled",
            )
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable() or name != name.strip():
            raise InvalidRequestError(
                f"an adapter's name has 1 to {_MAX_NAME} printable characters, got "
                f"{name[:_MAX_NAME]!r}",
                param="lora_name",
            )
        if name in self._taken:
            raise ConflictError(f"the model itself is called `{name}`", param="lora_name")
        if name in self._loaded and not replaces:
            raise ConflictError(
                f"an adapter `{name}` is loaded already; load_inplace replaces it",
                param="lora_name",
            )
        self._require_place(name)

    def _require_place(self, name: str) -> None:
        """Refuse one more adapter than may be loaded; replaced ones that are still used count."""
        former = self._loaded.get(name)
        leaves = former is not None and not former.users
        if len(self._every()) - leaves >= self._section.max_adapters:
            raise ModelLoadError(
                f"lora.max_adapters = {self._section.max_adapters} adapters are loaded, those that "
                "leave once their requests have ended among them"
            )

    def _every(self) -> list[LoadedAdapter]:
        return [*self._loaded.values(), *self._leaving]

    def _take_in(self, path: str) -> tuple[AdapterWeights, int]:
        assert self._read is not None
        weights = self._read(Path(path))
        nbytes, most = weights.nbytes, self._section.host_memory_bytes
        held = sum(each.nbytes for each in self._every())
        if held + nbytes > most:
            raise ModelLoadError(
                f"the adapter takes {nbytes / MIB:.1f} MiB and {held / MIB:.1f} MiB are taken, of "
                f"lora.host_memory_bytes = {most / MIB:.1f} MiB"
            )
        return weights, nbytes

    def _add(self, name: str, path: str, weights: AdapterWeights, nbytes: int) -> None:
        adapter = Adapter(next(self._keys), name, weights.digest)
        self._hold(adapter.key, weights)
        loaded = LoadedAdapter(adapter, int(time.time()), nbytes)
        loaded.unused.set()
        self._loaded[name] = loaded
        logger.info("adapter %s: rank %d, %.1f MiB, %s", name, weights.rank, nbytes / MIB, path)

    def _leave(self, adapter: LoadedAdapter) -> None:
        self._leaving.add(adapter)
        self._release_unused(adapter)

    def _release_unused(self, adapter: LoadedAdapter) -> None:
        if adapter in self._leaving and not adapter.users:
            self._leaving.discard(adapter)
            self._drop(adapter.adapter.key)
