"""Which modules of a checkpoint a quantization's lists of names mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from src.models.weights.schemes.patterns import PREFIX, Allowance, Patterns


class ModuleNames:
    """A list of modules: whole names, parts of names between dots, or patterns after ``re:``."""

    def __init__(self, entries: Sequence[str], allowance: Allowance | None = None) -> None:
        """Compile the patterns; ``allowance`` is what they share with others.

        Raises
        ------
        ValueError
            See `Patterns`.
        """
        self._names = frozenset(e.strip(".") for e in entries if not e.startswith(PREFIX))
        self._patterns = Patterns((e for e in entries if e.startswith(PREFIX)), allowance)

    def __contains__(self, module: str) -> bool:
        """Whether the list names the module, a part that it lies in, or the end of its name.

        Raises
        ------
        ValueError
            Its patterns take too long.
        """
        parts = module.split(".")
        paths = (
            ".".join(parts[start:stop])
            for start in range(len(parts))
            for stop in range(start + 1, len(parts) + 1)
        )
        is_named = not self._names.isdisjoint(paths)
        return is_named or self._patterns.match(module)


class Section:
    """Typed access to the fields of a quantization. Errors name the field and its value."""

    def __init__(self, values: Any, name: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{name or 'it'} must be an object, got {values!r}")
        self._values, self._name = values, f"{name}." if name else ""

    def raw(self, *names: str) -> Any:
        """The value of the first of these fields that is not null, or None."""
        return next((self._values[n] for n in names if self._values.get(n) is not None), None)

    def error(self, name: str, expected: str) -> ValueError:
        """The error for a field whose value is not what is expected."""
        return ValueError(f"{self._name}{name} must be {expected}, got {self.raw(name)!r}")

    def among(self, *names: str, choices: Sequence[Any], default: Any = None) -> Any:
        """One of some values."""
        value = self.raw(*names)
        value = default if value is None else value
        if isinstance(value, str):
            value = value.lower()
        if not any(value == one and type(value) is type(one) for one in choices):
            listed = " or ".join(map(repr, choices))
            raise ValueError(f"{self._name}{names[0]} must be {listed}, got {value!r}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false")
        return default if value is None else value

    def group_size(self, *names: str) -> int | None:
        """Columns of a group; None for whole rows, which is -1."""
        value = self.raw(*names)
        if type(value) is not int or not (value == -1 or 1 <= value <= 2**20):
            raise ValueError(
                f"{self._name}{names[0]} must be -1 or from 1 to {2**20}, got {value!r}"
            )
        return None if value == -1 else value

    def strings(self, *names: str) -> list[str]:
        """A list of strings; empty if there is none."""
        value = self.raw(*names)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"{self._name}{names[0]} must be a list of names, got {value!r}")
        return value

    def refuse(self, name: str, *harmless: Any) -> None:
        """Refuse a field that is set to anything but these values."""
        value = self.raw(name)
        if value is not None and value not in (*harmless, False, [], {}):
            raise ValueError(f"{self._name}{name} = {value!r} is not supported")
