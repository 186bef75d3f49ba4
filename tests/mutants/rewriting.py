"""Finds code by a pattern and puts other code there: how an entry says what it changes.

A pattern is Python in which single capital letters are holes: `A < self.limit` is found whatever
is compared. The same letter twice means the same code twice. A hole that is a statement stands for
any number of them (`if A: B`), and `*A` and `**A` for any number of arguments.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

Holes = dict[str, Any]
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_HOLE: Final = re.compile("[A-Z]")
_IGNORED: Final = ("ctx", "type_comment", "kind")


def rewritten(text: str, function: str, before: str, after: str) -> str:
    """The text of a file in which one place of a function is another.

    Parameters
    ----------
    text
        Python.
    function
        Qualified name of a function, with its decorators, of a class, or of a constant; empty for
        the whole file.
    before, after
        Patterns: both an expression, or both statements. `after` may be empty for statements.

    Raises
    ------
    ValueError
        The function is not there, or the pattern does not occur in it exactly once.
    """
    module = ast.parse(text)
    within = definition(module, function)
    pattern, other = ast.parse(before).body, ast.parse(after).body
    if len(pattern) == len(other) == 1:
        one, new = pattern[0], other[0]
        if isinstance(one, ast.Expr) and isinstance(new, ast.Expr):
            places = list(_expressions(within, one.value))
            parent, name, index, holes = _only(places, before, function)
            _put(parent, name, index, _filled(new.value, holes))
            return ast.unparse(ast.fix_missing_locations(module))
    runs = list(_runs(within, pattern))
    body, first, holes = _only(runs, before, function)
    made = [each for statement in other for each in _statements(statement, holes)]
    last = first + len(pattern)
    body[first:last] = made or ([] if len(body) > len(pattern) else [ast.Pass()])
    return ast.unparse(ast.fix_missing_locations(module))


def definition(module: ast.Module, function: str) -> ast.AST:
    """What has a qualified name: a function, a class, or the assignment of a constant.

    Raises
    ------
    ValueError
        There is none, or there are several.
    """
    found: list[ast.AST] = [module]
    for name in function.split(".") if function else ():
        found = [inner for outer in found for inner in _inside(outer) if _defines(inner, name)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} definitions of {function}, expected 1")
    return found[0]


def _defines(code: ast.AST, name: str) -> bool:
    if isinstance(code, _Definition):
        return code.name == name
    targets = code.targets if isinstance(code, ast.Assign) else [getattr(code, "target", None)]
    is_assignment = isinstance(code, ast.Assign | ast.AnnAssign)
    return is_assignment and any(getattr(each, "id", None) == name for each in targets)


def _inside(outer: ast.AST) -> Iterator[ast.AST]:
    """What is in a definition, but not what is in definitions within it."""
    for child in ast.iter_child_nodes(outer):
        yield child
        if not isinstance(child, _Definition):
            yield from _inside(child)


def _only(places: list[Any], before: str, function: str) -> Any:
    if len(places) != 1:
        where = function or "the file"
        raise ValueError(f"{len(places)} places in {where} are {before!r}, expected 1")
    return places[0]


def _expressions(
    within: ast.AST, pattern: ast.expr
) -> Iterator[tuple[ast.AST, str, int | None, Holes]]:
    """Fields that hold what matches: node, name, index in a list, and what the holes are."""
    for parent in ast.walk(within):
        for name, value in ast.iter_fields(parent):
            for index, child in _children(value):
                holes: Holes = {}
                if isinstance(child, ast.expr) and _match(pattern, child, holes):
                    yield parent, name, index, holes


def _children(value: Any) -> Iterator[tuple[int | None, Any]]:
    if isinstance(value, list):
        yield from enumerate(value)
    else:
        yield None, value


def _put(parent: ast.AST, name: str, index: int | None, made: Any) -> None:
    if index is None:
        setattr(parent, name, made)
    else:
        getattr(parent, name)[index] = made


def _runs(
    within: ast.AST, pattern: Sequence[ast.stmt]
) -> Iterator[tuple[list[ast.stmt], int, Holes]]:
    """Statements in a row that match: their list, the first one's index, and the holes."""
    for parent in ast.walk(within):
        for _, body in ast.iter_fields(parent):
            if not (isinstance(body, list) and body and isinstance(body[0], ast.stmt)):
                continue
            for first in range(len(body) - len(pattern) + 1):
                holes: Holes = {}
                taken = body[first : first + len(pattern)]
                if all(map(lambda one, two: _match(one, two, holes), pattern, taken)):
                    yield body, first, holes


