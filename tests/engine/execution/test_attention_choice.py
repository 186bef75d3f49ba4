"""Which kernels attend: `device.attention`, decided once when an engine starts."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from src.core.config import DeviceSection
from src.core.errors import ConfigError
from src.core.plan import RowInstall, RowStep, StepPlan
from src.core.start_timeline import StartTimeline
from src.engine import startup
from src.engine.execution import attention_choice as attention
from src.engine.execution.attention_choice import choose_attention
from src.engine.execution.forward_pass import ForwardPass
from src.engine.execution.inputs import build_inputs
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.row_state import RowState
from src.models import Mixer, Model, load_model
from src.models.loading.options import LoadOptions
from src.ops import PAGED_ATTENTION
from src.ops.attention.backend import AttentionKernel
from src.ops.attention.libraries import LIBRARIES, AttentionShape, LibraryUnavailableError
from tests.ops import flash_attention_stand_in as stand_in
from tests.ops.comparison import attention_matches
from tests.support.engines import small_config

CPU = torch.device("cpu")
BOTH = "flash_attention_3 (prefill), triton (decode)"


@pytest.fixture
def decoder(checkpoint: Path) -> Model:
    return load_model(checkpoint, LoadOptions(dtype="bfloat16"))


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without any library at first."""
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    stand_in.pretend_hopper(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    # What served before this process knows as the Triton kernels: they are imported anew.
    kept, PAGED_ATTENTION._cuda = PAGED_ATTENTION._cuda, PAGED_ATTENTION._unresolved
    yield
    PAGED_ATTENTION._cuda = kept


def chosen(section: DeviceSection, decoder: Model) -> tuple[str, str]:
    """What the log says, and the name of the kernel that serves."""
    backend, described = choose_attention(section, decoder, 16)
    return described, backend.kernel.name


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
    backend, _ = choose_attention(section, decoder, 16)
    attention_matches(lambda *given: PAGED_ATTENTION.overload(*given, backend.handle), args)


def test_the_model_is_what_a_library_is_tried_on(
    decoder: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, set[AttentionShape]]] = []

    def second_is_able(
        name: str, device: torch.device, shapes: set[AttentionShape]
    ) -> AttentionKernel:
        tried.append((name, shapes))
        if len(tried) == 1:
            raise LibraryUnavailableError("fails")
        return AttentionKernel(name, PAGED_ATTENTION.reference)

    monkeypatch.setattr(attention, "open_library", second_is_able)
    first, second = LIBRARIES
    assert chosen(DeviceSection(), decoder) == (f"{second} (prefill), triton (decode)", second)
    shapes = {
        AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            16,
            torch.bfloat16,
            attention.features,
        )
        for spec, attention in (
            (mixer.spec, mixer.spec.attention(weights))
            for mixer, weights in zip(decoder.mixers, decoder.mixer_weights, strict=True)
        )
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
        choose_attention(section, load_model(checkpoint, LoadOptions(dtype="float32")), 16)


def test_triton_by_name_has_to_be_installed(
    decoder: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "src.ops.attention.paged_attention_triton")
    with pytest.raises(ConfigError, match=r"device\.attention = 'triton': it is not installed"):
        choose_attention(DeviceSection(attention="triton"), decoder, 16)
    PAGED_ATTENTION._cuda = PAGED_ATTENTION._unresolved
    assert chosen(DeviceSection(), decoder) == ("reference", "reference")


@pytest.mark.parametrize("name", ["triton", *LIBRARIES])
def test_on_a_cpu_there_is_nothing_to_choose(name: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=rf"device\.attention = '{name}' is for a GPU.* cpu"):
        startup.build_engine(
            small_config(checkpoint, device__attention=name), lambda *_: None, StartTimeline()
        )


def test_two_engines_of_a_process_keep_what_each_has_chosen(
    checkpoint: Path, reference_attention: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    decoder = load_model(checkpoint, LoadOptions(dtype="bfloat16"))
    counts = {"auto": 0, "triton": 0}

    def engine(setting: Any) -> ForwardPass:
        backend, _ = choose_attention(DeviceSection(attention=setting), decoder, 16)
        run = backend.kernel.run

        def counted(*args: Any) -> None:
            counts[setting] += 1
            run(*args)

        backend.kernel = replace(backend.kernel, run=counted)
        cache = allocate_kv_cache(decoder.kv_cache_spec(), KVCachePlan(16, 4, 0), CPU)
        return ForwardPass(decoder, cache, backend)

    passes = {setting: engine(setting) for setting in counts}
    by_name = {setting: p.attention.kernel.name for setting, p in passes.items() if p.attention}
    assert by_name == {"auto": "flash_attention_3", "triton": "triton"}
    rows = RowState(max_num_seqs=2, max_model_len=32, block_size=16, device=CPU)
    rows.install(RowInstall(0, 1, 0, [5, 6, 7, 8], 4, [[1]]))
    plan = StepPlan(1, [], [], [RowStep(0, 1, 0, 4, True)])
    hidden = {}
    for setting in ("auto", "triton", "auto"):
        with torch.inference_mode():
            hidden[setting] = passes[setting](build_inputs(plan, rows), decoder.functions)
    layers = len(decoder.program.mixers)
    assert counts == {"auto": 2 * layers, "triton": layers}
    torch.testing.assert_close(hidden["auto"], hidden["triton"], rtol=5e-2, atol=5e-2)
    # One that ends takes nothing from the other, and its handle serves nobody else.
    handle = passes.pop("triton").attention.handle  # type: ignore[union-attr]
    gc.collect()
    with torch.inference_mode():
        passes["auto"](build_inputs(plan, rows), decoder.functions)
    assert counts["auto"] == 3 * layers
    with pytest.raises(LookupError, match=f"backend {handle} is not there"):
        PAGED_ATTENTION.overload(*PAGED_ATTENTION.build("cpu"), handle)


def bounded(model: Model, every: int) -> int:
    """Have every so many layers bound their scores; returns of how many layers that is."""

    def changed(step: Any) -> Any:
        if not isinstance(step, Mixer) or step.layer % every:
            return step
        return replace(step, spec=replace(step.spec, cap=2.0))

    model.program.steps = tuple(map(changed, model.program.steps))
    return sum(mixer.spec.cap is not None for mixer in model.program.mixers)


def test_layers_that_a_library_does_not_honour_are_tritons(
    decoder: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = stand_in.pretend_hopper(monkeypatch)
    stand_in.install(monkeypatch)
    capped = bounded(decoder, 2)
    with caplog.at_level(logging.INFO, "src.engine.execution.attention_choice"):
        backend, described = choose_attention(DeviceSection(), decoder, 16)
    layers = len(decoder.program.mixers)
    assert f"prefill in {layers - capped} of {layers} layers" in caplog.messages[0]
    assert described.startswith("flash_attention_3 (prefill in ")
    for cap in (0, 2.0):
        base.prefill_calls = 0
        spec = decoder.program.mixers[0].spec
        args = PAGED_ATTENTION.build(
            "cpu",
            dtype=torch.bfloat16,
            cap=cap,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
        attention_matches(backend.kernel.run, args)
        assert base.prefill_calls == (0 if cap else 1)


def test_a_named_library_that_honours_no_layer_leaves_all_to_triton(
    decoder: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.install(monkeypatch)
    assert bounded(decoder, 1) == len(decoder.program.mixers)
    with caplog.at_level(logging.INFO, "src.engine.execution.attention_choice"):
        section = DeviceSection(attention="flash_attention_3")
        assert chosen(section, decoder) == ("triton", "triton")
    assert "flash_attention_3 does not do what becomes of the scores" in caplog.messages[0]
