"""Real clients against a real server: `python -m tests.clients [NAME...]`.

Installs every client into environments apart from the project's, starts one server of the bundled
model, runs each client's tests with a limit of time, and prints a table. It fails if a test does. A
client that cannot be installed is reported and left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from src.core.settings import CHECKOUT
from tests.clients.clients import CLIENTS, Client
from tests.clients.environments import Environment, NotInstalled
from tests.http.processes import ServerProcess
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules

HERE = Path(__file__).parent
OUTPUT_LINES = 80
SERVER = {"SLIPSTREAM_CONFIG": "configs/demo.toml"}


@dataclass
class Result:
    """What came of one client."""

    client: Client
    version: str = ""
    exercised: str = ""
    outcome: str = ""
    seconds: float = 0.0
    failed: bool = False


def main() -> int:
    """Run the clients that are asked for, all by default; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--environments", type=Path, default=CHECKOUT / ".nox" / "clients")
    parser.add_argument("--server", help="a server that runs already, instead of one of its own")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if not options.names or client.name in options.names]
    root = options.environments.resolve()
    missing = install({client.environment for client in chosen}, root)
    if options.server:
        results = run_all(chosen, missing, root, options.server)
    else:
        with ExitStack() as stack:
            server = stack.enter_context(ServerProcess.hypercorn(SERVER))
            server.wait_ready()
            if any(client.reads_vectors for client in chosen):
                os.environ["CLIENTS_ENCODER"] = stack.enter_context(encoder()).url
            results = run_all(chosen, missing, root, server.url)
            if server.get("/health").status_code != 200:
                print(f"The server is not healthy afterwards:\n{server.output}")
                return 1
            server.terminate()
            server.wait_exit()
    print(table(results))
    return int(
        any(result.failed for result in results) or len(missing) == len(environments(chosen))
    )


@contextmanager
def encoder() -> Iterator[ServerProcess]:
    """A server of a small encoder with random weights."""
    with tempfile.TemporaryDirectory(prefix="slipstream-clients-") as scratch:
        directory = make_encoder(Path(scratch, "encoder"), "bert")
        save_encoder_tokenizer(directory)
        save_modules(directory, pooling={"pooling_mode": "mean"})
        with ServerProcess.hypercorn({"SLIPSTREAM_MODEL": str(directory)}) as server:
            server.wait_ready()
            yield server


def environments(clients: list[Client]) -> set[Environment]:
    return {client.environment for client in clients}


def install(wanted: set[Environment], root: Path) -> dict[Environment, str]:
    """Install the environments one after the other; why those that are missing are missing."""
    missing: dict[Environment, str] = {}
    for environment in sorted(wanted, key=lambda each: each.name):
        print(f"installing {environment.name}: {', '.join(environment.requirements)}", flush=True)
        try:
            environment.install(root)
        except NotInstalled as error:
            missing[environment] = str(error)
            print(f"  not installed: {error}", flush=True)
    return missing


def run_all(
    clients: list[Client], missing: dict[Environment, str], root: Path, url: str
) -> list[Result]:
    results = []
    for client in clients:
        if client.environment in missing:
            words = f"not installed: {missing[client.environment]}"
            results.append(Result(client, outcome=words))
            continue
        result = run(client, root, url)
        print(
            f"{client.name} {result.version}: {result.outcome} in {result.seconds:.0f} s",
            flush=True,
        )
        results.append(result)
    return results


def run(client: Client, root: Path, url: str) -> Result:
    """Run one client's tests in a process group of its own, which is ended whole."""
    result = Result(client, client.environment.version(root, client.package))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slipstream-clients-") as scratch:
        report, log = Path(scratch, "report.xml"), Path(scratch, "log.txt")
        with log.open("w") as stream:
            process = subprocess.Popen(
                command_of(client, root, report),
                cwd=CHECKOUT,
                env={
                    **client.environment.variables(root),
                    "CLIENTS_SERVER": url,
                    "CLIENTS_ENCODER": os.environ.get("CLIENTS_ENCODER", ""),
                    "CLIENTS_SCRATCH": scratch,
                },
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(client.seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_group(process)
        result.seconds = time.monotonic() - started
        passed, failed = read_report(report)
        result.exercised = ", ".join(passed)
        result.failed = status != 0 or bool(failed) or not passed
        result.outcome = outcome(status, passed, failed, client)
        if result.failed:
            print("\n".join(log.read_text(errors="replace").splitlines()[-OUTPUT_LINES:]))
    return result


def command_of(client: Client, root: Path, report: Path) -> list[str]:
    """The command that runs a client's tests and writes what came of each into ``report``."""
    script = HERE / client.script
    if script.suffix == ".mjs":
        # Node looks for packages beside the script.
        copies = client.environment.path(root)
        for module in HERE.glob("*.mjs"):
            shutil.copy(module, copies)
        reporters = ["--test-reporter=spec", "--test-reporter-destination=stdout"]
        reporters += ["--test-reporter=junit", f"--test-reporter-destination={report}"]
        return ["node", "--test", *reporters, str(copies / script.name)]
    python = sys.executable if client.outside else client.environment.programs(root) / "python"
    settings = ["-c", str(HERE / "settings.ini"), "--rootdir", str(CHECKOUT)]
    return [str(python), "-m", "pytest", *settings, f"--junitxml={report}", str(script)]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever the tests left behind, and the tests themselves where they hang."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_report(report: Path) -> tuple[list[str], list[str]]:
    """What passed and what failed, in a few words each, once for all values of its parameters."""
    if not report.is_file() or not report.stat().st_size:
        return [], []
    passed: dict[str, None] = {}
    failed: dict[str, None] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
        bad = case.find("failure") is not None or case.find("error") is not None
        (failed if bad else passed).setdefault(name)
    return list(passed), list(failed)


def outcome(status: int | None, passed: list[str], failed: list[str], client: Client) -> str:
    if status is None:
        return f"not done after {client.seconds:.0f} s"
    if failed:
        return f"failed: {', '.join(failed)}"
    if status or not passed:
        return f"failed with status {status}"
    return "ok"


def table(results: list[Result]) -> str:
    """Client, version, result, time and what was exercised, in Markdown."""
    lines = ["| Client | Version | Exercised | Result | Seconds |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.client.name} | {r.version} | {r.exercised} | {r.outcome} | {r.seconds:.0f} |"
        for r in results
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
