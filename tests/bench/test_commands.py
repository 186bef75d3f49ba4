"""Each subcommand of ``bench`` from its arguments to its figures, on a real small checkpoint."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypercorn.asyncio.run import worker_serve
from hypercorn.config import Config as HypercornConfig
from hypercorn.utils import wrap_app

from src.bench import errors
from src.bench import startup as starts
from src.bench.drafts import Drafts, read_drafts
from src.bench.startup import Startup, spans_of
from src.bench.target import target_of
from src.cli.main import main
from src.core.config import Config
from src.core.start_timeline import StartSpan
from src.engine.speculation import Widths, verification
from src.http import create_app
from tests.support.checkpoints import make_checkpoint
from tests.support.compiling import compile_options
from tests.support.engines import small_config

pytestmark = pytest.mark.timeout(180)
QUIET = "--disable-tqdm"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("bench") / "tiny",
        tokenizer=True,
        num_hidden_layers=1,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="module")
def settings(checkpoint: Path) -> list[str]:
    return [
        *("--model", str(checkpoint)),
        *compile_options(),
        *("--set", "cache.num_blocks=512"),
        *("--set", "cache.block_size=4"),
        *("--set", "device.num_threads=1"),
    ]


@contextmanager
def serving(config: Config) -> Iterator[str]:
    """A server of this application, in a thread with a loop of its own."""
    app = create_app(config, owns_process=False)
    settings = HypercornConfig()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings.bind = [f"127.0.0.1:{free.getsockname()[1]}"]
    settings.graceful_timeout = 1
    started = threading.Event()
    ending: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        ending.append((asyncio.get_running_loop(), stop))
        sockets = settings.create_sockets()
        started.set()
        await worker_serve(
            wrap_app(app, settings.wsgi_max_body_size, "asgi"),
            settings,
            sockets=sockets,
            shutdown_trigger=stop.wait,
        )

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    yield f"http://{settings.bind[0]}"
    loop, stop = ending[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    config = small_config(checkpoint, model__served_model_name=["tiny"], cache__num_blocks=512)
    with serving(config) as found:
        yield found


def serve(url: str, *options: str) -> int:
    ready = ("--ready-check-timeout-sec", "60")
    return main(["bench", "serve", "--base-url", url, *ready, QUIET, *options])


def figure(report: str, label: str) -> float:
    lines = [line for line in report.splitlines() if line.startswith(label)]
    assert len(lines) == 1, label
    return float(lines[0].removeprefix(label))


def test_serve_measures_completions(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--random-input-len", "24", "--random-output-len", "6", "--num-prompts", "9"]
    traffic = ["--request-rate", "200", "--burstiness", "0.5", "--num-warmups", "2"]
    kept = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--label", "mine"]
    goodput = ["--goodput", "ttft:60000", "e2el:60000", "--metadata", "who=me"]
    secret = ["--header", "x-key=hidden"]
    assert serve(url, *lengths, *traffic, *kept, *goodput, *secret) == 0
    report = capsys.readouterr().out
    assert figure(report, "Successful requests:") == 9
    assert figure(report, "Failed requests:") == 0
    assert figure(report, "Total input tokens:") == 9 * 24
    assert figure(report, "Total generated tokens:") == 9 * 6
    assert figure(report, "Request goodput (req/s):") == figure(
        report, "Request throughput (req/s):"
    )
    assert figure(report, "P99 E2EL (ms):") >= figure(report, "Median TTFT (ms):") > 0
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("mine-200qps-tiny-")
    result = json.loads(file.read_text())
    assert (result["model_id"], result["backend"], result["who"]) == ("tiny", "openai", "me")
    assert (result["completed"], result["total_output_tokens"]) == (9, 54)
    assert result["output_lens"] == [6] * 9
    assert len(result["itls"]) == 9
    assert all(result["generated_texts"])
    assert result["p90_tpot_ms"] > 0
    assert "hidden" not in file.read_text()
    assert {"commit", "command", "machine", "versions"} == set(result["environment"])


def test_serve_tells_of_the_drafts_that_were_right_in_its_run(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs repeat one token, so look-ups know them; and warm-ups are not counted."""
    monkeypatch.setattr(verification, "Widths", partial(Widths, always=True))
    config = small_config(
        checkpoint,
        model__served_model_name=["tiny"],
        cache__num_blocks=512,
        speculation__method="suffix",
    )
    lengths = ["--random-input-len", "12", "--random-output-len", "40", "--num-prompts", "3"]
    options = ["--max-concurrency", "1", "--extra-body", json.dumps({"allowed_token_ids": [5]})]
    kept = ["--save-result", "--result-dir", str(tmp_path)]
    found, counts = [], [Drafts()]
    with serving(config) as url:
        target = target_of("openai", url, "", 0, None, {}, verify=True)
        for name, warm_ups in (("cold", "0"), ("warm", "2")):
            more = ["--num-warmups", warm_ups, "--result-filename", f"{name}.json"]
            assert serve(url, *lengths, *options, *kept, *more) == 0
            report = capsys.readouterr().out
            result = json.loads((tmp_path / f"{name}.json").read_text())
            drafted = result["spec_decode_draft_tokens"]
            accepted = result["spec_decode_accepted_tokens"]
            assert 0 < accepted <= drafted
            assert figure(report, "Draft tokens:") == drafted
            assert figure(report, "Accepted tokens:") == accepted
            rate = result["spec_decode_acceptance_rate"]
            assert rate == pytest.approx(100 * accepted / drafted)
            assert figure(report, "Acceptance rate (%):") == pytest.approx(rate, abs=0.01)
            found.append(drafted)
            counts.append(read_drafts(target))
    cold, warm = (now.since(before) for before, now in pairwise(counts))
    assert found[0] == cold.drafted
    assert 0 < found[1] < warm.drafted


