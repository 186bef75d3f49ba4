"""Flags of the C++ compiler in tests."""

import os

_VARIABLE = "SLIPSTREAM_KERNEL_FLAGS"
_FLAG = "-Werror"


def refuse_warnings() -> None:
    """Make warnings about kernels errors, in this process and its children.

    Whoever fills the cache that tests use must do that: its key does not tell whether it was done,
    and a kernel that is found there is not compiled again.
    """
    given = os.environ.get(_VARIABLE, "")
    if _FLAG not in given.split():
        os.environ[_VARIABLE] = f"{given} {_FLAG}".strip()
