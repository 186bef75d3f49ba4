"""Rewrites compiled code to use the kernel library's tensors instead of torch's.

Between its loops, code from AOTInductor calls torch through a C interface: for memory, views and
data pointers. With one token of a small model, these calls take longer than the loops; with a large
model, torch's code has left the CPU caches by then. The kernel library has the same functions for
minimal tensors (`src/ops/runtime/tensors.h`). Their names differ from torch's only in a prefix of
the same length, so overwriting torch's names in a library makes it call them.
"""

from __future__ import annotations

import re
from typing import Final

from src.ops.runtime.compiled_entries import CALLED, entry_name

_THEIRS: Final = b"aoti_torch_"
_OURS: Final = b"slipstream_"
_ELF: Final = b"\x7fELF"
_CONSTANT: Final = "constants_info_["
_NAME: Final = re.compile(rb"(?<=\0)(?:aoti_)?torch_\w+(?=\0)")
# Functions that neither take nor return a tensor.
_NEUTRAL: Final = re.compile(rb"aoti_torch_(?:check|(?:dtype|device_type|layout|grad_mode)_\w+)")
_OWN: Final = frozenset(
    _THEIRS + name.encode()
    for name in (
        "_reinterpret_tensor",
        "clone",
        *map(entry_name, CALLED),
        "create_tensor_from_blob",
        "create_tensor_from_blob_v2",
        "delete_tensor_object",
        "empty_strided",
        "get_data_ptr",
        "get_device_type",
        "get_dim",
        "get_dtype",
        "get_numel",
        "get_size",
        "get_sizes",
        "get_storage_offset",
        "get_storage_size",
        "get_stride",
        "get_strides",
        "new_tensor_handle",
    )
)


def with_library_tensors(library: bytes, source: str) -> bytes | None:
    """Rewrite a shared library of compiled code to use the kernel library's tensors.

    Returns None if the library uses any other function of torch, which would expect torch's
    tensors; if it has constants, which are torch's tensors; or if names in its file format may not
    end in a zero byte (only ELF is known to be safe).

    Parameters
    ----------
    source
        The generated code from which the library was compiled.
    """
    if not library.startswith(_ELF) or _CONSTANT in source:
        return None
    names = {name for name in _NAME.findall(library) if not _NEUTRAL.fullmatch(name)}
    if not names <= _OWN:
        return None
    return _NAME.sub(lambda name: _renamed(name[0]), library)


def _renamed(name: bytes) -> bytes:
    return name.replace(_THEIRS, _OURS, 1) if name in _OWN else name
