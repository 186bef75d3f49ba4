"""Docstrings are in one dialect, NumPy's: sections are underlined, and what they name exists."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from tests.law.test_house import SOURCE, ids

Owner = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "Notes")
# What other dialects call them.
HEADINGS = (*SECTIONS, "Args", "Arguments", "Return", "Yield", "Raise", "Note", "Example")
HEADING = re.compile(rf"({'|'.join(HEADINGS)}):?")
UNDERLINE = re.compile(r"-{3,}")
# A name, or several; those of `*args` and `**kwargs`, and exceptions of other libraries, too.
NAMES = re.compile(r"\*{0,2}[A-Za-z_][\w.]*(, \*{0,2}[A-Za-z_][\w.]*)*")
# Of Sphinx and of MkDocs: nothing renders them.
MARKUP = re.compile(r":(class|func|meth|mod|attr|data|exc|obj|ref):`|\]\[src\b")


@dataclass(frozen=True)
class Section:
    """A heading and the lines below it, to the next one."""

    name: str
    body: list[str]

    def entries(self) -> Iterator[tuple[str, list[str]]]:
        """Lines at the margin, each with those that are indented below it."""
        entry: tuple[str, list[str]] | None = None
        for line in self.body:
            if line and not line.startswith(" "):
                if entry is not None:
                    yield entry
                entry = (line, [])
            elif entry is not None and line:
                entry[1].append(line)
        if entry is not None:
            yield entry


def owners(tree: ast.Module) -> Iterator[Owner]:
    """What may have a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Owner):
            yield node


def sections_of(text: str, of_module: bool = False) -> tuple[list[Section], list[str]]:
    """The sections of a docstring, and what is wrong with their headings; modules have any."""
    lines, found, faults = text.splitlines(), list[Section](), list[str]()
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        above = lines[number - 1] if number else ""
        if UNDERLINE.fullmatch(below.strip()):
            if of_module:
                continue
            if line not in SECTIONS:
                faults.append(f"{line!r} is no section")
            elif len(below) != len(line):
                faults.append(f"{line} is not underlined in its length")
            if above:
                faults.append(f"no empty line above {line}")
            if line in [each.name for each in found]:
                faults.append(f"{line} twice")
            found.append(Section(line, []))
        elif (
            HEADING.fullmatch(line.strip())
            and below.strip()
            and (not above or _margin(below) > _margin(line))
        ):
            faults.append(f"{line.strip()} is not underlined")
        elif found and not UNDERLINE.fullmatch(line.strip()):
            found[-1].body.append(line)
    return found, faults


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    plain = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    starred = [each for each in (given.vararg, given.kwarg) if each is not None]
    return {each.arg for each in (*plain, *starred)}


def fields_of(owner: ast.ClassDef) -> set[str]:
    """Names that are assigned in a class's body or by its methods, and its properties."""
    names = set[str]()
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for each in ast.walk(target):
                if isinstance(each, ast.Name):
                    names.add(each.id)
                elif isinstance(each, ast.Attribute):
                    names.add(each.attr)
    return names


def initial_of(owner: ast.ClassDef) -> set[str]:
    """What a class is made of: the parameters of its `__init__` or `__new__`, or its fields."""
    names = set[str]()
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__new__"):
            names |= parameters_of(node)
    return names or fields_of(owner)


