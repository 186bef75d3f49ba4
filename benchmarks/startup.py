"""Start-up time of an engine, cold and warm, and compile time at several depths.

    python -m benchmarks.startup                          # the demo model, 0.35 B, and depths
    python -m benchmarks.startup --models demo --depths   # one model, no depths
    python -m benchmarks.startup --models --depths 2 48   # only depths

Each start is that of a new process (`start_probe.py`), measured until ready, until the first token,
until this CPU's kernels and until compiled code serve. Shapes have random weights in bfloat16. A
cold start has an empty cache; a warm one uses what a cold start has built. `python -m src bench
startup` does the same for a server, and shows the phases.

For depths, one shape is compiled without a cache, but with the kernels built, in turns. A compiled
function serves all layers, so the number of graphs is the same at every depth, and compile time
should be, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import Figure, Recorder, add_common, figures_of
from benchmarks.shapes import SHAPES, write_checkpoint
from src.bench.server_process import environment_of
from src.bench.startup import CACHE_VARIABLE
from src.core.config import Config
from src.core.settings import CHECKOUT, load_config

# Seconds from the start of the process.
STARTUP = {
    "ready": "s",
    "first_token": "s",
    "kernels": "s",
    "compiled": "s",
}
# The duration of the compilation, or of loading from the cache; the CPU time of all compilers (also
# of the kernels, if they are built), which other programs affect less; and the number of graphs.
COMPILATION = {"compilation": "s", "compilers_cpu": "s", "graphs": ""}
_DEMO = "demo"
_SECONDS = 1200


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="*", choices=(_DEMO, *SHAPES), default=(_DEMO, "0.35b"))
    parser.add_argument("--depths", nargs="*", type=int, default=(2, 48), metavar="LAYERS")
    parser.add_argument("--depth-shape", choices=SHAPES, default="7m", help="whose layers they are")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides"
    )
    parser.add_argument(
        "--cold-repeats", type=int, default=3, metavar="N", help="of whatever is compiled"
    )
    add_common(parser, repeats=5)
    return parser.parse_args(arguments)


def configuration(directory: Path, overrides: Sequence[str], *, startup: str) -> Config:
    """The configuration for a checkpoint without weights."""
    settings = [
        ("model.path", str(directory)),
        ("model.load_format", "dummy"),
        ("model.max_model_len", "1024"),
        ("cache.memory_bytes", str(512 * 2**20)),
        ("compile.startup", startup),
    ]
    return load_config(None, overrides=[*settings, *_pairs(overrides)])


def _pairs(assignments: Sequence[str]) -> list[tuple[str, str]]:
    parted = (assignment.partition("=") for assignment in assignments)
    return [(name, value) for name, _, value in parted]


def measure(
    config: Config, *, cold_repeats: int, warm_repeats: int
) -> dict[str, list[dict[str, float]]]:
    """The values of ``STARTUP`` and ``COMPILATION`` per start, under ``"cold"`` and ``"warm"``.

    Warm starts use what the last cold one has built; there is at least one cold start.
    """
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for repeat in range(cold_repeats):
        with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as cache:
            found["cold"].append(start(config, cache))
            if repeat == cold_repeats - 1:
                found["warm"] = [start(config, cache) for _ in range(warm_repeats)]
    return found


def measure_depths(configs: Sequence[Config], repeats: int) -> list[list[dict[str, float]]]:
    """The same per configuration and repeat, for cold starts that have the kernels already.

    Every second turn is in reverse order, so that drift affects all configurations.
    """
    found: list[list[dict[str, float]]] = [[] for _ in configs]
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as built:
        _build_kernels(built)
        turn = list(enumerate(configs))
        for _ in range(repeats):
            for index, config in turn:
                with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as cache:
                    shutil.copytree(built, cache, dirs_exist_ok=True)
                    found[index].append(start(config, cache))
            turn.reverse()
    return found


def start(
    config: Config, cache: str, *, patience: float = _SECONDS, seconds: float = _SECONDS
) -> dict[str, float]:
    """Start an engine in a separate process, with this artifact cache.

    Returns those values of `STARTUP` that were reached.

    Parameters
    ----------
    patience
        Seconds to wait for events after the first token.
    seconds
        Time limit of the whole process.

    Raises
    ------
    subprocess.SubprocessError
        It failed, or took too long.
    """
    # Triton's cache is separate from Inductor's.
    environment = environment_of(
        config, **{CACHE_VARIABLE: cache, "TRITON_CACHE_DIR": str(Path(cache) / "triton")}
    )
    # Otherwise cold starts would find Inductor's cache.
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.start_probe", f"{patience:g}"],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=seconds,
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    since = {name: seen[name] - begun for name in STARTUP if name in seen}
    return {**since, **{name: seen[name] for name in COMPILATION}}


def _build_kernels(cache: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "src.ops.build"],
        cwd=CHECKOUT,
        env=environment_of(Config(), **{CACHE_VARIABLE: cache}),
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=_SECONDS,
    )


def record_model(recorder: Recorder, name: str, options: argparse.Namespace) -> None:
    """Measure cold and warm starts in which, as by default, uncompiled code serves meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        if name == _DEMO:
            file = CHECKOUT / "configs" / "demo.toml"
            config = load_config(file, overrides=_pairs(options.overrides))
        else:
            directory = write_checkpoint(Path(folder), name)
            config = configuration(directory, options.overrides, startup="background")
        found = measure(config, cold_repeats=options.cold_repeats, warm_repeats=options.repeats)
        for kind, starts in found.items():
            if starts:
                figures = figures_of({**STARTUP, **COMPILATION}, starts)
                recorder.add(f"{name}, {kind} start", figures, config=config, model=name)


def record_depths(recorder: Recorder, options: argparse.Namespace) -> None:
    """Measure cold compilation at each depth, and the ratio of the last to the first depth."""
    depths, shape = options.depths, options.depth_shape
    with tempfile.TemporaryDirectory() as folder:
        configs = [
            configuration(
                write_checkpoint(Path(folder) / str(layers), shape, layers=layers),
                options.overrides,
                # Nothing is served meanwhile, so compilers need not yield to anything.
                startup="wait",
            )
            for layers in depths
        ]
        found = measure_depths(configs, options.cold_repeats)
        for layers, config, starts in zip(depths, configs, found, strict=True):
            recorder.add(
                f"{shape} with {layers} layers, cold compilation",
                figures_of(COMPILATION, starts),
                config=config,
                shape=shape,
                layers=layers,
            )
        pairs = list(zip(found[0], found[-1], strict=True))
        recorder.add(
            f"{shape}, compilation with {depths[-1]} layers over that with {depths[0]}",
            {
                name: Figure.of("times", [last[name] / first[name] for first, last in pairs])
                for name in ("compilation", "compilers_cpu")
            },
            config=configs[-1],
            shape=shape,
            depths=list(depths),
        )


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    recorder = Recorder("startup", save=not options.no_save)
    for name in options.models:
        record_model(recorder, name, options)
    if options.depths:
        record_depths(recorder, options)


if __name__ == "__main__":
    main()
