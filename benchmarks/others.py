"""The same load from other benchmark clients and from ours, on one server.

    python -m benchmarks.others --tools vllm=A/bin/vllm guidellm=B/bin/guidellm aiperf=C/bin/aiperf

Each tool is an executable in an environment of its own; `nox -s clients` creates those of guidellm
and aiperf, `nox -s bench-peers` that of vLLM. One after the other, all send streamed requests of
the same lengths with the same concurrency to one server of the bundled model. Their own result
files are kept in `benchmarks/results/others`. guidellm and aiperf write the text of their prompts
themselves, so lengths differ by a few tokens; and each defines the arrival of a token differently.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import RESULTS, Figure, Recorder
from benchmarks.serving import ready_server
from src.bench.environment import portable
from src.core.settings import CHECKOUT, load_config

MODEL = "demo"
TOKENIZER = "configs/demo"
FOLDER = RESULTS / "others"
SECONDS = 600


class Load(NamedTuple):
    requests: int
    concurrency: int
    input_len: int
    output_len: int


class Tool(NamedTuple):
    """How a tool is called (executable, URL, load, folder), and where its figures are."""

    command: Callable[[str, str, Load, Path], list[str]]
    file: str
    figures: Callable[[Any], dict[str, float]]


def ours(_: str, url: str, load: Load, folder: Path) -> list[str]:
    return [sys.executable, "-m", "src", "bench", "serve", *_vllm_options(url, load, folder)]


def vllm(program: str, url: str, load: Load, folder: Path) -> list[str]:
    return [program, "bench", "serve", *_vllm_options(url, load, folder)]


def _vllm_options(url: str, load: Load, folder: Path) -> list[str]:
    """The options that both vLLM's client and ours take."""
    return [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random"),
        *("--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        *("--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
    ]


def guidellm(program: str, url: str, load: Load, folder: Path) -> list[str]:
    lengths = f"prompt_tokens={load.input_len},output_tokens={load.output_len}"
    return [
        *(program, "run", "--backend", f"kind=openai_http,target={url}"),
        *("--profile", f"kind=concurrent,streams={load.concurrency}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", f"kind=synthetic_text,{lengths}"),
        *("--output", f"kind=json,path={folder / 'result.json'}"),
        "--disable-console-interactive",
    ]


def aiperf(program: str, url: str, load: Load, folder: Path) -> list[str]:
    return [
        *(program, "profile", "--model", MODEL, "--url", url, "--endpoint-type", "completions"),
        *("--streaming", "--concurrency", str(load.concurrency)),
        *("--request-count", str(load.requests), "--isl", str(load.input_len)),
        *("--osl", str(load.output_len), "--tokenizer", TOKENIZER),
        *("--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder), "--ui", "none"),
    ]


def _of_vllm(result: Any) -> dict[str, float]:
    return {
        "completed": result["completed"],
        "output_throughput": result["output_throughput"],
        "ttft_median": result["median_ttft_ms"],
        "itl_median": result["median_itl_ms"],
        "e2e_median": result["median_e2el_ms"],
    }


def _of_guidellm(result: Any) -> dict[str, float]:
    metrics = result["benchmarks"][0]["metrics"]

    def median(name: str) -> float:
        return float(metrics[name]["successful"]["median"])

    return {
        "completed": metrics["request_totals"]["successful"],
        "output_throughput": float(metrics["output_tokens_per_second"]["successful"]["mean"]),
        "ttft_median": median("time_to_first_token_ms"),
        "itl_median": median("inter_token_latency_ms"),
        "e2e_median": 1000 * median("request_latency"),
    }


def _of_aiperf(result: Any) -> dict[str, float]:
    return {
        "completed": result["request_count"]["avg"],
        "output_throughput": result["output_token_throughput"]["avg"],
        "ttft_median": result["time_to_first_token"]["p50"],
        "itl_median": result["inter_token_latency"]["p50"],
        "e2e_median": result["request_latency"]["p50"],
    }


TOOLS = {
    "slipstream": Tool(ours, "result.json", _of_vllm),
    "vllm": Tool(vllm, "result.json", _of_vllm),
    "guidellm": Tool(guidellm, "result.json", _of_guidellm),
    "aiperf": Tool(aiperf, "profile_export_aiperf.json", _of_aiperf),
}
UNITS = {
    "completed": "requests",
    "output_throughput": "tok/s",
    "ttft_median": "ms",
    "itl_median": "ms",
    "e2e_median": "ms",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.others", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--tools", nargs="*", default=[], metavar="NAME=FILE", help=f"of {', '.join(TOOLS)}"
    )
    parser.add_argument("--requests", type=int, default=64, metavar="N")
    parser.add_argument("--concurrency", type=int, default=8, metavar="C")
    parser.add_argument("--input-len", type=int, default=64, metavar="I", help="tokens")
    parser.add_argument("--output-len", type=int, default=32, metavar="O", help="tokens")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args(arguments)


def measure(name: str, program: str, url: str, load: Load, *, save: bool) -> dict[str, float]:
    """Run one tool; saves its result file without this machine's paths."""
    tool = TOOLS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        done = subprocess.run(
            tool.command(program, url, load, folder),
            cwd=CHECKOUT,
            # When offline, aiperf does not find a tokenizer in a directory.
            env={**os.environ, **({} if name == "aiperf" else {"HF_HUB_OFFLINE": "1"})},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        result = json.loads((folder / tool.file).read_text())
    if save:
        FOLDER.mkdir(parents=True, exist_ok=True)
        # Lists with an entry per request or token would take megabytes.
        kept = _shortened(portable(result))
        (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return tool.figures(result)


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value[:4]]
    if isinstance(value, str):
        return value.replace(tempfile.gettempdir(), "TMP")[:400]
    return value


def main() -> None:
    options = parse()
    programs = dict(entry.split("=", 1) for entry in options.tools)
    for name, program in programs.items():
        if name not in TOOLS or shutil.which(program) is None:
            raise SystemExit(f"{name}={program}: no such tool")
    load = Load(options.requests, options.concurrency, options.input_len, options.output_len)
    config = load_config("configs/demo.toml", overrides=[("compile.startup", "wait")])
    tools = " ".join(f"{name}=.../{Path(program).name}" for name, program in programs.items())
    shape = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in load._asdict().items())
    recorder = Recorder(
        "others",
        save=not options.no_save,
        command=f"python -m benchmarks.others --tools {tools} {shape}",
    )
    with ready_server(config) as server:
        for name in ("slipstream", *programs):
            figures = measure(
                name, programs.get(name, ""), server.url, load, save=not options.no_save
            )
            recorder.add(
                f"{name}'s client",
                {key: Figure.of(UNITS[key], [value]) for key, value in figures.items()},
                config=config,
                **load._asdict(),
            )


if __name__ == "__main__":
    main()
