"""An op's call as one value with named fields.

A `Record` declares what an op is given, once. From it come torch's schema and the flat arguments
that torch passes, the function that users call, shapes for tracing, and the struct and the checks
of the CPU's kernels. Reference, kernels and cost take the record.

    class Scale(Record, result=result("out", "tokens width", like="x")):
        '''`x * factor`.'''

        x: Tensor = tensor("tokens width", rows=True)
        weight: Tensor | None = tensor("width")
        factor: float = number(default=1.0)

Dimensions have names, and expressions of names: `rows+1`, `parts*room`. A name means the same
size everywhere in a record; `_` is any size.
"""

from __future__ import annotations

import ast
import operator
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Self, dataclass_transform

import torch
from torch import Tensor

ANY: Final = "any"
"""In place of a dtype: a kernel checks it."""
REQUIRED: Final = object()
"""In place of a default: there is none."""
_SCALARS: Final = {int: "int", float: "float", bool: "bool", torch.dtype: "ScalarType"}


@dataclass(frozen=True)
class TensorField:
    """A tensor of a record.

    Attributes
    ----------
    dims
        A name or an expression for each dimension.
    dtype
        None: that of the record's first tensor for which none is given. `ANY`: each kernel says
        which it takes.
    rows
        Whether the stride of the first dimension is free; the others are contiguous.
    changed
        Whether a call changes it.
    on_cpu
        Whether the CPU's kernel takes it.
    """

    dims: tuple[str, ...]
    dtype: torch.dtype | str | None
    rows: bool
    changed: bool
    on_cpu: bool
    default: Any
    is_optional: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class NumberField:
    """An integer, a boolean, a floating-point number or a dtype of a record.

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

    Attributes
    ----------
    by
        A class or an object with `PARTS`, (name, type) of each flat argument; `parts`, which
        returns those of a value; and `of`, which makes the value of them. With `dims`, the value
        has a `shape` of these dimensions. None: the value's own class.
    """

    default: Any
    by: Any

    @property
    def dims(self) -> tuple[str, ...]:
        """A name or an expression for each dimension, as of a tensor."""
        found: tuple[str, ...] = getattr(self.by, "dims", ())
        return found


Field = TensorField | NumberField | NestedField


@dataclass(frozen=True)
class Result:
    """The tensor that an op returns: a new one of `dims`, on the device of the field `like`.

    `dtype` is that of `like` if it is None; a string names the field that says it.
    """

    name: str
    dims: tuple[str, ...]
    like: str
    dtype: torch.dtype | str | None


def tensor(
    dims: str,
    dtype: torch.dtype | str | None = None,
    *,
    rows: bool = False,
    changed: bool = False,
    on_cpu: bool = True,
    default: Any = REQUIRED,
) -> Any:
    """A field with a tensor, see `TensorField`; expressions in `dims` are without spaces.

    Raises
    ------
    ValueError
        A dimension is no expression.
    """
    for dim in dims.split():
        try:
            ast.parse(dim, mode="eval")
        except SyntaxError:
            raise ValueError(f"{dim!r} is no dimension: write expressions without spaces") from None
    return TensorField(tuple(dims.split()), dtype, rows, changed, on_cpu, default)


def number(*, varies: bool = False, on_cpu: bool = True, default: Any = REQUIRED) -> Any:
    """A field with an `int`, a `float`, a `bool` or a dtype, as annotated; see `NumberField`."""
    return NumberField(varies, on_cpu, default)


def nested(*, by: Any = None, default: Any = REQUIRED) -> Any:
    """A field with a value that is flattened for torch, see `NestedField`."""
    return NestedField(default, by)