def test_serve_measures_chats_at_a_bounded_concurrency(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--input-len", "10", "--output-len", "4", "--num-prompts", "7"]
    options = ["--backend", "openai-chat", "--max-concurrency", "2", "--temperature", "0"]
    metrics = ["--percentile-metrics", "e2el,client_queue_time", "--metric-percentiles", "50"]
    kept = ["--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.jsonl"]
    # Both spellings of a base URL are one.
    assert serve(url, *lengths, *options, *metrics, *kept) == 0
    assert serve(f"{url}/v1", *lengths, *options, *metrics, *kept) == 0
    report = capsys.readouterr().out
    assert "P50 Client Queue Time (ms):" in report
    assert "TTFT" not in report
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["max_concurrent_requests"] for line in lines] == [2, 2]
    assert all(line["total_output_tokens"] == 28 and "ttfts" not in line for line in lines)


def test_serve_replays_a_trace_and_repeats_prefixes(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [
        {"timestamp": 200 * i, "input_length": 30, "output_length": 3, "hash_ids": [1, i]}
        for i in range(4)
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    kept = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
    options = ["--dataset-name", "timed_trace", "--dataset-path", str(trace)]
    units = ["--timed-trace-sec-multiplier", "0.001", "--result-filename", "trace.json"]
    assert serve(url, *options, *units, *kept) == 0
    result = json.loads((tmp_path / "trace.json").read_text())
    assert result["input_lens"] == [30] * 4
    assert result["output_lens"] == [3] * 4
    begun = result["start_times"]
    # The first may be late, on a busy machine.
    assert all(begun[i] - begun[0] >= 0.2 * i - 0.1 for i in range(4))
    repeated = ["--dataset-name", "prefix_repetition", "--num-prompts", "4", "--output-len", "2"]
    sizes = ["--prefix-repetition-prefix-len", "20", "--prefix-repetition-suffix-len", "4"]
    count = ["--prefix-repetition-num-prefixes", "1", "--max-concurrency", "1"]
    name = ["--result-filename", "prefix.json"]
    assert serve(url, *repeated, *sizes, *count, *kept, *name) == 0
    # The first fills the cache of blocks of 4, the others find 20 tokens there.
    assert json.loads((tmp_path / "prefix.json").read_text())["total_cached_tokens"] >= 3 * 16
    capsys.readouterr()


def test_serve_counts_what_fails_and_goes_on(
    url: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--input-len", "500", "--random-range-ratio", "0.5", "--output-len", "1"]
    assert serve(url, *sizes, "--num-prompts", "12") == 2
    assert "/detokenize: HTTP 400: " in capsys.readouterr().err
    # With a tokenizer here, only the server can refuse.
    assert serve(url, *sizes, "--num-prompts", "12", "--tokenizer", str(checkpoint)) == 0
    told = capsys.readouterr()
    good, bad = (figure(told.out, f"{what} requests:") for what in ("Successful", "Failed"))
    assert good + bad == 12
    assert good > 0
    assert bad > 0
    assert "HTTP 400: this model's maximum context length is 512 tokens" in told.err
    assert serve(url, "--model", "nobody", "--num-prompts", "2", "--input-len", "4") == 1
    told = capsys.readouterr()
    assert figure(told.out, "Failed requests:") == 2
    assert "2 of 2 requests failed:" in told.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--request-rate", "0"], "--request-rate must be over 0"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps and --ramp-up-end-rps"),
        (["--goodput", "itl:3"], "NAME:MILLISECONDS"),
        (["--header", "x"], "--header: expected KEY=VALUE"),
        (["--self-timed"], "--self-timed needs"),
        (["--model", "x", "--dataset-name", "sharegpt"], "sharegpt needs a --dataset-path"),
        (["--base-url", "http://127.0.0.1:1"], "/v1/models"),
        (["--model", "x", "--tokenizer", "/no/such"], "/no/such"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--port", "1", QUIET, *options]) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert error.splitlines()[-1].startswith("slipstream: ")


@pytest.mark.parametrize("option", ["--percentile-metrics=x", "--metric-percentiles=101", "--n=0"])
def test_a_value_that_cannot_be_is_a_usage_error(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "throughput" if option.startswith("--n=") else "serve"
    with pytest.raises(SystemExit) as ended:
        main(["bench", command, option])
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_without_httptools_serve_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(errors.importlib, "import_module", missing)
    with pytest.raises(errors.BenchError, match=r"pip install -e '\.\[bench\]'"):
        errors.require("httptools")


def test_latency_measures_batches(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "latency.json"
    sizes = ["--batch-size", "3", "--n", "2", "--input-len", "8", "--output-len", "5"]
    rounds = ["--num-iters", "3", "--num-iters-warmup", "1", "--output-json", str(file), QUIET]
    assert main(["bench", "latency", *settings, *sizes, *rounds]) == 0
    out = capsys.readouterr().out
    assert "Avg latency: " in out
    assert "99% percentile latency: " in out
    result = json.loads(file.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["output_throughput"] == pytest.approx(30 / result["avg_latency"])
    assert result["config"]["cache"]["enable_prefix_caching"] is False
    assert "http" not in result["config"]
    too_long = ["--input-len", "500", "--output-len", "100", QUIET]
    assert main(["bench", "latency", *settings, *too_long]) == 2
    assert "600 tokens do not fit this model's 512" in capsys.readouterr().err


def test_throughput_counts_tokens(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "throughput.json"
    sizes = ["--num-prompts", "11", "--input-len", "9", "--output-len", "4", "--n", "2"]
    options = ["--output-json", str(file), QUIET]
    assert main(["bench", "throughput", *settings, *sizes, *options]) == 0
    out = capsys.readouterr().out
    assert "Throughput: " in out
    assert "Total num prompt tokens:  99" in out
    assert "Total num output tokens:  88" in out
    result = json.loads(file.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (11, 187)
    assert result["tokens_per_second"] == pytest.approx(187 / result["elapsed_time"])


def test_prefix_cache_tells_what_was_cached(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prefix.json"
    sizes = ["--num-prompts", "3", "--repeat-count", "3", "--input-length-range", "20:24"]
    options = ["--prefix-len", "16", "--output-len", "2", "--max-concurrency", "1", "--sort"]
    assert (
        main(
            [
                "bench",
                "prefix-cache",
                *settings,
                *sizes,
                *options,
                "--output-json",
                str(file),
                QUIET,
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    without, empty, filled = (
        result[name]["cached_fraction"] for name in ("without", "empty_at_first", "filled")
    )
    assert without == 0
    assert 0.5 < empty < filled < 1
    assert "filled" in capsys.readouterr().out
    off = ["--set", "cache.enable_prefix_caching=false"]
    assert main(["bench", "prefix-cache", *settings, *off]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def test_startup_starts_a_server(
    settings: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without a compiler, whose work takes a minute.
    monkeypatch.setenv("CXX", "no-such-compiler")
    file = tmp_path / "startup.json"
    rounds = ["--num-iters-cold", "1", "--num-iters-warm", "0", "--output-json", str(file), QUIET]
    assert main(["bench", "startup", *settings, *rounds]) == 0
    out = capsys.readouterr().out
    assert "COLD STARTUP (1):" in out
    assert "WARM" not in out
    result = json.loads(file.read_text())
    (ready,), (token,) = result["cold_startup_times"], result["cold_first_token_times"]
    assert 0 < ready < token
    assert result["avg_cold_startup_time"] == ready
    (phases,) = result["cold_phases"]
    (began,) = result["cold_phases_began"]
    # Each is told once it has ended, and ready does not end.
    assert [*phases, "ready"] == ["importing", "configuration", "weights", "kv_cache", "ready"]
    assert began.keys() == {*phases, "ready"}
    # They follow each other.
    for phase, following in pairwise([*phases, "ready"]):
        assert began[phase] + phases[phase] == pytest.approx(began[following], abs=0.01)
    assert began["ready"] < ready
    table = out.split("Timeline of the last one:\n")[1].splitlines()
    names = [line[2:16].strip() for line in table[1:]]
    assert sorted(names) == sorted(["process", *phases, "first token", "kernels"])


def test_startup_counts_no_start_that_fills_the_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[str] = []

    def start_once(config: object, cache: str) -> Startup:
        caches.append(cache)
        number = float(len(caches))
        return Startup(
            answers=1, ready=number, first_token=number + 1, kernels=number + 2,
            compiled=number + 3, compilation=3, began={"importing": 0.0, "ready": 0.5},
            phases={"importing": 0.5},
        )  # fmt: skip

    monkeypatch.setattr(starts, "start_once", start_once)
    rounds = ["--num-iters-cold", "2", "--num-iters-warmup", "1", "--num-iters-warm", "2", QUIET]
    assert main(["bench", "startup", *rounds]) == 0
    out = capsys.readouterr().out
    assert len(set(caches[:2])) == 2
    assert len(set(caches[2:])) == 1
    assert len(caches) == 5
    assert not any(Path(cache).exists() for cache in caches)
    assert "Avg startup time: 1.50 seconds" in out
    assert "Avg startup time: 4.50 seconds" in out
    assert main(["bench", "startup", "--num-iters-warmup", "0", QUIET]) == 2


def test_parts_of_a_start_are_counted_from_that_of_the_process() -> None:
    startup = Startup(
        answers=1, ready=4, first_token=4.5, kernels=5, compiled=10.5, compilation=8,
        began={"weights": 2, "importing": 0, "compile": 1.5, "ready": 3},
        phases={"weights": 1, "importing": 2, "compile": 8},
    )  # fmt: skip
    assert spans_of(startup) == [
        StartSpan("process", 0, 1),
        StartSpan("importing", 1, 3),
        StartSpan("compile", 2.5, 10.5),
        StartSpan("weights", 3, 4),
        StartSpan("first token", 4, 4.5),
        StartSpan("kernels", 5, 5),
    ]


def test_kernels_that_were_waited_for_are_one_part() -> None:
    startup = Startup(
        answers=1, ready=4, first_token=4.5, kernels=4.5, compiled=None, compilation=0,
        began={"importing": 0, "kernels": 2, "ready": 3}, phases={"importing": 2, "kernels": 1},
    )  # fmt: skip
    assert [span for span in spans_of(startup) if span.name == "kernels"] == [
        StartSpan("kernels", 3, 4)
    ]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (("--backend", "openai-embeddings"), 1),
        (("--backend", "openai-embeddings", "--texts-per-request", "5"), 5),
    ],
)
def test_serve_measures_vectors(
    url: str, options: tuple[str, ...], texts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--random-input-len", "8", "--num-prompts", "7", "--num-warmups", "1"]
    assert serve(url, *options, *lengths) == 0
    report = capsys.readouterr().out
    assert figure(report, "Successful requests:") == 7
    assert figure(report, "Total input tokens:") >= 7 * texts * 7
    assert figure(report, "Total generated tokens:") == 0
    assert figure(report, "Mean E2EL (ms):") > 0
    assert "TTFT" not in report


def test_texts_of_a_request_are_for_vectors_and_ranks(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(url, "--texts-per-request", "5") == 2
    assert "--texts-per-request is for vectors and ranks" in capsys.readouterr().err
    assert serve(url, "--backend", "vllm-rerank", "--texts-per-request", "1") == 2
    assert "a query and documents are 2" in capsys.readouterr().err
