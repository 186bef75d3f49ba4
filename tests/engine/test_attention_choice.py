"""Which kernels attend: `device.attention`, decided once when an engine starts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.config import DeviceSection
from src.core.errors import ConfigError
from src.core.start_timeline import StartTimeline
from src.engine import startup
from src.engine.execution import attention_choice as attention
from src.engine.execution.attention_choice import choose_attention
from src.models import Model, load_model
from src.ops import PAGED_ATTENTION, Kernel
from src.ops.attention_libraries import LIBRARIES, AttentionShape, LibraryUnavailableError
from tests.ops import flash_attention_stand_in as stand_in
from tests.ops.comparison import attention_matches
from tests.support.engines import small_config

BOTH = "flash_attention_3 (prefill), triton (decode)"


@pytest.fixture
def decoder(checkpoint: Path) -> Model:
    return load_model(checkpoint, dtype="bfloat16")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without any library at first."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    stand_in.pretend_hopper(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    yield
    PAGED_ATTENTION.uninstall_cuda()


def chosen(section: DeviceSection, decoder: Model) -> tuple[str, str]:
    """What the log says, and the name of the kernel that serves."""
    return choose_attention(section, decoder, 16), PAGED_ATTENTION.active("cuda").name


def test_without_a_library_triton_serves_and_the_log_says_why(
    decoder: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "src.engine.execution.attention_choice"):
        assert chosen(DeviceSection(), decoder) == ("triton", "triton")
    (line,) = caplog.messages
    assert line.startswith("attention: triton serves prefill and decode; flash_attention_3 is not")
    assert "; torch_varlen " in line


@pytest.mark.parametrize("setting", ["auto", "flash_attention_3"])
def test_a_library_that_is_there_and_able_serves_prefill(
    setting: Any,
    decoder: Model,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand_in.install(monkeypatch)
    with caplog.at_level(logging.INFO, "src.engine.execution.attention_choice"):
        section = DeviceSection(attention=setting)
        assert chosen(section, decoder) == (BOTH, "flash_attention_3")
    assert caplog.messages == ["attention: flash_attention_3 serves prefill, triton decode"]
    args = PAGED_ATTENTION.build("cpu", dtype=torch.bfloat16)
    attention_matches(PAGED_ATTENTION.active("cuda").run, args)
    # The next engine's choice is the process's.
    assert chosen(DeviceSection(attention="triton"), decoder) == ("triton", "triton")


def test_the_model_is_what_a_library_is_tried_on(
    decoder: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, set[AttentionShape]]] = []

    def second_is_able(name: str, device: torch.device, shapes: set[AttentionShape]) -> Kernel:
        tried.append((name, shapes))
        if len(tried) == 1:
            raise LibraryUnavailableError("fails")
        return Kernel(name, PAGED_ATTENTION.reference)

    monkeypatch.setattr(attention, "open_library", second_is_able)
    first, second = LIBRARIES
    assert chosen(DeviceSection(), decoder) == (f"{second} (prefill), triton (decode)", second)
    spec = decoder.spec
    shapes = {
        AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, 16, torch.bfloat16, window is not None
        )
        for window in spec.sliding_windows
    }
    assert tried == [(first, shapes), (second, shapes)]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_named_library_that_is_absent_or_unable_is_an_error(
    name: Any, decoder: Model, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = DeviceSection(attention=name)
    with pytest.raises(ConfigError, match=rf"device\.attention = '{name}': {name} "):
        choose_attention(section, decoder, 16)
    stand_in.install(monkeypatch)
    with pytest.raises(ConfigError, match=r"the model is in float32"):
        choose_attention(section, load_model(checkpoint, dtype="float32"), 16)


def test_triton_by_name_has_to_be_installed(
    decoder: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "src.ops.triton.paged_attention")
    with pytest.raises(ConfigError, match=r"device\.attention = 'triton': it is not installed"):
        choose_attention(DeviceSection(attention="triton"), decoder, 16)
    PAGED_ATTENTION.uninstall_cuda()
    assert chosen(DeviceSection(), decoder) == ("reference", "reference")


@pytest.mark.parametrize("name", ["triton", *LIBRARIES])
def test_on_a_cpu_there_is_nothing_to_choose(name: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=rf"device\.attention = '{name}' is for a GPU.* cpu"):
        startup.build_engine(
            small_config(checkpoint, device__attention=name), lambda *_: None, StartTimeline()
        )