def result(name: str, dims: str, *, like: str, dtype: torch.dtype | str | None = None) -> Result:
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

    *Flat* are the arguments as torch has them: a nested value is several of them there.

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
        return tuple(self)

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
        """The first tensor, or nested value with a shape, that has a dimension of this name alone.

        It is never one that may be absent.

        Raises
        ------
        LookupError
            There is none.
        """
        for name, each in cls.fields.items():
            if isinstance(each, NumberField) or dim not in each.dims:
                continue
            if not (isinstance(each, TensorField) and each.is_optional):
                return name, each.dims.index(dim)
        raise LookupError(f"no tensor of {cls.__name__} has a dimension {dim!r}")

    @classmethod
    def schema(cls) -> str:
        """The signature in torch's schema language."""
        letters = iter("abcdefgh")
        parameters: list[str] = []
        for name, each in cls.fields.items():
            if isinstance(each, NestedField):
                parameters += [f"{kind} {part}" for part, kind in each.by.PARTS]
                continue
            if isinstance(each, TensorField):
                kind = f"Tensor({next(letters)}!)" if each.changed else "Tensor"
                kind += "?" if each.is_optional else ""
            else:
                kind = "SymInt" if each.varies else _SCALARS[each.kind]
            default = f"={each.default}" if name in cls.optional_flat() else ""
            parameters.append(f"{kind} {name}{default}")
        returned = "()" if cls.result is None else "Tensor"
        return f"({', '.join(parameters)}) -> {returned}"

    @classmethod
    def flat_parameters(cls) -> list[str]:
        """The flat arguments by name, in order."""
        names: list[str] = []
        for name, each in cls.fields.items():
            names += [p for p, _ in each.by.PARTS] if isinstance(each, NestedField) else [name]
        return names

    @classmethod
    def taking_flat(cls, function: Callable[[Any], Any]) -> Callable[..., Any]:
        """A function of the flat arguments, of a function of the record."""
        made = cls._of_flat("return function({})", {"function": function})
        made.__wrapped__ = function  # type: ignore[attr-defined]
        return made

    @classmethod
    def passing(cls, overload: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the record's fields that passes the flat arguments to an op of torch."""
        named = [_parameter(name, each) for name, each in cls.fields.items()]
        body = f"return overload({cls._flattened()})"
        scope = cls._defaults() | cls._by("parts") | {"overload": overload}
        made = _compiled(cls.__name__, named, body, scope)
        # By its module, keys of compiled code find the files that it depends on.
        made.__module__, made.__doc__ = cls.__module__, cls.__doc__
        return made

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
        dtype = getattr(self, made.dtype) if isinstance(made.dtype, str) else made.dtype
        return like.new_empty(sizes, dtype=dtype or like.dtype)

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
        cls.of_flat = staticmethod(cls._of_flat("return {}", {}))
        if any(isinstance(each, NestedField) for each in fields.values()):
            body = f"{names} = self\n    return ({cls._flattened()})"
            cls.flat = _compiled("flat", ["self"], body, cls._by("parts"))  # type: ignore[method-assign]

    @classmethod
    def optional_flat(cls) -> set[str]:
        """Flat arguments that may be left out: those with defaults behind all that have none."""
        names: set[str] = set()
        for name, each in cls.fields.items():
            if isinstance(each, NestedField) or each.default is REQUIRED:
                names.clear()
            else:
                names.add(name)
        return names

    @classmethod
    def _by(cls, what: str) -> dict[str, Any]:
        """A function for each nested value: `parts` or `of`."""
        nested_fields = (
            (n, each) for n, each in cls.fields.items() if isinstance(each, NestedField)
        )
        return {f"{what}_{name}": getattr(each.by, what) for name, each in nested_fields}

    @classmethod
    def _flattened(cls) -> str:
        """The flat arguments, written with the fields."""
        return "".join(
            f"*parts_{name}({name}), " if isinstance(each, NestedField) else f"{name}, "
            for name, each in cls.fields.items()
        )

    @classmethod
    def _of_flat(cls, body: str, scope: dict[str, Any]) -> Callable[..., Any]:
        """A function of the flat arguments; `{}` in its body is the record of them."""
        scope = scope | cls._defaults() | cls._by("of") | {"new": tuple.__new__, "record": cls}
        flat, values = [], []
        for name, each in cls.fields.items():
            if isinstance(each, NestedField):
                parts = [part for part, _ in each.by.PARTS]
                flat += parts
                values.append(f"of_{name}({', '.join(parts)})")
            else:
                flat.append(_parameter(name, each) if name in cls.optional_flat() else name)
                values.append(name)
        made = f"new(record, ({''.join(f'{value}, ' for value in values)}))"
        return _compiled(cls.__name__, flat, body.format(made), scope)


def _parameter(name: str, each: Field) -> str:
    return name if each.default is REQUIRED else f"{name}=default_{name}"


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
    return NestedField(each.default, each.by or hint)
