"""The Jinja environment that chat templates are written for, with bounds.

It offers what transformers offers to a template (checkpoints' templates are untrusted code, so it
is Jinja's immutable sandbox): ``raise_exception``, ``strftime_now``, ``tojson`` without HTML
escapes, ``{% break %}`` and ``{% continue %}``, and ``{% generation %}``, without effect here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from src.core.errors import InvalidRequestError

MAX_OUTPUT_CHARACTERS = 16 * 2**20
"""Bound on the rendered text, and on the length of any repeated sequence."""
MAX_RANGE_NUMBERS = 1_000_000
"""Bound on the numbers drawn from all the ``range`` calls of one rendering."""
_MAX_POWER_BITS = 4096
MAX_SECONDS = 10.0
"""Bound on the time of one rendering; looked at in every turn of a loop and call of a macro."""
_END, _CHECK = "_end_of_time", "_check_time"


class CompiledTemplate:
    """One template, ready to render. Several threads may render it at once.

    Parameters
    ----------
    source
        Jinja source.

    Raises
    ------
    InvalidRequestError
        The source is not valid Jinja: the checkpoint still serves requests without messages.
    """

    def __init__(self, source: str) -> None:
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidRequestError(
                f"messages: the model's chat template is not valid Jinja: {error}", param="messages"
            ) from error

    def render(self, variables: dict[str, Any], seconds: float | None = None) -> str:
        """Return the rendered text, which may take `MAX_SECONDS`, or ``seconds``.

        Raises
        ------
        InvalidRequestError
            The template refuses the variables, cannot cope with them, or runs out of bounds.
        """
        kept: list[str] = []
        size = 0
        try:
            most = MAX_SECONDS if seconds is None else seconds
            own = {"range": _counted_range(), _END: time.monotonic() + most}
            for chunk in self._template.generate({**variables, **own}):
                size += len(chunk)
                if size > MAX_OUTPUT_CHARACTERS:
                    raise _OutOfBoundsError(f"longer than {MAX_OUTPUT_CHARACTERS} characters")
                kept.append(chunk)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"messages: refused by the model's chat template: {error}", param="messages"
            ) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Python's own errors, raised by the template's expressions over these messages.
            raise InvalidRequestError(
                "messages: the model's chat template cannot render them: "
                f"{type(error).__name__}: {error}",
                param="messages",
            ) from error
        except (RecursionError, MemoryError) as error:
            raise InvalidRequestError(
                f"messages: the model's chat template runs out of bounds: {type(error).__name__}",
                param="messages",
            ) from error
        return "".join(kept)


class _OutOfBoundsError(jinja2.TemplateError):
    """The template asks for more than a prompt can need."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        bodies = [
            *(loop.body for loop in template.find_all(nodes.For)),
            *(macro.body for macro in template.find_all(nodes.Macro)),
            *(block.body for block in template.find_all(nodes.CallBlock)),
        ]
        for body in bodies:
            # Without this a loop of loops would run for ever, and no thread can be stopped.
            # As a filter, since each call goes through the sandbox.
            end = nodes.Name(_END, "load")
            body.insert(0, nodes.ExprStmt(nodes.Filter(end, _CHECK, [], [], None, None)))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right`` unless the result would be huge."""
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        elif _is_huge_power(left, right):
            raise _OutOfBoundsError("computes too large a power")
        return super().call_binop(context, operator, left, right)


def _check_repetition(sequence: Any, times: Any) -> None:
    repeats = isinstance(sequence, str | list | tuple) and isinstance(times, int)
    if repeats and len(sequence) * times > MAX_OUTPUT_CHARACTERS:
        raise _OutOfBoundsError(f"repeats a sequence {times} times")


def _is_huge_power(base: Any, exponent: Any) -> bool:
    integers = isinstance(base, int) and isinstance(exponent, int)
    return integers and base.bit_length() * abs(exponent) > _MAX_POWER_BITS


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body, lineno=line)

    def _render(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """``dict`` for templates: callable, without the attributes of the real one."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace`` for templates, which refuses names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"expected a namespace attribute without leading underscore, got {name!r}"
        )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _counted_range() -> Callable[..., range]:
    """Return a ``range`` for one rendering, whose calls share one budget."""
    drawn = 0

    def counted(*args: int) -> range:
        nonlocal drawn
        numbers = range(*args)
        drawn += len(numbers)
        if drawn > MAX_RANGE_NUMBERS:
            raise _OutOfBoundsError(f"draws more than {MAX_RANGE_NUMBERS} numbers from range")
        return numbers

    return counted


def _check_time(end: float) -> None:
    if time.monotonic() > end:
        raise _OutOfBoundsError(f"takes longer than {MAX_SECONDS:g} s")


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters[_CHECK] = _check_time
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


_ENVIRONMENT = _make_environment()