class Names:
    """What is called what in `src`."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.classes: dict[str, list[ast.ClassDef]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, []).append(node)

    def inherited(self, owner: ast.ClassDef, seen: tuple[str, ...] = ()) -> Iterator[ast.ClassDef]:
        """A class, and those that it is made from as far as they are in `src`."""
        yield owner
        for base in owner.bases:
            while isinstance(base, ast.Subscript):
                base = base.value
            name = ast.unparse(base).rpartition(".")[2]
            if name not in seen:
                for each in self.classes.get(name, []):
                    yield from self.inherited(each, (*seen, name))

    def faults(self, owner: Owner, section: Section) -> Iterator[str]:
        """Entries that are none, and those that name nothing."""
        if section.name in ("Returns", "Yields", "Notes"):
            if not any(section.body):
                yield f"{section.name} says nothing"
            return
        known: set[str] | None = None
        if section.name == "Parameters" and isinstance(owner, ast.ClassDef):
            known = {name for each in self.inherited(owner) for name in initial_of(each)}
        elif section.name == "Parameters" and not isinstance(owner, ast.Module):
            known = parameters_of(owner)
        elif section.name == "Attributes" and isinstance(owner, ast.ClassDef):
            known = {name for each in self.inherited(owner) for name in fields_of(each)}
        elif section.name != "Raises":
            yield f"{section.name} of something that has none"
        for line, description in section.entries():
            if not NAMES.fullmatch(line):
                yield f"{section.name}: {line!r} is not a name"
                continue
            if not description:
                yield f"{section.name}: nothing is said of {line}"
            for name in line.replace("*", "").split(", "):
                if section.name == "Raises":
                    is_other = "." in name or hasattr(builtins, name)
                    if name not in self.classes and not is_other:
                        yield f"Raises: there is no {name}"
                elif known is not None and name not in known:
                    yield f"{section.name}: {name} is none of its own"


def faults_of(tree: ast.Module, names: Names) -> list[str]:
    faults = []
    for owner in owners(tree):
        text = ast.get_docstring(owner) or ""
        where = "module" if isinstance(owner, ast.Module) else owner.name
        sections, wrong = sections_of(text, isinstance(owner, ast.Module))
        if MARKUP.search(text):
            wrong.append("markup that nothing renders")
        for section in sections:
            wrong += names.faults(owner, section)
        faults += [f"{where}: {each}" for each in wrong]
    return faults


def test_sections_are_known_underlined_and_of_their_own_names() -> None:
    sources = [path for path in SOURCE if path.suffix == ".py"]
    trees = {path: ast.parse(path.read_text(), str(path)) for path in sources}
    names = Names(trees.values())
    faults = {ids(path): found for path in sources if (found := faults_of(trees[path], names))}
    assert faults == {}


GOOD = '''
class Thing:
    """One.

    Attributes
    ----------
    size, name
        Of it.
    """

    size: int

    def __init__(self) -> None:
        self.name = ""


class Other(Thing):
    """Inherits.

    Attributes
    ----------
    size
        As above.
    """


def used(x, *rest, **named):
    """Two.

    Parameters
    ----------
    x
        One.
    *rest, named
        Others.

    Returns
    -------
    A number: of what is given.

    Raises
    ------
    ValueError, OSError
        Sometimes.
    """
'''


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("    Parameters\n    ----------", "    Args:", "used: Args: is not underlined"),
        ("    Parameters\n    ----------", "    Parameters", "used: Parameters is not underlined"),
        ("    Raises\n    ------", "    Raises\n    -----", "used: Raises is not underlined in"),
        ("    Raises\n    ------", "    Errors\n    ------", "used: 'Errors' is no section"),
        ("\n\n    Raises", "\n    Raises", "used: no empty line above Raises"),
        ("    Raises\n    ------", "    Returns\n    -------", "used: Returns twice"),
        ("    x\n", "    y\n", "used: Parameters: y is none of its own"),
        ("    x\n        One.", "    x: One.", "used: Parameters: 'x: One.' is not a name"),
        ("    x\n        One.", "    x", "used: Parameters: nothing is said of x"),
        ("    ValueError, OSError", "    ValueErr, OSError", "used: Raises: there is no ValueErr"),
        ("    A number: of what is given.\n", "", "used: Returns says nothing"),
        ("    size, name\n", "    size, title\n", "Thing: Attributes: title is none of its own"),
        ("As above", "See :class:`Thing`", "Other: markup that nothing renders"),
        ("As above", "See [`Thing`][src.thing]", "Other: markup that nothing renders"),
    ],
)
def test_what_is_wrong_is_found(before: str, after: str, fault: str) -> None:
    good, bad = ast.parse(GOOD), ast.parse(GOOD.replace(before, after))
    assert faults_of(good, Names([good])) == []
    assert any(each.startswith(fault) for each in faults_of(bad, Names([bad])))
