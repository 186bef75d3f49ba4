"""Kept kernels: launched without Triton where it would choose the same one, and only there."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel for this platform")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from src.ops import launching_triton as launching
from src.ops.attention import paged_attention_triton as paged_attention
from src.ops.attention import paged_decode_triton as paged_decode
from src.ops.attention import rotate_and_cache_triton as rotate_and_cache
from src.ops.launching_triton import ceil_div, launcher, next_power_of_2


class OnDevice(torch.Tensor):
    """Memory of the host that says it is a GPU's."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


class Compiled(CompiledKernel):
    """What Triton would have compiled: it notes its launches."""

    packed_metadata = (4, 1, 0)
    module = None

    def __init__(self, variant: Any, launches: list[Any]) -> None:
        self.variant = variant
        self.function = len(launches) + 1
        self._launches = launches

    @property
    def run(self) -> Any:
        def run(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            assert rest[:4] == (self.packed_metadata, None, None, None)
            self._launches.append((self.variant, (x, y, z), stream, rest[4:]))

        return run


class Triton:
    """Binds arguments as Triton does, without a GPU.

    Attributes
    ----------
    launches
        (variant, grid, stream, arguments) of launches that Triton did not see.
    calls
        How many it saw.
    """

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.calls = 0
        self.device, self.stream = 0, 77
        self.gives: type[Any] = Compiled
        self._binders: dict[JITFunction, Any] = {}
        self._backend = make_backend(GPUTarget("cuda", 90, 32))

    def variant(self, kernel: Any, *args: Any, **named: Any) -> Any:
        """What decides which compiled kernel Triton launches."""
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(
                kernel.signature, kernel.params, self._backend
            )
        _, classes, options = self._binders[kernel](*args, **named)
        return self.device, tuple(classes), str(options)

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        self.calls += 1
        return self.gives(self.variant(kernel, *args, **named), self.launches)


@pytest.fixture
def triton_without_gpu(monkeypatch: pytest.MonkeyPatch) -> Triton:
    found = Triton()
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *args, **named: found.run(kernel, *args, **named)
    )
    monkeypatch.setattr(
        launching, "_current", lambda: (lambda: found.device, lambda device: found.stream)
    )
    return found


@triton.jit(do_not_specialize=["free", "anywhere"])
def _kernel(where, anywhere, optional, size, free, scale, WIDTH: triton.language.constexpr):
    pass


@triton.jit(do_not_specialize_on_alignment=["where"])
def _of_any_alignment(where, WIDTH: triton.language.constexpr):
    pass


