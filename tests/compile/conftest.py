import pytest

from src.ops.build.kernels import ensure_built, kernel_library
from src.ops.runtime.kernel_library import KernelLibrary


@pytest.fixture(scope="session")
def library() -> KernelLibrary:
    """What calls compiled code, and is called by it."""
    ensure_built(wait=True)
    found = kernel_library()
    assert found is not None, "these tests need a C++ compiler"
    return found
