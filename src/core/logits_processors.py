"""Logits processors that requests name, and the check of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from src.core.errors import InvalidRequestError
from src.core.sampling_params import LogitsProcessorCall, shown

PARAM: Final = "logits_processors"


class Declared(Protocol):
    """What a processor says of itself; see `engine.sampling.processors.LogitsProcessor`."""

    @property
    def name(self) -> str:
        """What requests call it."""
        ...

    @property
    def arguments(self) -> type[msgspec.Struct]:
        """The type of its arguments."""
        ...

    def check(self, arguments: Any, vocab_size: int) -> None:
        """Refuse arguments by a ``ValueError``."""
        ...


def typed_arguments(call: LogitsProcessorCall, declared: Declared) -> Any:
    """The arguments of a call as the processor's type.

    Raises
    ------
    msgspec.ValidationError
        They are of another type or out of their bounds.
    """
    return msgspec.convert(call.arguments, declared.arguments, strict=True)


def check_processors(
    calls: Sequence[LogitsProcessorCall], known: Mapping[str, Declared], vocab_size: int
) -> None:
    """Refuse processors that are not there, and arguments that they do not take.

    How long arguments are is checked by `SamplingParams.validate`.

    Raises
    ------
    InvalidRequestError
        The message has the place: ``logits_processors[0].arguments.strength``.
    """
    for index, call in enumerate(calls):
        where = f"{PARAM}[{index}]"
        declared = known.get(call.name)
        if declared is None:
            there = ", ".join(sorted(known)) or "none (see plugins.enabled)"
            raise _invalid(f"{where}.name: there is no {shown(call.name)!r}; there are: {there}")
        try:
            declared.check(typed_arguments(call, declared), vocab_size)
        except msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$")
            field = path.removesuffix("`")
            raise _invalid(f"{where}.arguments{field}: {problem}") from None
        except ValueError as error:
            raise _invalid(f"{where}.arguments: {str(error)[:500]}") from None


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=PARAM)
