"""Imports go down the house, never up, and never across where the plan has a wall.

Every import of every file counts: those inside functions and those for type checkers only too,
because a dependency is one whether or not it costs anything at run time.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from src.core.settings import CHECKOUT

SOURCE = CHECKOUT / "src"
FILES = sorted(SOURCE.rglob("*.py"))

FLOORS = {
    "core": 0,
    "ops": 1,
    "distributed": 1,
    "text": 1,
    "observability": 1,
    "models": 2,
    "compile": 2,
    "engine": 3,
    "bench": 4,
    "http": 4,
    "cli": 4,
    "__main__": 4,
}
# Packages of one floor do not import one another, except these.
SIDEWAYS = {
    ("cli", "http"),  # `serve` runs the application
    ("cli", "bench"),
    ("__main__", "cli"),
}
# The top of the package offers names of any floor, resolved when they are asked for.
FRONT_DOOR = "src"

# Rooms of the engine: the pure half plans with integers, the device half computes with torch.
PURE = {"scheduling", "kv"}
DEVICE = {"devices", "sampling", "grammar", "speculation", "execution", "drafters"}
# Joins the halves: a file at the top of the engine, or a room.
SHELL = {
    "loop",
    "startup",
    "loading",
    "client",
    "engine_thread",
    "llm",
    "background_tasks",
    "own_loop",
    "plugins",
    "requests",
    "sizing",
    "telemetry",
}
# Rooms of one half know those before them in this order, and themselves.
ROOMS_IN_ORDER = (
    ("kv", "scheduling"),
    ("devices", "sampling", "grammar", "speculation", "execution", "drafters"),
)
KNOWS_BOTH_HALVES = {
    "loop",  # drives one with the other
    "startup",  # builds both, and hands them to the loop
}
# Rooms of the HTTP half know those before them in this order. Beside them lie the application and
# its table of endpoints, which know all of them.
HTTP_ROOMS = (
    "protocol",
    "hypercorn",
    "server",
    "generation",
    "chat",
    "completions",
    "responses",
    "messages",
    "embeddings",
    "ranks",
    "tokens",
    "admin",
    "playground",
    "openapi",
)
HTTP_FILES = {"application", "endpoints"}
# Rooms of the ops. Those of one subject know the files beside the rooms and themselves; the kernel
# library's runtime knows all subjects, and its build knows the runtime too.
OP_SUBJECTS = {"attention", "projections", "states", "sampling", "drafts"}
OP_ROOMS = OP_SUBJECTS | {"runtime", "build"}
# Same calls, same plans: no device, no clock, no randomness, no order of an event loop.
IMPURE = {"torch", "numpy", "time", "datetime", "random", "secrets", "uuid", "asyncio", "threading"}


def module_of(path: Path) -> str:
    parts = path.relative_to(CHECKOUT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = CHECKOUT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in the file; of `from a import b` it is `a.b` if a module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                inner = node.module.startswith("src") and is_module(whole)
                found.append((node.lineno, whole if inner else node.module))
        elif is_dynamic_import(node):
            found.append((node.lineno, str(node.args[0].value)))
    return found


def is_dynamic_import(node: ast.AST) -> bool:
    """`importlib.import_module("...")` with a literal name."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else None
    return name == "import_module" and isinstance(node.args[0], ast.Constant)


IMPORTS = {path: imports_of(path) for path in FILES}


def package_of(module: str) -> str | None:
    """`engine` of `src.engine.loop`; None outside of the house and for its front door."""
    parts = module.split(".")
    return parts[1] if parts[0] == "src" and len(parts) > 1 else None