def _match(pattern: Any, code: Any, holes: Holes) -> bool:
    """Whether code is what a pattern says; fills in the holes."""
    if (name := _hole(pattern)) is not None:
        is_one = isinstance(code, ast.expr | ast.arg)
        return is_one and _same(holes.setdefault(name, code), code)
    if isinstance(pattern, list):
        return isinstance(code, list) and _match_list(pattern, code, holes)
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(code) and bool(pattern == code)
    return type(pattern) is type(code) and all(
        _match(value, getattr(code, name, None), holes)
        for name, value in ast.iter_fields(pattern)
        if name not in _IGNORED
    )


def _match_list(pattern: list[Any], code: list[Any], holes: Holes) -> bool:
    """As many, but where one of the pattern stands for any number."""
    many = [index for index, each in enumerate(pattern) if _many(each) is not None]
    if not many:
        return len(pattern) == len(code) and all(
            _match(one, two, holes) for one, two in zip(pattern, code, strict=True)
        )
    before = many[0]
    behind = len(pattern) - before - 1
    if len(code) < before + behind:
        return False
    end = len(code) - behind
    name = _many(pattern[before])
    assert name is not None
    return (
        _match_list(pattern[:before], code[:before], holes)
        and _same(holes.setdefault(name, code[before:end]), code[before:end])
        and _match_list(pattern[before + 1 :], code[end:], holes)
    )


def _hole(pattern: Any) -> str | None:
    """The name of a hole for one expression or one argument of a function."""
    if isinstance(pattern, ast.Name) and _HOLE.fullmatch(pattern.id):
        return pattern.id
    if isinstance(pattern, ast.arg) and _HOLE.fullmatch(pattern.arg):
        return pattern.arg
    return None


def _many(pattern: Any) -> str | None:
    """The name of a hole for any number of statements, arguments or keywords."""
    if isinstance(pattern, ast.Expr | ast.Starred):
        return _hole(pattern.value)
    if isinstance(pattern, ast.keyword) and pattern.arg is None:
        return _hole(pattern.value)
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, list) or isinstance(other, list):
        return False
    return one is other or _text(one) == _text(other)


def _text(code: ast.AST) -> str:
    return code.arg if isinstance(code, ast.arg) and code.annotation is None else ast.unparse(code)


def _statements(pattern: ast.stmt, holes: Holes) -> list[Any]:
    """What a statement of a replacement becomes: a hole may be several."""
    made = _filled([pattern], holes)
    assert isinstance(made, list)
    return made


def _filled(pattern: Any, holes: Holes) -> Any:
    """A copy with code in place of the holes."""
    if (name := _hole(pattern)) is not None:
        found = copy.deepcopy(holes[name]) if name in holes else _unknown(name)
        if isinstance(found, ast.arg) and isinstance(pattern, ast.Name):
            return ast.Name(found.arg)
        return found
    if isinstance(pattern, list):
        made: list[Any] = []
        for each in pattern:
            if (name := _many(each)) is not None:
                found = holes[name] if name in holes else _unknown(name)
                if isinstance(found, list):
                    made += copy.deepcopy(found)
                    continue
            made.append(_filled(each, holes))
        return made
    if not isinstance(pattern, ast.AST):
        return pattern
    fields = {name: _filled(value, holes) for name, value in ast.iter_fields(pattern)}
    return type(pattern)(**fields)


def _unknown(name: str) -> Any:
    raise ValueError(f"the hole {name} is not in what is looked for")
