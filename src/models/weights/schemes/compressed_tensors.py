"""Reads the sections of compressed-tensors: groups of modules, each with a scheme of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from src.models.weights.checkpoint_formats import CheckpointFormats, Scheme
from src.models.weights.methods import RoundedInputs
from src.models.weights.schemes.columns import Columns
from src.models.weights.schemes.float8 import Float8Packing, Float8Scheme
from src.models.weights.schemes.integers import IntegerPacking, IntegerScheme
from src.models.weights.schemes.layouts import PackedLayout, PlainLayout
from src.models.weights.schemes.names import ModuleNames, Section
from src.models.weights.schemes.nvfp4 import COMPRESSED_TENSORS, GROUP, Nvfp4Packing, Nvfp4Scheme
from src.models.weights.schemes.patterns import PREFIX, Allowance, Patterns

_NVFP4 = "nvfp4-pack-quantized"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", _NVFP4)
_LINEAR = "Linear"
_STATUSES = ("compressed", "frozen", "calibration", "initialized")


@dataclass(frozen=True)
class Group:
    """Modules with one scheme: a class of modules, names, or patterns.

    Without a scheme they are stored plainly, and with ``rounds`` their inputs are to be rounded.
    """

    scheme: Scheme | None
    has_all: bool
    names: frozenset[str]
    patterns: Patterns
    rounds: bool = False

    def names_module(self, module: str) -> bool:
        """Whether it names the module by itself, not as one of a class."""
        return module in self.names or self.patterns.match(module)


@dataclass(frozen=True)
class Groups:
    """See `checkpoint_formats.Schemes`. A group that names a module wins over one of its class."""

    groups: tuple[Group, ...]
    ignored: ModuleNames

    def of(self, module: str, *, is_head: bool) -> Scheme | None:
        """See `checkpoint_formats.Schemes`."""
        if module in self.ignored:
            return None
        # Groups that say nothing of weights or inputs, as those of the cache, are beside others.
        telling = [group for group in self.groups if group.scheme is not None or group.rounds]
        naming = (group for group in telling if group.names_module(module))
        found = next(naming, None) or next((g for g in telling if g.has_all), None)
        if found is None or not found.rounds:
            return None if found is None else found.scheme
        raise ValueError(f"config_groups rounds the inputs of {module}, but not its weights")


def read_compressed_tensors(given: Mapping[str, Any]) -> CheckpointFormats | None:
    """``quant_method: compressed-tensors``; None if no weights are quantized.

    What counts are the groups and formats of weights. How far the tool was when it saved the
    weights, and words about weights that are not sparse, say nothing that the tensors do not.
    """
    section = Section(given)
    sparsity = section.raw("sparsity_config")
    if sparsity is not None:
        Section(sparsity, "sparsity_config").among("format", choices=("dense",), default="dense")
    section.refuse("transform_config")
    section.among("quantization_status", choices=_STATUSES, default="compressed")
    cache = section.raw("kv_cache_scheme")
    _check_cache(cache)
    groups = section.raw("config_groups")
    if groups == {} and cache is not None:
        return None
    if not isinstance(groups, Mapping) or not groups:
        raise section.error("config_groups", "an object of groups")
    allowance, common = Allowance(), section.raw("format")
    read = [
        _group(Section(one, f"config_groups.{name}"), common, f"{name}", allowance)
        for name, one in groups.items()
    ]
    formats = sorted({each for _, each in read if each})
    if not formats:
        return None
    ignored = ModuleNames(section.strings("ignore"), allowance)
    schemes = Groups(tuple(group for group, _ in read), ignored)
    return CheckpointFormats("compressed-tensors " + " and ".join(formats), schemes)


def _check_cache(scheme: Any) -> None:
    if scheme is None:
        return
    section = Section(scheme, "kv_cache_scheme")
    section.among("num_bits", choices=(8,))
    section.among("type", choices=("float",))
    section.among("strategy", choices=("tensor",), default="tensor")
    section.among("symmetric", choices=(True,), default=True)


def _group(section: Section, common: Any, name: str, allowance: Allowance) -> tuple[Group, str]:
    targets = section.strings("targets")
    if not targets:
        raise section.error("targets", "a list of classes, names or patterns")
    patterns = Patterns((each for each in targets if each.startswith(PREFIX)), allowance)
    inputs, names = section.raw("input_activations"), frozenset(targets)
    if section.raw("weights") is None:
        # Of the cache alone, or of attention's inputs: no matrix is of such a group.
        if _LINEAR in targets and inputs is not None:
            raise section.error("weights", "an object, since input_activations are to be rounded")
        return Group(None, _LINEAR in targets, names, patterns, inputs is not None), ""
    form = section.raw("format") or common
    if form not in _FORMATS:
        raise ValueError(f"format must be one of {', '.join(_FORMATS)}, got {form!r}")
    section.refuse("output_activations")
    weights = Section(section.raw("weights"), f"{name}.weights")
    scheme, bits = _scheme(
        weights, None if inputs is None else Section(inputs, f"{name}.input_activations"), form
    )
    return Group(scheme, _LINEAR in targets, names, patterns), f"{form} ({bits})"


def _scheme(weights: Section, inputs: Section | None, form: str) -> tuple[Scheme, str]:
    kind = weights.among("type", choices=("int", "float"), default="int")
    weights.among("dynamic", choices=(False,), default=False)
    if form == _NVFP4:
        return _nvfp4(weights, inputs)
    rounded = "" if inputs is None else "a8"
    if form == "float-quantized" or (form == "naive-quantized" and kind == "float"):
        return _float8(weights, inputs), f"w8{rounded}"
    weights.among("type", choices=("int",), default="int")
    return _integers(weights, inputs, form), f"w{weights.raw('num_bits')}{rounded or 'a16'}"


def _nvfp4(weights: Section, inputs: Section | None) -> tuple[Scheme, str]:
    for section in (weights, inputs):
        if section is not None:
            section.among("num_bits", choices=(4,))
            section.among("type", choices=("float",))
            section.among("strategy", choices=("tensor_group",))
            section.among("group_size", choices=(GROUP,))
            section.among("symmetric", choices=(True,), default=True)
    served = "w4a16" if inputs is None else "w4a4, whose inputs are not rounded"
    return Nvfp4Scheme(Nvfp4Packing(COMPRESSED_TENSORS)), served


def _float8(weights: Section, inputs: Section | None) -> Scheme:
    weights.among("num_bits", choices=(8,))
    weights.among("type", choices=("float",))
    weights.among("symmetric", choices=(True,), default=True)
    strategy = weights.among("strategy", choices=("tensor", "channel", "block"), default="tensor")
    if strategy != "block":
        rounding = _rounding(inputs, "float", ("token", "tensor"))
        return Float8Scheme(Float8Packing(None, _is_static(rounding)), rounding)
    block = weights.raw("block_structure")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and 1 <= size <= 2**20 for size in block)
    ):
        raise weights.error("block_structure", "two positive integers")
    if inputs is None:
        return Float8Scheme(Float8Packing((block[0], block[1]), False), None)
    inputs.among("strategy", choices=("group",))
    inputs.among("group_size", choices=(block[1],))
    inputs.among("dynamic", choices=(True,))
    packing = Float8Packing((block[0], block[1]), False)
    return Float8Scheme(packing, RoundedInputs("block", "e4m3"))


def _is_static(rounding: RoundedInputs | None) -> bool:
    return rounding is not None and rounding.scaled == "static"


def _rounding(section: Section | None, kind: str, dynamic: tuple[str, ...]) -> RoundedInputs | None:
    """How inputs are rounded. A dynamic scale of a whole step is one per token instead."""
    if section is None:
        return None
    number: Literal["int8", "e4m3"] = "int8" if kind == "int" else "e4m3"
    section.among("num_bits", choices=(8,))
    section.among("type", choices=(kind,), default="int")
    section.among("symmetric", choices=(True,), default=True)
    if section.among("dynamic", choices=(True, False), default=False):
        section.among("strategy", choices=dynamic, default="tensor")
        return RoundedInputs("token", number)
    section.among("strategy", choices=("tensor",), default="tensor")
    return RoundedInputs("static", number)


def _integers(weights: Section, inputs: Section | None, form: str) -> Scheme:
    strategy = weights.among("strategy", choices=("tensor", "channel", "group"), default="tensor")
    columns = Columns(weights.group_size("group_size") if strategy == "group" else None)
    is_symmetric = weights.flag("symmetric", default=True)
    # Whether columns keep their place although groups follow an order ("group"), or not at all.
    order = weights.among("actorder", choices=("group", "weight", "static", "none"), default="none")
    rounding = _rounding(inputs, "int", ("token", "tensor"))
    if form == "pack-quantized":
        if rounding is not None:
            raise ValueError("input_activations are not supported with pack-quantized")
        bits = weights.among("num_bits", choices=(4, 8))
        return IntegerScheme(
            IntegerPacking(PackedLayout(bits, columns, is_symmetric, order == "group"))
        )
    if order == "group":
        raise weights.error("actorder", "of pack-quantized weights only")
    bits = weights.among("num_bits", choices=(8,))
    layout = PlainLayout(bits, columns, is_symmetric, _is_static(rounding))
    return IntegerScheme(IntegerPacking(layout), rounding)