def ids(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports_in(package: str | None) -> list[tuple[Path, int, str]]:
    """(file, line, imported module) of a package of `src`."""
    return [
        (path, line, imported)
        for path in FILES
        if package_of(module_of(path)) == package
        for line, imported in IMPORTS[path]
    ]


def engine_part(module: str) -> str | None:
    """`loop` of `src.engine.loop`, `sampling` of `src.engine.sampling.state`."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["src", "engine"] and len(parts) > 2 else None


def test_every_package_has_its_floor() -> None:
    packages = {package_of(module_of(path)) for path in FILES} - {None}
    assert packages == set(FLOORS)


@pytest.mark.parametrize("here", [*FLOORS, None])
def test_nobody_imports_upwards_or_across(here: str | None) -> None:
    for path, line, imported in imports_in(here):
        there = package_of(imported)
        where = f"{ids(path)}:{line} imports {imported}"
        if imported == FRONT_DOOR:
            assert here is None or FLOORS[here] == 4, (
                f"{where}: below F4 nobody uses the front door"
            )
        if here is None or there is None or here == there:
            continue
        assert FLOORS[there] <= FLOORS[here], f"{where}: upwards"
        if FLOORS[there] == FLOORS[here]:
            assert (here, there) in SIDEWAYS, f"{where}: across"


def test_core_needs_the_standard_library_and_msgspec_only() -> None:
    allowed = sys.stdlib_module_names | {"msgspec", "src"}
    for path, line, imported in imports_in("core"):
        assert imported.split(".")[0] in allowed, f"{ids(path)}:{line} imports {imported}"


@pytest.mark.parametrize("package", ["core", "text", "observability", "http", "cli", "bench"])
def test_no_torch_in(package: str) -> None:
    for path, line, imported in imports_in(package):
        assert imported.split(".")[0] != "torch", f"{ids(path)}:{line} imports {imported}"


def test_those_above_know_of_the_engine_its_client_only() -> None:
    # `replay` is for a log that came from elsewhere: it needs no engine.
    allowed = {
        "client",
        "llm",
        "requests.admissions",
        "requests.embedding_run",
        "requests.predictions",
        "requests.prompts",
        "requests.submission",
        "scheduling.replay",
    }
    # `plan` asks how an engine would be sized, without one.
    planned = {"sizing.answer", "sizing.planning"}
    # `doctor` asks who would guess next tokens, and whether the weights of these fit.
    examined = {"speculation.choice", "drafters.loading"}
    # `simulate` asks the scheduler what it would do, and when, in a time of its own.
    simulated = {"scheduling.scheduler", "scheduling.admission", "scheduling.pace"}
    of_package = {
        "http": allowed,
        "cli": allowed | planned | examined,
        "bench": allowed | simulated,
    }
    for package, parts in of_package.items():
        for path, line, imported in imports_in(package):
            part = imported.removeprefix("src.engine.") if engine_part(imported) else None
            assert part is None or part in parts, f"{ids(path)}:{line} imports {imported}"


def test_every_module_of_the_engine_belongs_to_a_part() -> None:
    parts = {engine_part(module_of(path)) for path in FILES} - {None}
    assert parts == PURE | DEVICE | SHELL


def test_the_page_of_the_design_names_every_part_of_the_engine() -> None:
    page = (CHECKOUT / "docs" / "design.md").read_text()
    rooms = re.findall(r"^\| `([\w.]+?)/?` \| (pure|device|shell) \|", page, re.MULTILINE)
    named = {half: {room for room, of in rooms if of == half} for _, half in rooms}
    rooms_of_shell = {"requests", "sizing", "telemetry"}
    assert named == {
        "pure": PURE,
        "device": DEVICE,
        "shell": {part if part in rooms_of_shell else f"{part}.py" for part in SHELL},
    }


def test_every_file_of_a_room_is_named_on_the_page_of_the_design() -> None:
    page = (CHECKOUT / "docs" / "design.md").read_text()
    for path in FILES:
        module = module_of(path)
        if engine_part(module) and path.name != "__init__.py":
            assert f"`{path.stem}`" in page or f"`{path.name}`" in page, ids(path)


def test_rooms_of_a_half_know_those_before_them() -> None:
    for order in ROOMS_IN_ORDER:
        for path, line, imported in imports_in("engine"):
            here, there = engine_part(module_of(path)), engine_part(imported)
            if here in order and there in order:
                where = f"{ids(path)}:{line} imports {imported}"
                assert order.index(there) <= order.index(here), f"{where}: {order}"


def test_rooms_of_the_shell_do_not_know_each_other() -> None:
    """Two folders may know each other in one direction only."""
    rooms = {"requests", "sizing", "telemetry"}
    knows: dict[tuple[str, str], str] = {}
    for path, line, imported in imports_in("engine"):
        here, there = engine_part(module_of(path)), engine_part(imported)
        if here in rooms and there in rooms and here != there:
            knows[str(here), str(there)] = f"{ids(path)}:{line} imports {imported}"
    mutual = [(where, knows[b, a]) for (a, b), where in knows.items() if (b, a) in knows]
    assert not mutual


def http_part(module: str) -> str | None:
    """`server` of `src.http.server.call`, `application` of `src.http.application`."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["src", "http"] and len(parts) > 2 else None


def test_rooms_of_http_know_those_before_them() -> None:
    parts = {http_part(module_of(path)) for path in FILES} - {None}
    assert parts == {*HTTP_ROOMS, *HTTP_FILES}
    for path, line, imported in imports_in("http"):
        here, there = http_part(module_of(path)), http_part(imported)
        if here in HTTP_ROOMS and there is not None:
            where = f"{ids(path)}:{line} imports {imported}"
            assert there in HTTP_ROOMS, f"{where}: upwards"
            assert HTTP_ROOMS.index(there) <= HTTP_ROOMS.index(here), f"{where}: {HTTP_ROOMS}"


def op_room(module: str) -> str:
    """`states` of `src.ops.states.linear_recurrence`; empty for a file beside the rooms."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[2] in OP_ROOMS else ""


def op_rooms_known(room: str) -> set[str]:
    """Rooms whose files a file of a room may use, beside its own and those that lie in none."""
    return {"runtime": OP_SUBJECTS, "build": OP_SUBJECTS | {"runtime"}}.get(room, set())


def test_rooms_of_the_ops_know_those_before_them() -> None:
    folders = {path.name for path in (SOURCE / "ops").iterdir() if path.name[0] != "_"}
    assert {name for name in folders if "." not in name} == OP_ROOMS
    for path, line, imported in imports_in("ops"):
        here, there = op_room(module_of(path)), op_room(imported)
        where = f"{ids(path)}:{line} imports {imported}"
        # The list of all ops is there for those who install kernels.
        is_list = imported == "src.ops" or ids(path) == "ops/__init__.py"
        assert is_list or there in {"", here, *op_rooms_known(here)}, where
        assert imported != "src.ops" or here == "build", where


def test_kernels_know_the_runtime_and_their_own_room() -> None:
    """In C++ it is the other way round: kernels of all subjects run on the runtime's threads."""
    quoted = re.compile(r'^#include "(.+)"', re.MULTILINE)
    for path in sorted((SOURCE / "ops").rglob("*.*")):
        if path.suffix not in (".h", ".cpp"):
            continue
        for header in quoted.findall(path.read_text()):
            assert (SOURCE / "ops" / header).is_file(), f"{ids(path)} includes {header}"
            room = header.split("/")[0]
            assert room in ("runtime", path.parent.name), f"{ids(path)} includes {header}"


def test_files_that_need_triton_say_so() -> None:
    """No other file of the ops imports Triton; by name, and when it is needed, it may."""
    for path in sorted((SOURCE / "ops").rglob("*.py")):
        if path.stem.endswith("_triton"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                needs = name.split(".")[0] == "triton" or "_triton" in name
                assert not needs, f"{ids(path)}:{node.lineno} imports {name}"


def test_no_imports_in_a_circle() -> None:
    """Those for type checkers only count too: two files that need each other are one subject."""
    graph = {
        module_of(path): {name for _, name in IMPORTS[path] if name.startswith("src.")}
        for path in FILES
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module in done or module not in graph:
            return
        for name in sorted(graph[module] - {module}):
            visit(name, (*way, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_the_halves_of_the_engine_meet_in_the_loop_only() -> None:
    for path, line, imported in imports_in("engine"):
        here, there = engine_part(module_of(path)), engine_part(imported)
        where = f"{ids(path)}:{line} imports {imported}"
        if here in PURE and there is not None:
            assert there in PURE, f"{where}: the pure half knows itself only"
        if here in DEVICE and there is not None:
            assert there in DEVICE, f"{where}: the device half knows itself only"
    for path in FILES:
        module = module_of(path)
        if engine_part(module) in SHELL - KNOWS_BOTH_HALVES:
            known = {engine_part(imported) for _, imported in IMPORTS[path]}
            assert not (known & PURE and known & DEVICE), f"{ids(path)} knows both halves"


def test_the_pure_half_has_no_device_no_clock_and_no_chance() -> None:
    for path, line, imported in imports_in("engine"):
        if engine_part(module_of(path)) in PURE:
            assert imported.split(".")[0] not in IMPURE, f"{ids(path)}:{line} imports {imported}"


def test_nobody_imports_without_the_package_name() -> None:
    # With src/ on sys.path, `src/http` would shadow the standard library's `http`.
    assert "pythonpath" not in (CHECKOUT / "pyproject.toml").read_text()
    names = {path.name for path in SOURCE.iterdir() if path.is_dir()} - sys.stdlib_module_names
    for path in FILES:
        for line, imported in IMPORTS[path]:
            assert imported.split(".")[0] not in names, f"{ids(path)}:{line} imports {imported}"


def test_no_import_hides_from_these_laws(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import torch.nn as nn\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from src.engine import loop\n"
        "def late():\n    from src.engine.execution.worker import Worker\n"
        "    importlib.import_module('src.http')\n"
    )
    assert [name for _, name in sorted(imports_of(file))] == [
        "torch.nn",
        "typing",
        "src.engine.loop",
        "src.engine.execution.worker",
        "src.http",
    ]


def test_weights_lie_below_the_layers_and_loading_above_the_model() -> None:
    """A format knows no file, no layer and no kernel library; no layer knows how it is filled."""
    of_loading = re.compile(r"models/(loading/|generic/|implementations\.py|__init__\.py)")
    for path, line, imported in imports_in("models"):
        where = f"{ids(path)}:{line} imports {imported}"
        if ids(path).startswith("models/weights/"):
            is_known = re.match(r"src\.models\.(weights|fields)\b|src\.(ops|core)\b", imported)
            assert is_known or not imported.startswith("src."), where
            assert not re.match(r"src\.ops\.(runtime|build)\b", imported), where
        if imported.startswith("src.models.loading"):
            assert of_loading.match(ids(path)), where
