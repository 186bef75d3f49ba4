"""An op's call as one value with named fields.

A [`Record`][src.ops.records.Record] declares what an op is given, once. From it come torch's schema
and the flat arguments that torch passes, the function that users call, shapes for tracing, and the
struct and the checks of the CPU's kernels. Reference, kernels and cost take the record.

    class Scale(Record, result=result("out", "tokens width", like="x")):
        '''`x * factor`.'''

        x: Tensor = tensor("tokens width", rows=True)
        weight: Tensor | None = tensor("width")
        factor: float = number(default=1.0)

Dimensions have names, and expressions of names: `rows + 1`, `parts * room`. A name means the same
size everywhere in a record; `_` is any size.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Self, dataclass_transform

import torch
from torch import Tensor

_REQUIRED: Final = object()
_SCALARS: Final = {int: "int", float: "float", bool: "bool"}


@dataclass(frozen=True)
class TensorField:
    """A tensor of a record.

    Attributes
    ----------
    dims
        A name or an expression for each dimension.
    dtype
        None: that of the record's first tensor for which none is given.
    rows
        Whether the stride of the first dimension is free; the others are contiguous.
    changed
        Whether a call changes it.
    on_cpu
        Whether the CPU's kernel takes it.
    is_checked
        Whether dtype and layout are as said here; otherwise a kernel checks them itself.
    """

    dims: tuple[str, ...]
    dtype: torch.dtype | None
    rows: bool
    changed: bool
    on_cpu: bool
    is_checked: bool
    default: Any
    is_optional: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class NumberField:
    """An integer, a boolean or a floating-point number of a record.

    Attributes
    ----------
    varies
        Of an integer: whether it differs from step to step, so that compiled code must not be
        specialised for its value.
    on_cpu
        Whether the CPU's kernel takes it.
    """

    varies: bool
    on_cpu: bool
    default: Any
    kind: type = field(default=int, kw_only=True)


@dataclass(frozen=True)
class NestedField:
    """A value with a class of its own, which is flattened in torch's schema.

    The class has `PARTS`, (name, type) of each flat argument; `parts`, which returns them; and
    `of`, which makes the value of them.
    """

    default: Any
    kind: type = field(default=object, kw_only=True)


Field = TensorField | NumberField | NestedField


@dataclass(frozen=True)
class Result:
    """The tensor that an op returns: a new one of `dims`, on the device of the field `like`."""

    name: str
    dims: tuple[str, ...]
    like: str
    dtype: torch.dtype | None


def tensor(
    dims: str,
    dtype: torch.dtype | None = None,
    *,
    rows: bool = False,
    changed: bool = False,
    on_cpu: bool = True,
    is_checked: bool = True,
    default: Any = _REQUIRED,
) -> Any:
    """A field with a tensor, see `TensorField`; expressions in `dims` are without spaces."""
    return TensorField(tuple(dims.split()), dtype, rows, changed, on_cpu, is_checked, default)


def number(*, varies: bool = False, on_cpu: bool = True, default: Any = _REQUIRED) -> Any:
    """A field with an `int`, a `float` or a `bool`, as it is annotated; see `NumberField`."""
    return NumberField(varies, on_cpu, default)


def nested(*, default: Any = _REQUIRED) -> Any:
    """A field with a value that is flattened for torch, see `NestedField`."""
    return NestedField(default)


def result(name: str, dims: str, *, like: str, dtype: torch.dtype | None = None) -> Result:
    """What an op returns, see `Result`."""
    return Result(name, tuple(dims.split()), like, dtype)


@dataclass_transform(field_specifiers=(tensor, number, nested))
class _RecordType(type):
    """Makes a class of named fields a tuple of them."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **options: Any
    ) -> _RecordType:
        declared = {key: each for key, each in body.items() if isinstance(each, Field)}
        own = {key: each for key, each in body.items() if key not in declared}
        for index, key in enumerate(declared):
            own[key] = property(operator.itemgetter(index))
        made = super().__new__(cls, name, bases, own | {"__slots__": ()}, **options)
        if not any(isinstance(base, _RecordType) for base in bases):
            return made  # `Record` itself
        hints = typing.get_type_hints(made)
        # mypy does not know attributes of a class that is made here.
        typing.cast(Any, made)._declare(
            {key: _annotated(each, hints[key]) for key, each in declared.items()}
        )
        return made


