"""Compiled code whose tensors are the kernel library's, not torch's.

Between its loops, code of AOTInductor calls torch by a C interface: for memory, for views of it,
for where it lies. With one token of a small model that takes longer than the loops, and a large
one has pushed torch's code out of the caches by then. The kernel library has the same functions for
tensors that are nothing but this (`src/ops/cpu/tensors.h`). Their names differ from torch's in a
prefix of the same length, so a library calls them once they are written over torch's.
"""

from __future__ import annotations

import re
from typing import Final

_THEIRS: Final = b"aoti_torch_"
_OURS: Final = b"slipstream_"
_ELF: Final = b"\x7fELF"
_CONSTANT: Final = "constants_info_["
_NAME: Final = re.compile(rb"(?<=\0)(?:aoti_)?torch_\w+(?=\0)")
# Of which none takes or makes a tensor.
_NEUTRAL: Final = re.compile(rb"aoti_torch_(?:check|(?:dtype|device_type|layout|grad_mode)_\w+)")
_OWN: Final = frozenset(
    _THEIRS + name.encode()
    for name in (
        "_reinterpret_tensor",
        "clone",
        "cpu_experts",
        "cpu_streamed_linear",
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


def with_own_tensors(library: bytes, source: str) -> bytes | None:
    """A shared library of compiled code, rewritten to call the kernel library for its tensors.

    None if it calls anything else of torch's, which would take them for its own; if it has
    constants, which are torch's tensors; or if it is in a format of which not every name ends in a
    zero byte (only ELF is known to).

    Parameters
    ----------
    source
        The code that calls the loops, which the library was made of.
    """
    if not library.startswith(_ELF) or _CONSTANT in source:
        return None
    names = {name for name in _NAME.findall(library) if not _NEUTRAL.fullmatch(name)}
    if not names <= _OWN:
        return None
    return _NAME.sub(lambda name: _renamed(name[0]), library)


def _renamed(name: bytes) -> bytes:
    return name.replace(_THEIRS, _OURS, 1) if name in _OWN else name
