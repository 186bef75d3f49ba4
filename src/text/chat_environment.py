"""The Jinja environment that chat templates are written for.

It offers what transformers offers to a template (checkpoints' templates are untrusted code, so it
is Jinja's immutable sandbox): ``raise_exception``, ``strftime_now``, ``tojson`` without HTML
escapes, ``{% break %}`` and ``{% continue %}``, and ``{% generation %}``, without effect here.

Only `src.text.template_process` renders with it: time and memory are bounded from outside, since
no list of dangerous operations would be complete.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from src.core.errors import InvalidRequestError

MAX_OUTPUT_CHARACTERS = 16 * 2**20
"""Bound on the rendered text."""


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
        except Exception as error:
            # Python refuses some of what Jinja makes of a source, too: twenty nested loops, say.
            raise InvalidRequestError(
                f"messages: the model's chat template is not valid Jinja: {error}", param="messages"
            ) from error

    def render(self, variables: dict[str, Any]) -> str:
        """Return the rendered text. Only in a process that may be killed: it can take for ever.

        Raises
        ------
        InvalidRequestError
            The template refuses the variables, cannot cope with them, or runs out of bounds.
        """
        kept: list[str] = []
        size = 0
        try:
            for chunk in self._template.generate(variables):
                size += len(chunk)
                if size > MAX_OUTPUT_CHARACTERS:
                    raise _OutOfBoundsError(f"longer than {MAX_OUTPUT_CHARACTERS} characters")
                kept.append(chunk)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"messages: refused by the model's chat template: {error}", param="messages"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise InvalidRequestError(
                f"messages: the model's chat template runs out of bounds: {type(error).__name__}",
                param="messages",
            ) from error
        except Exception as error:
            # Python's own errors, raised by the template's expressions over these messages.
            raise InvalidRequestError(
                "messages: the model's chat template cannot render them: "
                f"{type(error).__name__}: {error}",
                param="messages",
            ) from error
        return "".join(kept)


class _OutOfBoundsError(jinja2.TemplateError):
    """The template asks for more than a prompt can need."""


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


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


_ENVIRONMENT = _make_environment()