class Record(tuple[Any, ...], metaclass=_RecordType):
    """The arguments of one call, by name. It is a tuple of them, in order of their declaration.

    Attributes
    ----------
    fields
        Name -> field.
    result
        What the op returns; None for an op that returns nothing.
    """

    fields: ClassVar[Mapping[str, Field]]
    result: ClassVar[Result | None]
    of_flat: ClassVar[Callable[..., Any]]
    """Makes a record of the arguments that torch passes, those with defaults left out or not."""

    def __init_subclass__(cls, result: Result | None = None) -> None:
        cls.result = result

    def flat(self) -> tuple[Any, ...]:
        """The arguments as torch takes them."""
        return self

    def replace(self, **changes: Any) -> Self:
        """The same record with other values in some fields."""
        unknown = changes.keys() - self.fields.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no fields {sorted(unknown)}")
        values = (changes.get(name, value) for name, value in zip(self.fields, self, strict=True))
        return tuple.__new__(type(self), tuple(values))

    @classmethod
    def tensors(cls) -> dict[str, TensorField]:
        """The fields with tensors, by name."""
        return {name: each for name, each in cls.fields.items() if isinstance(each, TensorField)}

    @classmethod
    def place_of(cls, dim: str) -> tuple[str, int]:
        """The first tensor, never an absent one, and its dimension that has this name.

        Raises
            LookupError: No such tensor has a dimension of this name alone.
        """
        for name, each in cls.tensors().items():
            if dim in each.dims and not each.is_optional:
                return name, each.dims.index(dim)
        raise LookupError(f"no tensor of {cls.__name__} has a dimension {dim!r}")

    @classmethod
    def schema(cls) -> str:
        """The signature in torch's schema language."""
        letters = iter("abcdefgh")
        parameters: list[str] = []
        for name, each in cls.fields.items():
            if isinstance(each, NestedField):
                parameters += [f"{kind} {part}" for part, kind in each.kind.PARTS]  # type: ignore[attr-defined]
                continue
            if isinstance(each, TensorField):
                kind = f"Tensor({next(letters)}!)" if each.changed else "Tensor"
                kind += "?" if each.is_optional else ""
            else:
                kind = "SymInt" if each.varies else _SCALARS[each.kind]
            default = "" if each.default is _REQUIRED else f"={each.default}"
            parameters.append(f"{kind} {name}{default}")
        returned = "()" if cls.result is None else "Tensor"
        return f"({', '.join(parameters)}) -> {returned}"

    @classmethod
    def function(cls, overload: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the record's fields that passes them to an op of torch."""
        named = [_parameter(name, each) for name, each in cls.fields.items()]
        passed = [
            f"*{name}.parts()" if isinstance(each, NestedField) else name
            for name, each in cls.fields.items()
        ]
        body = f"return overload({', '.join(passed)})"
        return _compiled(cls.__name__, named, body, cls._defaults() | {"overload": overload})

    def traced(self) -> Tensor | None:
        """A tensor like the result, without a value: for tracing."""
        made = self.result
        if made is None:
            return None
        sizes = []
        for dim in made.dims:
            name, index = self.place_of(dim)
            sizes.append(getattr(self, name).shape[index])
        like: Tensor = getattr(self, made.like)
        return like.new_empty(sizes, dtype=made.dtype or like.dtype)

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {f"default_{name}": each.default for name, each in cls.fields.items()}

    @classmethod
    def _declare(cls, fields: dict[str, Field]) -> None:
        """Take the fields, and make the functions that make records."""
        cls.fields = fields
        scope = cls._defaults() | {"new": tuple.__new__, "record": cls}
        named = [_parameter(name, each) for name, each in fields.items()]
        names = "".join(f"{name}, " for name in fields)
        # Written out, as that of a NamedTuple, because a call of an op makes one.
        cls.__new__ = _compiled(  # type: ignore[method-assign]
            "__new__", ["record", *named], f"return new(record, ({names}))", scope
        )
        if not any(isinstance(each, NestedField) for each in fields.values()):
            cls.of_flat = staticmethod(
                _compiled("of_flat", named, f"return new(record, ({names}))", scope)
            )
            return
        flat, made = [], []
        for name, each in fields.items():
            if isinstance(each, NestedField):
                parts = [part for part, _ in each.kind.PARTS]  # type: ignore[attr-defined]
                flat += parts
                made.append(f"of_{name}({', '.join(parts)})")
                scope[f"of_{name}"] = each.kind.of  # type: ignore[attr-defined]
            else:
                flat.append(_parameter(name, each))
                made.append(name)
        body = f"return new(record, ({', '.join(made)},))"
        cls.of_flat = staticmethod(_compiled("of_flat", flat, body, scope))
        parts_of = (
            f"*self.{name}.parts()" if isinstance(each, NestedField) else f"self.{name}"
            for name, each in fields.items()
        )
        cls.flat = _compiled("flat", ["self"], f"return ({', '.join(parts_of)},)", {})  # type: ignore[method-assign]


def _parameter(name: str, each: Field) -> str:
    return name if each.default is _REQUIRED else f"{name}=default_{name}"


def _compiled(
    name: str, parameters: list[str], body: str, scope: dict[str, Any]
) -> Callable[..., Any]:
    """A function of this text."""
    scope = dict(scope)
    exec(f"def {name}({', '.join(parameters)}):\n    {body}", scope)
    made: Callable[..., Any] = scope[name]
    return made


def _annotated(each: Field, hint: Any) -> Field:
    """The field with what its annotation says."""
    is_optional = isinstance(hint, UnionType) and NoneType in typing.get_args(hint)
    if isinstance(each, TensorField):
        return TensorField(**{**vars(each), "is_optional": is_optional})
    if isinstance(each, NumberField):
        return NumberField(**{**vars(each), "kind": hint})
    return NestedField(each.default, kind=hint)
