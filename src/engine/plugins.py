"""Loads the plugins that ``plugins.enabled`` names, and adds what they bring to the tables.

Families, kernels and syntaxes are added for the whole process; a second engine that enables the
same plugin finds them there. Logits processors belong to the engine that enables their plugin.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from src.core.config import ChatSection, Config
from src.core.errors import ConfigError
from src.core.plugins import Loaded, enabled_plugins, load_plugins
from src.engine.sampling.processors import LogitsProcessor, Processors
from src.models.families.family import Family
from src.models.registry import add_family
from src.ops import OPS
from src.ops.declaration import Kernel, Op, OpKernel
from src.text.reasoning import REASONING_SYNTAXES, ReasoningSyntax
from src.text.tool_calls.detection import add_reasoning_syntax, add_tool_call_syntax
from src.text.tool_calls.syntax import Syntax
from src.text.tool_calls.syntaxes import SYNTAXES

logger = logging.getLogger(__name__)


def use_plugins(config: Config, device_type: str) -> Processors:
    """Load and add what the enabled plugins bring; return the engine's logits processors.

    Raises
    ------
    ConfigError
        A plugin is not installed, cannot be imported, or brings something that cannot be used. The
        message has its name.
    """
    processors: dict[str, LogitsProcessor[Any]] = {}

    def add_processor(value: Any) -> str:
        processor = value() if isinstance(value, type) else value
        _check_processor(processor)
        if processor.name in processors:
            raise ValueError(f"there is a logits processor {processor.name!r} already")
        processors[processor.name] = processor
        return str(processor.name)

    def add_kernel(value: Any) -> str:
        return _add_kernel(value, device_type, is_compiled=config.compile.is_on)

    adders: Mapping[str, Callable[[Any], str]] = {
        "slipstream.models": _add_family,
        "slipstream.ops": add_kernel,
        "slipstream.logits_processors": add_processor,
        "slipstream.tool_calls": _add_tool_calls,
        "slipstream.reasoning": _add_reasoning,
    }
    plugins = enabled_plugins(config.plugins.enabled)
    for loaded in load_plugins(plugins):
        logger.info("plugin %s: %s", loaded.plugin, _added(loaded, adders[loaded.entry.group]))
    check_syntaxes(config.chat)
    return MappingProxyType(processors)


def check_syntaxes(chat: ChatSection) -> None:
    """Refuse names of syntaxes that nobody brought.

    Raises
    ------
    ConfigError
        Naming the setting.
    """
    for key, value, known in (
        ("chat.tool_call_parser", chat.tool_call_parser, SYNTAXES),
        ("chat.reasoning_parser", chat.reasoning_parser, REASONING_SYNTAXES),
    ):
        if value not in ("auto", "none", *known):
            names = ", ".join(("auto", "none", *known))
            raise ConfigError(f"{key} must be one of {names}, got {value!r}")


def _added(loaded: Loaded, add: Callable[[Any], str]) -> str:
    try:
        name = add(loaded.value)
    # Constructors are the plugin's code.
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise loaded.refused(reason) from error
    return f"{loaded.entry.group.removeprefix('slipstream.')} {name}"


def _add_family(value: Any) -> str:
    if not (isinstance(value, type) and issubclass(value, Family)):
        raise ValueError(f"must be a subclass of Family, got {value!r}")
    add_family(value)
    return ", ".join(value.architectures)


def _add_kernel(value: Any, device_type: str, *, is_compiled: bool) -> str:
    if not isinstance(value, OpKernel):
        raise ValueError(f"must be an OpKernel, got {value!r}")
    ops = {op.name: op for op in OPS}
    op = ops.get(value.op)
    if op is None:
        raise ValueError(f"there is no op {value.op!r}; there are: {', '.join(ops)}")
    if value.device_type == device_type == "cpu" and is_compiled:
        # Compiled code for the CPU calls the kernel library, not what torch dispatches to.
        raise ValueError("a kernel for the CPU needs compile.enforce_eager = true")
    op.plug(value.device_type, _kernel(op, value))
    return f"{value.op} on {value.device_type}: {value.name}"


@functools.cache
def _kernel(op: Op[..., Any], kernel: OpKernel) -> Kernel:
    """The same one however often an engine of this process plugs it."""
    return Kernel(kernel.name, op.record.taking_flat(kernel.run))


def _check_processor(processor: Any) -> None:
    if not isinstance(processor, LogitsProcessor):
        raise ValueError(f"must be a LogitsProcessor, got {processor!r}")
    name, arguments = getattr(processor, "name", None), processor.arguments
    if not (isinstance(name, str) and 1 <= len(name) <= 64 and name.isprintable()):
        raise ValueError(f"its name must have 1 to 64 printable characters, got {name!r}")
    if not (isinstance(arguments, type) and issubclass(arguments, msgspec.Struct)):
        raise ValueError(f"its arguments must be a type of msgspec.Struct, got {arguments!r}")


def _add_tool_calls(value: Any) -> str:
    if not isinstance(value, Syntax):
        raise ValueError(f"must be a Syntax, got {value!r}")
    add_tool_call_syntax(value)
    return value.name


def _add_reasoning(value: Any) -> str:
    if not isinstance(value, ReasoningSyntax):
        raise ValueError(f"must be a ReasoningSyntax, got {value!r}")
    add_reasoning_syntax(value)
    return value.name
