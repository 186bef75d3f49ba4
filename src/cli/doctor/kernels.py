"""Checks of torch, of the C++ compiler, of the CPU kernels and of the GPU.

Modules that import torch are imported inside the checks, because torch may be missing.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from src.cli.doctor.finding import Finding, short
from src.core.config import Config, SpeculationSection
from src.core.errors import ConfigError, ModelLoadError, SlipstreamError
from src.core.memory_report import size

if TYPE_CHECKING:
    from src.models import ServedModel
    from src.ops.build.installation import LevelState

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_INSTALL_COMPILER: Final = "apt-get install g++   (or set CXX to a C++ compiler)"
_BUILD: Final = "python -m src.ops.build"


def torch() -> Iterator[Finding]:
    """Which build of torch is installed, and whether it fits the machine."""
    try:
        from src.ops.build.installation import torch_build
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != "torch":
            raise
        yield Finding("torch", "broken", "torch is missing", "python -m pip install torch")
        return
    build = torch_build()
    kind = "for the CPU alone" if build.cuda is None else f"for CUDA {build.cuda}"
    text = f"torch {build.version}, built {kind}"
    if build.cuda is None and _DRIVER.exists():
        yield Finding(
            "torch",
            "slow",
            f"{text}, but this machine has an NVIDIA GPU, which is not used",
            "python -m pip install --force-reinstall torch",
        )
    else:
        yield Finding("torch", "good", text)


def compiler() -> Iterator[Finding]:
    """The C++ compiler that builds kernels and model code."""
    from src.ops.build.cpp_compiler import cpp_compiler

    found = cpp_compiler()
    if found is None:
        text = "there is no C++ compiler: kernels are torch's, several times slower, and no model"
        yield Finding("compiler", "slow", f"{text} is compiled on the CPU", _INSTALL_COMPILER)
    else:
        command, version = found
        yield Finding("compiler", "good", f"{' '.join(command)}: {version}")


def cpu_kernels() -> Iterator[Finding]:
    """The kernels by instruction level. Builds them if the cache has none, as a start would."""
    from src.ops.build import ways
    from src.ops.build.cache_root import cache_root
    from src.ops.build.installation import level_states
    from src.ops.build.kernels import ensure_built, kernel_library
    from src.ops.build.level_check import KILLED, PASSED

    serving = ensure_built(wait=True).removeprefix("cpp-")
    if serving == "reference":
        text = "not built: torch's references serve on the CPU, several times slower"
        yield Finding("kernels", "slow", text, _BUILD)
        return
    states = level_states(serving)
    verdicts = {state.name: state.verdict for state in states if state.supported}
    own = verdicts.pop(serving, PASSED)
    text = f"{serving} serves; {_told(states)}"
    if own == KILLED:
        text = f"{text}: the machine is short of memory or time"
        yield Finding("kernels", "unchecked", text, "python -m src doctor   (when it is less busy)")
    elif own != PASSED:
        again = f"rm -r {short(cache_root() / 'cpu-kernels')} && {_BUILD}"
        yield Finding("kernels", "broken", f"{text}: answers are wrong", again)
    elif set(verdicts.values()) - {None, PASSED}:
        text = f"{text}: a level is not used, since it failed"
        yield Finding("kernels", "slow", text, f"install a newer compiler, then {_BUILD}")
    else:
        yield Finding("kernels", "good", text)
    library = kernel_library()
    if library is not None and (lines := ways.told(library.ways)):
        how = "measured to be the fastest here" if library.has_measured_ways else "not measured"
        yield Finding("quantized", "good", f"{how}: {'; '.join(lines)}")


def _told(states: list[LevelState]) -> str:
    """What is known of the levels, by what it is: `passed: avx2; not needed: portable`."""
    names: dict[str, list[str]] = {}
    for state in reversed(states):
        verdict = (state.verdict or "not needed") if state.supported else "not of this CPU"
        names.setdefault(verdict, []).append(state.name)
    # What was checked comes first.
    ordered = sorted(
        names, key=lambda verdict: (verdict == "not of this CPU", verdict == "not needed")
    )
    return "; ".join(f"{verdict}: {', '.join(names[verdict])}" for verdict in ordered)


def gpu() -> Iterator[Finding]:
    """GPUs, their driver, and what Triton needs to compile kernels for them."""
    from src.ops.build.installation import torch_build

    build = torch_build()
    if not build.gpus:
        if _DRIVER.exists() and build.cuda is not None:
            yield Finding(
                "gpu",
                "broken",
                f"there is a driver ({_driver()}), but torch for CUDA {build.cuda} sees no GPU",
                "nvidia-smi   (an old driver, or a container that was not given the GPU)",
            )
        else:
            yield Finding("gpu", "good", "none; the CPU computes")
        return
    for name, memory in build.gpus:
        yield Finding("gpu", "good", f"{name}, {size(memory)}, driver {_driver()}")
    yield from _triton()


def drafts(config: Config) -> Iterator[Finding]:
    """Who guesses next tokens on this device, and why nobody does."""
    from src.engine.drafters.loading import require_fields
    from src.engine.speculation.choice import Traits, choose_sources
    from src.ops.build.installation import torch_build

    method, kind = config.speculation.method, str(config.device.type)
    if kind == "auto":
        kind = "cuda" if torch_build().gpus else "cpu"
    model = _outlined(config)
    traits = Traits(kind) if model is None else Traits.of(config, model)._replace(device_type=kind)
    try:
        choice = choose_sources(config.speculation, traits)
        require_fields(config.speculation)
        if method == "mtp" and model is not None and not _may_predict(model):
            path = config.model.path
            raise ConfigError(f"{path} describes no layer that predicts further tokens")
        weights = _weights(config, fits=model is not None)
    # All of these end a start.
    except SlipstreamError as error:
        yield Finding("drafts", "broken", str(error), "--set speculation.method=auto")
        return
    text = str(choice) if method == "off" else f"{method}: {choice}"
    if choice.sources and model is None:
        # What the model says is known at a start.
        joins = "and windows" if kind == "cpu" else "or step inputs of their own"
        text += f"; not for models that do not generate, or with recurrent states {joins}"
    if choice.sources and method == "auto" and (model is None or _may_predict(model)):
        text += "; and mtp where the checkpoint brings a layer for it"
    if choice.sources and model is not None and traits.has_states:
        text += "; if memory has slots for recurrent states to spare (`plan` says)"
    yield Finding("drafts", "good", text + weights)


def _weights(config: Config, *, fits: bool) -> str:
    """What is to be said of a drafter's own weights; reads none, and fetches nothing.

    ``fits``: the model is here too, so that they can be compared.

    Raises
    ------
    SlipstreamError
        They are missing or damaged, or not made for the model.
    """
    from src.engine.drafters.loading import SOURCES, load_drafts, tokenizer_for
    from src.engine.sizing.planning import outline_of
    from src.models import resolve_model
    from src.models.hub import is_hub_id

    named = config.speculation.model
    if config.speculation.method not in SOURCES or (named is not None and is_hub_id(named)):
        return "" if named is None else f"; {named} is fetched at a start, and compared there"
    if fits:
        path = resolve_model(config.model.path, config.model.revision, weights=False)
        load_drafts(config, outline_of(config), tokenizer_for(config, path), outlines=True)
        return ""
    if named is None:
        return ""
    try:
        resolve_model(named, weights=False)
    except ModelLoadError as error:
        raise ConfigError(f"speculation.model: {error}") from error
    return f"; whether {named} fits the model is seen where that is"


def _outlined(config: Config) -> ServedModel | None:
    """The configured model, if it is on this machine and of a native family."""
    from src.engine.sizing.planning import outline_of

    if not Path(config.model.path).expanduser().exists():
        return None
    # What a drafter reads of it is asked later: what is wrong with that says nothing of the model.
    alone = msgspec.structs.replace(config, speculation=SpeculationSection(method="off"))
    try:
        return outline_of(alone)
    # What is wrong with it is another finding.
    except SlipstreamError:
        return None


def _may_predict(model: ServedModel) -> bool:
    """Whether its configuration describes a layer that predicts further tokens."""
    from src.models import Model

    return isinstance(model, Model) and model.config.predictor is not None


def _triton() -> Iterator[Finding]:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield Finding("gpu", "broken", "Triton needs a C compiler", "apt-get install gcc")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        text = "Triton needs Python's headers"
        yield Finding("gpu", "broken", text, "apt-get install python3-dev")


def _driver() -> str:
    try:
        words = _DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return "unknown"
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  date"
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
