from __future__ import annotations

import inspect
import traceback
import weakref

import pytest

from src.core import errors
from src.core.errors import forget_locals


def test_the_tree_in_the_docstring_shows_every_error() -> None:
    drawn = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.SlipstreamError):
            assert name in drawn


def test_a_request_error_carries_what_a_client_is_told() -> None:
    error = errors.PromptTooLongError("too long", param="prompt")
    assert (str(error), error.message, error.param) == ("too long", "too long", "prompt")
    assert error.code == "context_length_exceeded"
    assert errors.QueueFullError("full", retry_after=2.5).retry_after == 2.5


class Heavy:
    """Something that a function had in hand."""


def test_an_error_that_is_kept_forgets_the_variables_of_its_functions() -> None:
    held: list[weakref.ref[Heavy]] = []

    def fail(depth: int) -> None:
        heavy = Heavy()
        held.append(weakref.ref(heavy))
        if depth == 0:
            raise ValueError("no")
        try:
            fail(depth - 1)
        except ValueError as error:
            raise RuntimeError("nor this") from error

    with pytest.raises(RuntimeError) as raised:
        fail(2)
    kept = raised.value
    assert [heavy() for heavy in held if heavy() is None] == []
    forget_locals(kept)
    assert [heavy() for heavy in held if heavy() is not None] == []
    # It still says where it came from.
    assert traceback.extract_tb(kept.__traceback__)[-1].name == "fail"


def test_errors_that_are_each_others_causes_come_to_an_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    forget_locals(first)
    forget_locals(None)
