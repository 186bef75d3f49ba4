"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: adapters that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from src.core.errors import InvalidRequestError, ModelLoadError
from src.http.protocol.adapters import AdapterBody, LoadAdapterRequest, UnloadAdapterRequest
from src.http.server.call import Call
from src.http.server.errors import PermissionDeniedError
from src.http.server.fields import RequestDecoder

_decode_load: Final = RequestDecoder(LoadAdapterRequest)
_decode_unload: Final = RequestDecoder(UnloadAdapterRequest)
_encode: Final = msgspec.json.Encoder().encode


async def load_adapter(call: Call) -> None:
    """Load an adapter from one of `lora.directories`; requests are served meanwhile."""
    request = _decode_load(call)
    engine = await call.server.ready_engine()
    roots = call.server.config.lora.directories
    path = await asyncio.to_thread(allowed_path, request.lora_path, roots)
    try:
        await engine.adapters.load(
            request.lora_name, str(path), replaces=bool(request.load_inplace)
        )
    except ModelLoadError as error:
        raise InvalidRequestError(str(error), param="lora_path") from None
    await call.answer(_encode(AdapterBody(lora_name=request.lora_name, status="loaded")))


async def unload_adapter(call: Call) -> None:
    """Refuse new requests for an adapter, wait for those that use it, and unload it."""
    request = _decode_unload(call)
    engine = await call.server.ready_engine()
    await engine.adapters.unload(request.lora_name)
    await call.answer(_encode(AdapterBody(lora_name=request.lora_name, status="unloaded")))


def allowed_path(given: str, roots: Sequence[str]) -> Path:
    """The directory that a client names, if it and its files are inside of one of ``roots``.

    A relative path begins in one of them. Links are followed first, so none leads out.

    Raises
    ------
    PermissionDeniedError
        It is outside, or no directory is configured.
    InvalidRequestError
        There is no such directory.
    """
    outside = PermissionDeniedError(
        "adapters may be loaded from lora.directories only" if roots else
        "lora.directories names no directory from which adapters may be loaded"
    )  # fmt: skip
    path = Path(given)
    if "\0" in given or ".." in path.parts:
        raise outside
    try:
        return _found(path, roots, outside)
    except (OSError, RuntimeError, UnicodeError) as error:
        # A name that is too long, links in a circle, characters that no file system has.
        raise InvalidRequestError("lora_path cannot be read", param="lora_path") from error


def _found(path: Path, roots: Sequence[str], outside: PermissionDeniedError) -> Path:
    is_allowed = False
    for root in (Path(each).expanduser() for each in roots):
        if path.is_absolute() and not path.is_relative_to(root):
            continue
        is_allowed = True
        inside = root.resolve()
        found = (root / path).resolve()
        files = [file.resolve() for file in (found, *_files(found))]
        if found.is_dir():
            if not all(file.is_relative_to(inside) for file in files):
                raise outside
            return found
    if not is_allowed:
        raise outside
    raise InvalidRequestError("lora_path names no directory", param="lora_path")


def _files(directory: Path) -> list[Path]:
    return [directory / name for name in ("adapter_config.json", "adapter_model.safetensors")]
