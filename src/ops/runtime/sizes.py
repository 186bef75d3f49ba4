"""The named sizes of an op's call: of which tensor each is read, or from which it follows."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Final

from src.ops.records import Record
from src.ops.runtime.struct_fields import matrices_of, names_in, tensors_of


class Sizes:
    """How the named sizes of a record are found.

    Attributes
    ----------
    named
        Name -> the text by which it is computed, in an order that serves. A size that is read by
        its name is its own text; `//` divides.
    read
        (Tensor or matrix, dimension) -> the variable that this size is read into.
    """

    def __init__(self, call: type[Record]) -> None:
        self.named: dict[str, str] = {}
        self.read: dict[tuple[str, int], str] = {}
        self._matrices: Final = matrices_of(call)
        self._settled: set[tuple[str, int]] = set()  # those that can contradict no other
        dims = {
            name: each.dims for name, each in tensors_of(call).items() if not each.is_optional
        } | {name: each.dims for name, each in self._matrices.items()}
        self._find(dims)

    def variable(self, name: str, index: int) -> str:
        """The variable that a size is read into."""
        return self.read.get((name, index), f"{name}_{index}")

    def is_read(self, name: str) -> bool:
        """Whether the sizes of a tensor are in variables."""
        return name in self._matrices or any(name == of for of, _ in self.read)

    def is_settled(self, name: str, index: int) -> bool:
        """Whether this size can contradict no other: it says what a name means."""
        return (name, index) in self._settled

    def _find(self, dims: Mapping[str, tuple[str, ...]]) -> None:
        waiting = [
            (ast.parse(dim, mode="eval").body, name, index)
            for name, each in dims.items()
            for index, dim in enumerate(each)
            if dim != "_"
        ]
        # A size that stands alone is read, not computed.
        waiting.sort(key=lambda each: not isinstance(each[0], ast.Name))
        progress = True
        while progress:
            progress = False
            for expression, name, index in waiting:
                unknown = set(names_in(ast.unparse(expression))) - self.named.keys()
                if len(unknown) != 1:
                    continue
                dim, progress = unknown.pop(), True
                is_alone = isinstance(expression, ast.Name)
                size = dim if is_alone else f"{name}_{index}"
                self.named[dim] = dim if is_alone else _solved(expression, size, dim)
                self.read[name, index] = size
                if not any(isinstance(each, ast.Mult) for each in ast.walk(expression)):
                    self._settled.add((name, index))


def in_parentheses(dim: str) -> str:
    """A dimension within a longer expression."""
    return dim if dim.isidentifier() else f"({dim})"


def _solved(expression: ast.expr, value: str, unknown: str) -> str:
    """What `unknown` is if the expression has this value."""
    while not isinstance(expression, ast.Name):
        if not isinstance(expression, ast.BinOp):
            raise LookupError(f"no size follows from {ast.unparse(expression)}")
        is_left = unknown in names_in(ast.unparse(expression.left))
        other = ast.unparse(expression.right if is_left else expression.left)
        if isinstance(expression.op, ast.Add):
            value = f"({value} - ({other}))"
        elif isinstance(expression.op, ast.Sub):
            value = f"({value} + ({other}))" if is_left else f"(({other}) - {value})"
        elif isinstance(expression.op, ast.Mult):
            value = f"({value} // ({other}))"
        else:
            raise LookupError(f"no size follows from {ast.unparse(expression)}")
        expression = expression.left if is_left else expression.right
    return value
