"""Checks what a request brings of the model's own step inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from src.core.errors import InvalidRequestError
from src.core.request import StepValues
from src.core.status import StepInputShape

if TYPE_CHECKING:
    import numpy as np

PARAM: Final = "step_inputs"

_MOST: Final = 2**63 - 1


def step_values(
    declared: Sequence[StepInputShape],
    given: Mapping[str, Any],
    prompt_len: int,
    total_len: int,
) -> dict[str, StepValues]:
    """The values that a request brings, by name.

    Parameters
    ----------
    given
        Name -> an array [n, *shape] of the first n tokens of the prompt.
    prompt_len, total_len
        Tokens of the prompt; and of prompt and output, at most.

    Raises
    ------
    InvalidRequestError
        The model has no such input; an array has another shape, more tokens than the prompt,
        numbers of another kind, or numbers out of range.
    """
    known = {each.name: each for each in declared}
    if unknown := given.keys() - known.keys():
        names = ", ".join(known) or "none"
        raise InvalidRequestError(
            f"the model has no step input {min(unknown)!r}; it has: {names}", param=PARAM
        )
    values = {name: _checked(known[name], array, prompt_len) for name, array in given.items()}
    for each in declared:
        _check_onwards(each, values.get(each.name), total_len)
    return {name: StepValues(tuple(array.shape), array.tobytes()) for name, array in values.items()}


def salted(salt: str, values: Mapping[str, StepValues]) -> str:
    """The salt of a request with these values: keys and values of its tokens depend on them."""
    if not values:
        return salt
    found = hashlib.sha256()
    parts = [salt.encode()]
    for name, each in sorted(values.items()):
        parts += [repr((name, each.shape)).encode(), each.data]
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def _checked(own: StepInputShape, given: Any, prompt_len: int) -> np.ndarray:
    # Most requests bring none: a start does not wait for this import.
    import numpy as np

    kind = np.int64 if own.is_integer else np.float32
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # as tensors of other devices and dtypes say
        raise _wrong(own, "expected an array of numbers on the host") from None
    if array.shape[1:] != own.shape or array.ndim != 1 + len(own.shape):
        expected = ", ".join(("n", *map(str, own.shape)))
        raise _wrong(own, f"expected [{expected}], got {list(array.shape)}")
    if not 1 <= len(array) <= prompt_len:
        raise _wrong(own, f"{len(array)} values for a prompt of {prompt_len} tokens")
    if array.dtype.kind not in ("iu" if own.is_integer else "iuf"):
        raise _wrong(own, f"expected {'integers' if own.is_integer else 'numbers'}")
    if array.dtype.kind == "u" and array.max() > _MOST:
        raise _wrong(own, "expected integers of 64 bits with a sign")
    array = np.ascontiguousarray(array, kind)
    if not own.is_integer and not np.isfinite(array).all():
        raise _wrong(own, "expected finite numbers")
    if own.is_integer and own.below is not None and (array.min() < 0 or array.max() >= own.below):
        raise _wrong(own, f"expected integers from 0 up to {own.below - 1}")
    return array


def _check_onwards(own: StepInputShape, values: np.ndarray | None, total_len: int) -> None:
    """Refuse values from which the numbers of later tokens would leave the range."""
    if own.beyond != "onwards" or values is None:
        return
    last, most = int(values.max()) + total_len - len(values), _MOST
    if own.below is not None:
        most = own.below - 1
    if last > most:
        raise _wrong(own, f"the last token would have {last}, the most is {most}")


def _wrong(own: StepInputShape, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"step input {own.name!r}: {reason}", param=PARAM)
