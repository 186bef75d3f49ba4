"""Reads the sections of FP8, FBGEMM, AWQ, GPTQ and ModelOpt: one scheme, and a list of names."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from src.models.weights.checkpoint_formats import CheckpointFormats, Scheme
from src.models.weights.methods import RoundedInputs
from src.models.weights.schemes.columns import Columns
from src.models.weights.schemes.float8 import Float8Packing, Float8Scheme
from src.models.weights.schemes.integers import IntegerPacking, IntegerScheme
from src.models.weights.schemes.layouts import AwqLayout, GptqLayout, Zeros
from src.models.weights.schemes.names import ModuleNames, Section
from src.models.weights.schemes.nvfp4 import GROUP, MODELOPT, Nvfp4Packing, Nvfp4Scheme
from src.models.weights.schemes.patterns import PREFIX, Allowance, Patterns
from src.ops.projections.projection import Scaled

# What a rule of `dynamic` may change.
_OF_LAYOUT = ("bits", "group_size", "sym", "desc_act")
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True)
class OneScheme:
    """All matrices have one scheme, but for some that are named; see `checkpoint_formats.Schemes`.

    ``has_head`` says whether the head has it too.
    """

    scheme: Scheme
    left_out: ModuleNames
    has_head: bool = False

    def of(self, module: str, *, is_head: bool) -> Scheme | None:
        """See `checkpoint_formats.Schemes`."""
        if module in self.left_out or (is_head and not self.has_head):
            return None
        return self.scheme


@dataclass(frozen=True)
class Rules:
    """One scheme, but for modules that a rule names first; see `checkpoint_formats.Schemes`.

    ``rules`` are pairs of a pattern and its scheme; None: the modules are left out.
    """

    rules: tuple[tuple[Patterns, Scheme | None], ...]
    others: OneScheme

    def of(self, module: str, *, is_head: bool) -> Scheme | None:
        """See `checkpoint_formats.Schemes`."""
        own = self.others.of(module, is_head=is_head)
        if own is None:
            return None
        return next((scheme for rule, scheme in self.rules if rule.match(module)), own)


def read_fp8(given: Mapping[str, Any]) -> CheckpointFormats:
    """``quant_method: fp8``: scales per tensor, or per block of ``weight_block_size``."""
    section = Section(given)
    section.among("fmt", choices=("e4m3",), default="e4m3")
    section.among("scale_fmt", choices=("float", "ue8m0"), default="float")
    inputs = section.among("activation_scheme", choices=("dynamic", "static"), default="dynamic")
    block = _block(section)
    if block is not None and inputs == "static":
        raise section.error("activation_scheme", "'dynamic' with weight_block_size")
    scaled: Scaled = "static" if inputs == "static" else "token" if block is None else "block"
    packing = Float8Packing(block, inputs == "static")
    left_out = ModuleNames(section.strings(*_LEFT_OUT))
    by = "tensor" if block is None else f"block of {block[0]} x {block[1]}"
    scheme = Float8Scheme(packing, RoundedInputs(scaled, "e4m3"))
    return CheckpointFormats(f"fp8 with scales per {by}", OneScheme(scheme, left_out))


def _block(section: Section) -> tuple[int, int] | None:
    block = section.raw("weight_block_size")
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(n) is int and 1 <= n <= 2**20 for n in sizes):
        raise section.error("weight_block_size", "two positive integers")
    return sizes[0], sizes[1]


def read_fbgemm(given: Mapping[str, Any]) -> CheckpointFormats:
    """``quant_method: fbgemm_fp8``: scales per row, inputs rounded per token up to a bound."""
    section = Section(given)
    bound = section.raw("activation_scale_ub")
    if bound is not None and (
        isinstance(bound, bool)
        or not isinstance(bound, int | float)
        or not 0 < bound < 3e38
        or math.isnan(bound)
    ):
        raise section.error("activation_scale_ub", "a positive number")
    inputs = RoundedInputs("token", "e4m3", None if bound is None else float(bound))
    scheme = Float8Scheme(Float8Packing(None, False), inputs)
    left_out = ModuleNames(section.strings(*_LEFT_OUT))
    return CheckpointFormats("fp8 with scales per row", OneScheme(scheme, left_out))


def read_awq(given: Mapping[str, Any]) -> CheckpointFormats:
    """``quant_method: awq``, or the file of an older tool."""
    section = Section(given)
    section.among("bits", "w_bit", choices=(4,))
    section.among("version", choices=("gemm",), default="gemm")
    section.among("zero_point", choices=(True,), default=True)
    size = section.group_size("group_size", "q_group_size")
    scheme = IntegerScheme(IntegerPacking(AwqLayout(Columns(size))))
    left_out = ModuleNames(section.strings(*_LEFT_OUT))
    return CheckpointFormats(f"awq, 4 bits {_grouped(size)}", OneScheme(scheme, left_out))


def read_gptq(given: Mapping[str, Any]) -> CheckpointFormats:
    """``quant_method: gptq``, or the file of an older tool."""
    section = Section(given)
    bits = section.among("bits", choices=(4, 8))
    version = section.among("checkpoint_format", choices=("gptq", "gptq_v2"), default="gptq")
    section.among("pack_dtype", choices=("int32",), default="int32")
    section.refuse("is_marlin_format")
    zeros: Zeros = "as they are"
    if version == "gptq":
        zeros = _zeros_less_one(section.raw("meta"))
    size = section.group_size("group_size")
    left_out = ModuleNames(section.strings(*_LEFT_OUT))
    schemes = OneScheme(_gptq_scheme(section, zeros), left_out, section.flag("lm_head"))
    rules = tuple(_rules(section, given, zeros))
    name = f"{version}, {bits} bits {_grouped(size)}"
    return CheckpointFormats(name, Rules(rules, schemes) if rules else schemes)


def _gptq_scheme(section: Section, zeros: Zeros) -> Scheme:
    layout = GptqLayout(
        section.among("bits", choices=(4, 8)),
        Columns(section.group_size("group_size")),
        is_symmetric=section.flag("sym", default=True),
        is_reordered=section.flag("desc_act"),
        zeros=zeros,
    )
    return IntegerScheme(IntegerPacking(layout))


def _zeros_less_one(meta: Any) -> Zeros:
    """How the first version of GPTQ stores zero points of 0, by the tool that has written it.

    GPTQModel subtracts from whole words. Other tools that keep them subtract from each level.
    """
    tools = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = tools if isinstance(tools, list) else [tools]
    is_by_words = any(isinstance(each, str) and each.startswith("gptqmodel") for each in names)
    return "words less one" if is_by_words else "less one"


def _rules(
    section: Section, given: Mapping[str, Any], zeros: Zeros
) -> Iterator[tuple[Patterns, Scheme | None]]:
    """The rules of ``dynamic``, of which the first one counts that a module matches.

    ``-:`` leaves modules out. Others (``+:``, or nothing before the pattern) may give another
    number of bits, size of groups and order; what they say of calibration says nothing here.
    """
    rules = section.raw("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise section.error("dynamic", "an object")
    allowance = Allowance()
    for rule, changes in rules.items():
        pattern = Patterns([f"{PREFIX}{rule.removeprefix('-:').removeprefix('+:')}"], allowance)
        if rule.startswith("-:"):
            yield pattern, None
            continue
        own = Section(changes or {}, f"dynamic[{rule[:100]!r}]")
        for name in ("checkpoint_format", "format", "pack_dtype", "quant_method"):
            own.refuse(name, given.get(name))
        kept = {name: given.get(name) for name in _OF_LAYOUT}
        kept |= {name: own.raw(name) for name in _OF_LAYOUT if own.raw(name) is not None}
        yield pattern, _gptq_scheme(Section(kept, f"dynamic[{rule[:100]!r}]"), zeros)


def read_modelopt(given: Mapping[str, Any]) -> CheckpointFormats | None:
    """``quant_method: modelopt``, or ``hf_quant_config.json``: NVFP4 weights.

    None: the cache alone is quantized. Names of modules that are left out may have ``*`` for any
    characters.
    """
    inner = given.get("quantization")
    section = Section(given if inner is None else inner, "" if inner is None else "quantization")
    section.among("kv_cache_quant_algo", choices=("fp8", "none"), default="none")
    if section.raw("quant_algo") is None:
        return None
    section.among("quant_algo", choices=("nvfp4",))
    section.among("group_size", choices=(GROUP,), default=GROUP)
    names = section.strings("exclude_modules", "ignore")
    left_out = ModuleNames(
        [f"{PREFIX}{fnmatch.translate(name)}" if "*" in name else name for name in names]
    )
    scheme = Nvfp4Scheme(Nvfp4Packing(MODELOPT))
    name = "modelopt NVFP4 (w4a4, whose inputs are not rounded)"
    return CheckpointFormats(name, OneScheme(scheme, left_out, has_head=True))


def _grouped(size: int | None) -> str:
    return "per row" if size is None else f"in groups of {size}"
