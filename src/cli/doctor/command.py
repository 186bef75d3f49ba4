"""The command ``doctor``: runs all checks and says what is slow or missing."""

from __future__ import annotations

import argparse
import logging
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from src.cli.doctor import kernels, machine, model, plugins, software
from src.cli.doctor.finding import Finding, run_check
from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.cli.serve import add_address
from src.observability.logs import setup_logging

EXIT_BROKEN: Final = 1
_MARKS: Final = {"good": "ok", "slow": "SLOW", "broken": "BROKEN", "unchecked": "?"}
_COLUMNS: Final = 100


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(
        commands,
        "doctor",
        "Check this installation: say what is slow or missing, and the command that mends it. "
        "Exit code 1 if a server would not work.",
        run,
    )
    add_address(parser)
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="load the model too, and ask it for vectors, labels or scores",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # What would be logged is among the findings.
    setup_logging("error")
    logging.captureWarnings(True)
    config = config_of(arguments)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "python": software.python,
        "packages": software.packages,
        "plugins": partial(plugins.installed, config),
        "torch": kernels.torch,
        "compiler": kernels.compiler,
        "kernels": kernels.cpu_kernels,
        "gpu": kernels.gpu,
        "drafts": partial(kernels.drafts, config),
        "memory": machine.memory,
        "cpus": machine.cpus,
        "caches": machine.code_cache,
        "models": machine.model_cache,
        "port": partial(machine.port, arguments, config),
        "tasks": partial(model.tasks, config),
    }
    if arguments.self_test:
        checks["self-test"] = partial(model.self_test, config)
    findings = [found for name, check in checks.items() for found in run_check(name, check)]
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        print("\n".join(_lines(findings)))
    return EXIT_BROKEN if any(each.state == "broken" for each in findings) else 0


def _lines(findings: list[Finding]) -> list[str]:
    width = max(len(each.subject) for each in findings)
    lines = []
    for each in findings:
        head = f"{_MARKS[each.state]:<6}  {each.subject:<{width}}  "
        indent = " " * len(head)
        lines += textwrap.wrap(
            head + each.text,
            _COLUMNS,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        # A command stays on one line, to be copied.
        if each.remedy is not None:
            lines.append(f"{indent}-> {each.remedy}")
    counts = {state: sum(each.state == state for each in findings) for state in _MARKS}
    if counts["broken"]:
        last = f"{counts['broken']} broken: a server would not work."
    elif counts["slow"] or counts["unchecked"]:
        last = f"A server works. {counts['slow']} of the findings make it slower than it could be."
    else:
        last = "All is well."
    return [*lines, "", last]
