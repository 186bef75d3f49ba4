"""Runs pytest in children of a process that has imported already what takes longest to import.

A program of its own: it reads requests, one JSON object a line, and answers each in the same way.
What is under test is imported by the children alone, as the tree has it by then.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

_SLOW = (
    *("pytest", "hypothesis", "torch", "numpy", "msgspec", "httpx", "anyio", "starlette", "h11"),
    *("llguidance", "tokenizers", "jinja2", "prometheus_client", "safetensors.torch"),
    *("opentelemetry.sdk.trace", "hypothesis.strategies", "jsonschema"),
)


def main() -> None:
    for name in _SLOW:
        importlib.import_module(name)
    sys.path[0] = os.getcwd()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["tests"], request["seconds"], request["variables"])))
        sys.stdout.flush()


def run(tests: list[str], seconds: float, variables: dict[str, str]) -> tuple[int | None, str]:
    """Exit status of pytest, none if the time was over, and the end of what it said."""
    output = Path("pytest-output.txt")
    child = os.fork()
    if child == 0:
        be_pytest(tests, variables, output)
    try:
        is_over = waited(child, time.monotonic() + seconds)
    finally:
        # With all that the tests have started; also where somebody interrupts this.
        os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not is_over:
        return None, ""
    return os.waitstatus_to_exitcode(status), output.read_text(errors="replace")[-2000:]


def waited(child: int, deadline: float) -> bool:
    """Whether a child has ended by then; it is still to be waited for."""
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def be_pytest(tests: list[str], variables: dict[str, str], output: Path) -> None:
    os.setsid()
    os.environ.update(variables)
    file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, standard in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(ours, standard)
    # Of its plugins, which are imported already.
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    # As in `nox -s tests`: what needs a GPU fails without one.
    chosen = ("-m", "not gpu")
    sys.argv = ["pytest", "-x", "-q", "--no-header", "--tb=short", *quiet, *chosen, *tests]
    status = 3
    try:
        status = int(importlib.import_module("pytest").main(sys.argv[1:]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # At once: what is left of the parent is not this process's to clean up.
        os._exit(status)


if __name__ == "__main__":
    main()