def floats(begin: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[begin:].as_subclass(OnDevice)


# Values of one argument, each of which Triton may tell apart from another.
VALUES: dict[str, list[Any]] = {
    "where": [floats(), floats(1), floats(4), floats(0, torch.bfloat16), floats(8, torch.bfloat16)],
    "anywhere": [floats(), floats(1), floats(0, torch.int32)],
    "optional": [None, floats(), floats(3), floats(0, torch.int64)],
    "size": [1, 2, 3, 16, 17, 32, 0, -1, True, 2**31 - 1, 2**31, 2**31 + 16, 1.0, 16.0],
    "free": [1, 2, 16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, 1.5],
    "scale": [0.5, 1.0, 2],
    "WIDTH": [8, 16],
}
OPTIONS = [{}, {"num_warps": 4}, {"num_warps": 8}, {"num_stages": 4}, {"enable_fp_fusion": False}]


def test_the_kernel_that_serves_is_the_one_that_triton_would_choose(
    triton_without_gpu: Triton,
) -> None:
    launch, chance, found = launcher(_kernel), random.Random(0), triton_without_gpu
    first = {name: values[0] for name, values in VALUES.items()}
    given = dict(first)
    seen = set()
    for _ in range(4000):
        # Mostly one change from the launch before: neighbours in what a key could leave out.
        if chance.random() < 0.2:
            given = dict(first)
        name = chance.choice(list(VALUES))
        given[name] = chance.choice(VALUES[name])
        found.device = chance.choice((0, 0, 0, 1))
        options = chance.choice(OPTIONS)
        calls, launches = found.calls, len(found.launches)
        launch((3, 2), *given.values(), **options)
        wanted = found.variant(_kernel, *given.values(), **options)
        if found.calls > calls:
            assert len(found.launches) == launches
            seen.add(wanted)
            continue
        variant, grid, stream, args = found.launches[-1]
        assert variant == wanted
        assert wanted in seen
        assert (grid, stream) == ((3, 2, 1), 77)
        assert args == tuple(
            each.data_ptr() if isinstance(each, torch.Tensor) else each for each in given.values()
        )
    # Most launches had been seen before.
    assert len(found.launches) > 1000


@pytest.mark.parametrize("name", ["where", "anywhere", "free", "scale"])
def test_what_selects_no_variant_needs_no_triton(triton_without_gpu: Triton, name: str) -> None:
    """Another address of the same alignment, another number of what varies from step to step."""
    launch, found = launcher(_kernel), triton_without_gpu
    given = {name: values[0] for name, values in VALUES.items()}
    launch((1,), **given, num_warps=4)
    others = {"where": [floats(), floats(16)], "anywhere": [floats(5)], "free": [7, 16]}
    for other in others.get(name, [0.5]):
        launch((1,), **(given | {name: other}), num_warps=4)
    assert found.calls == 1
    assert len(found.launches) == len(others.get(name, [0.5]))


def test_alignment_that_triton_does_not_ask_for_selects_nothing(
    triton_without_gpu: Triton,
) -> None:
    launch = launcher(_of_any_alignment)
    launch((1,), floats(), WIDTH=8)
    launch((1,), floats(1), WIDTH=8)
    assert triton_without_gpu.calls == 1


def test_memory_of_the_host_is_shown_to_triton_each_time(triton_without_gpu: Triton) -> None:
    """It refuses it. A kernel would end the process's use of the device."""
    launch = launcher(_of_any_alignment)
    launch((1,), floats(), WIDTH=8)
    for _ in range(2):
        launch((1,), torch.zeros(4), WIDTH=8)
    assert triton_without_gpu.calls == 3
    assert not triton_without_gpu.launches


@pytest.mark.parametrize("when", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_launches(triton_without_gpu: Triton, when: str) -> None:
    launch, hook = launcher(_of_any_alignment), getattr(triton.knobs.runtime, when)
    launch((1,), floats(), WIDTH=8)

    def see(metadata: Any) -> None: ...

    hook.add(see)
    try:
        launch((1,), floats(), WIDTH=8)
    finally:
        hook.remove(see)
    assert triton_without_gpu.calls == 2
    launch((1,), floats(), WIDTH=8)
    assert triton_without_gpu.calls == 2


def test_what_is_no_compiled_kernel_is_not_kept(triton_without_gpu: Triton) -> None:
    """Such as a kernel that is being compiled elsewhere."""
    launch, found = launcher(_of_any_alignment), triton_without_gpu
    found.gives = lambda variant, launches: SimpleNamespace(result=None)  # type: ignore[assignment]
    launch((1,), floats(), WIDTH=8)
    launch((1,), floats(), WIDTH=8)
    assert found.calls == 2


def test_ever_new_values_take_no_ever_growing_memory(triton_without_gpu: Triton) -> None:
    launch = launcher(_of_any_alignment)
    for width in range(launching._MOST_KEPT + 2):
        launch((1,), floats(), WIDTH=width)
    # What was kept at the beginning is gone, what came last is there.
    calls = triton_without_gpu.calls
    launch((1,), floats(), WIDTH=width)
    assert triton_without_gpu.calls == calls
    launch((1,), floats(), WIDTH=0)
    assert triton_without_gpu.calls == calls + 1


@pytest.mark.parametrize(
    "module", [paged_attention, paged_decode, rotate_and_cache], ids=lambda each: each.__name__
)
def test_numbers_that_vary_from_step_to_step_select_nothing(module: Any) -> None:
    """A launcher keeps a variant per value of other numbers."""
    varying = {"rows", "table_stride"}
    for name, kernel in vars(module).items():
        if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
            specialized = {each.name for each in kernel.params if not each.do_not_specialize}
            assert not specialized & varying


@pytest.mark.parametrize("number", [1, 2, 3, 15, 16, 17, 100, 1 << 20])
def test_sizes_are_rounded_up(number: int) -> None:
    assert next_power_of_2(number) == triton.next_power_of_2(number)
    for by in (1, 3, 16):
        assert ceil_div(number, by) == triton.cdiv(number, by)
