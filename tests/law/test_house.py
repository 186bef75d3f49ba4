"""House rules that a reader of a diff would otherwise have to check by eye."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.core.settings import CHECKOUT

MAX_LINES = 800
MAX_FUNCTION_LINES = 80
"""Of a function without its documentation, and without functions inside it."""
TEXT_SUFFIXES = {".py", ".md", ".toml", ".h", ".cpp", ".ipynb", ".yml", ".yaml", ".cfg", ".txt"}


def project_files() -> list[Path]:
    """Files that git knows or would take in; every file where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        roots = ("src", "tests", "docs", "benchmarks", "configs")
        return sorted(path for root in roots for path in (CHECKOUT / root).rglob("*.*"))
    paths = (CHECKOUT / name for name in listed.stdout.split("\0") if name)
    return sorted(path for path in paths if path.is_file())


FILES = [path for path in project_files() if path.suffix in TEXT_SUFFIXES]
PYTHON = [path for path in FILES if path.suffix == ".py"]
SOURCE = [path for path in FILES if path.is_relative_to(CHECKOUT / "src")]
TESTS = [path for path in PYTHON if path.is_relative_to(CHECKOUT / "tests")]


def ids(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


def nodes_of(paths: list[Path]) -> Iterator[tuple[Path, ast.AST]]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            yield path, node


def lines_of(path: Path) -> list[tuple[int, str]]:
    return list(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))


def test_no_file_has_two_subjects() -> None:
    long = {ids(path): len(lines_of(path)) for path in SOURCE}
    assert not {name: count for name, count in long.items() if count > MAX_LINES}


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    apart = [each for each in ast.walk(function) if isinstance(each, type(function))][1:]
    if ast.get_docstring(function) is not None:
        apart.append(function.body[0])
    lines = set(range(function.lineno, (function.end_lineno or 0) + 1))
    for node in apart:
        lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def test_no_function_is_too_long_to_be_read_at_once() -> None:
    """Kernels of Triton are apart: they cannot be cut without a cost."""
    long = {}
    for path, node in nodes_of([path for path in SOURCE if path.suffix == ".py"]):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_kernel = any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
        if not is_kernel and _length(node) > MAX_FUNCTION_LINES:
            long[f"{ids(path)}:{node.name}"] = _length(node)
    assert not long


def test_every_package_and_module_says_what_it_is() -> None:
    silent = [
        ids(path)
        for path in SOURCE
        if path.suffix == ".py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_git_ignores_no_source() -> None:
    """A name in `.gitignore` may be that of a folder of ours, whose files would be left behind."""
    names: list[str] = []
    # What is there alone, and what git has all the same.
    for kind in ("--others", "--cached"):
        command = ["git", "ls-files", kind, "--ignored", "--exclude-standard", "-z"]
        try:
            listed = subprocess.run(
                command, cwd=CHECKOUT, capture_output=True, check=True, text=True
            )
        except (OSError, subprocess.CalledProcessError):
            return
        names += listed.stdout.split("\0")
    ours = map(Path, names)
    places = ("src", "tests", "benchmarks", "docs", "configs")
    assert not [
        path.as_posix() for path in ours if path.suffix in TEXT_SUFFIXES and path.parts[0] in places
    ]


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in SOURCE if path.suffix == ".py"}
    assert not [ids(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_no_tool_passes_over_a_folder(request: pytest.FixtureRequest) -> None:
    """Tools have lists of names, such as `build`, under which they look for no code."""
    folders = {part for path in PYTHON for part in path.relative_to(CHECKOUT).parts[:-1]}
    lint = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["ruff"]["exclude"]
    for pattern in (*request.config.getini("norecursedirs"), *lint):
        assert not fnmatch.filter(folders, pattern), pattern
    there = {path for room in ("src", "tests") for path in (CHECKOUT / room).rglob("*.py")}
    assert not [ids(path) for path in there - set(FILES)], "git ignores these"


def test_tests_lie_in_the_rooms_of_what_they_test() -> None:
    """Packages of `src` have their tests in folders of the same names."""
    # Captured steps on a GPU: whoever has one runs this file by its path.
    apart = {Path("engine/graphs")}
    rooms = {path.parent.relative_to(CHECKOUT / "src") for path in SOURCE}
    rooms |= {parent for room in rooms for parent in room.parents}
    tests = {path for path in TESTS if path.name.startswith("test_")}
    folders = {path.parent.relative_to(CHECKOUT / "tests") for path in tests}
    packages = {room.parts[0] for room in rooms if room.parts}
    ours = {folder for folder in folders if folder.parts and folder.parts[0] in packages}
    assert ours - rooms == apart


def test_a_silenced_type_error_says_which() -> None:
    bare = re.compile(r"#\s*type:\s*ignore(?!\[[a-z, -]+\])")
    found = [
        f"{ids(path)}:{number}"
        for path in PYTHON
        for number, line in lines_of(path)
        if bare.search(line) and path != Path(__file__)
    ]
    assert not found


def test_a_silenced_lint_rule_says_which() -> None:
    bare = re.compile(r"#\s*noqa(?!: [A-Z]+[0-9]+)")
    found = [
        f"{ids(path)}:{number}"
        for path in PYTHON
        for number, line in lines_of(path)
        if bare.search(line) and path != Path(__file__)
    ]
    assert not found


def test_no_error_is_swallowed_whole() -> None:
    for path, node in nodes_of(PYTHON):
        if isinstance(node, ast.ExceptHandler):
            where = f"{ids(path)}:{node.lineno}"
            assert node.type is not None, f"{where}: bare except"
            silent = all(isinstance(step, ast.Pass) for step in node.body)
            broad = ast.unparse(node.type) in ("Exception", "BaseException")
            assert not (silent and broad), f"{where}: every error is dropped without a word"


def test_a_test_is_skipped_for_want_of_a_machine_only() -> None:
    """A skip has a condition about the machine, in one of these words, or it hides a test."""
    machine = ("cuda", "gpu", "platform", "machine", "version", "executable", "which")
    for path, node in nodes_of(TESTS):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            hidden = ("pytest.skip", "pytest.xfail", "pytest.mark.skip", "pytest.mark.xfail")
            assert name not in hidden, f"{ids(path)}:{node.lineno}: {name} hides a test"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.skipif":
            condition = ast.unparse(node.args[0]).lower()
            where = f"{ids(path)}:{node.lineno}"
            assert any(word in condition for word in machine), f"{where}: skipped if {condition}"


def test_the_project_speaks_of_itself_only() -> None:
    """No path of a developer's machine, and no number that only a tracker can explain."""
    places = [r"/work\b", r"/root/", r"/home/[a-z]", r"/Users/[a-z]", r"/tmp/[a-z]"]
    machine = re.compile(r"(?<![\w./:-])(?:" + "|".join(places) + ")")
    tracker = re.compile(
        r"(?<![\w&/(\[\"'`#])#[0-9]+\b(?!;)|\b(?:issue|PR|pull request) #?[0-9]+\b"
    )
    found = []
    for path in FILES:
        if path == Path(__file__) or path.suffix in (".h", ".cpp"):
            continue
        for number, line in lines_of(path):
            if machine.search(line) or tracker.search(line):
                found.append(f"{ids(path)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
