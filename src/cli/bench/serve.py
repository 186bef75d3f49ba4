"""``python -m src bench serve``: loads any server with OpenAI's protocol."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import uuid
from typing import TYPE_CHECKING, Any, Final

from src.cli.bench.dataset_options import add_dataset, ignores_eos, natural, positive, samples_of
from src.cli.bench.result_options import (
    add_report,
    add_results,
    metrics_of,
    pairs_of,
    save_result,
)
from src.cli.options import Commands
from src.core.errors import ConfigError
from src.core.sampler_parameters import SAMPLER_NAMES, SAMPLER_PARAMETERS

if TYPE_CHECKING:
    from src.bench.answers import Answer
    from src.bench.codecs import Codec
    from src.bench.drafts import Drafts
    from src.bench.load import Run
    from src.bench.openai_client import OpenAIClient
    from src.bench.samples import Sample
    from src.bench.target import Target

ABOUT: Final = "Load on a server that speaks OpenAI's protocol, this one or another."
EXIT_ALL_FAILED: Final = 1
# A query and the documents of a request for ranks.
_RANKED: Final = 11


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser: argparse.ArgumentParser = commands.add_parser("serve", help=ABOUT, description=ABOUT)
    parser.set_defaults(run=run)
    _add_target(parser)
    _add_traffic(parser)
    add_dataset(parser)
    _add_sampling(parser)
    add_report(parser)
    add_results(parser)


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server (its key is read from OPENAI_API_KEY)")
    group.add_argument(
        "--backend", default="openai",
        choices=(
            "openai", "openai-chat", "vllm", "vllm-chat", "openai-embeddings", "vllm-rerank"
        ),
        help="completions, chats, vectors or ranks (default: openai, which is completions)",
    )  # fmt: skip
    group.add_argument("--base-url", metavar="URL", help="with or without /v1 at its end")
    group.add_argument("--host", default="127.0.0.1", help="without --base-url")
    group.add_argument("--port", type=int, default=8000, help="without --base-url")
    group.add_argument(
        "--endpoint", metavar="PATH",
        help="default: by the backend: /v1/completions, /v1/chat/completions, /v1/embeddings or "
        "/v1/rerank",
    )  # fmt: skip
    group.add_argument("--model", help="its name there (default: the first of /v1/models)")
    group.add_argument("--served-model-name", metavar="NAME", help="where it is not --model")
    group.add_argument(
        "--tokenizer", metavar="PATH",
        help="directory or hub id, for the lengths of prompts (default: --model if it is a "
        "directory, else the server's own by /tokenize)",
    )  # fmt: skip
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE")
    group.add_argument("--insecure", action="store_true", help="check no certificates")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="S",
        help="wait so long for the server (default: 0)",
    )  # fmt: skip


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R",
        help="requests per second (default: inf, all at once)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="B",
        help="shape of the gamma distribution of intervals: 1 is a Poisson process, less comes in "
        "bursts, inf like a clock (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=positive, metavar="N", help="requests under way at most"
    )
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"))
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R")
    group.add_argument(
        "--self-timed", action=argparse.BooleanOptionalAction, default=None,
        help="send at a trace's timestamps (default: with timed_trace)",
    )  # fmt: skip
    group.add_argument(
        "--texts-per-request", type=positive, metavar="N",
        help="texts of a request for vectors (default: 1), or a query and documents of one for "
        "ranks (default: 11)",
    )  # fmt: skip
    group.add_argument(
        "--num-warmups", type=natural, default=0, metavar="N",
        help="requests before, which are not counted (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--request-id-prefix", default=f"bench-{uuid.uuid4().hex[:8]}-", metavar="TEXT",
        help="of x-request-id",
    )  # fmt: skip


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (the server's own defaults where not given)")
    for each in SAMPLER_PARAMETERS:
        group.add_argument(f"--{each.name.replace('_', '-')}", type=each.kind, metavar="X")
    group.add_argument("--logprobs", type=int, metavar="N")
    group.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="more fields of each request"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from src.bench.target import codec_of, target_of, wait_ready

    times_of(arguments, [])
    metrics_of(arguments, [], 1.0)
    target = target_of(
        arguments.backend,
        arguments.base_url,
        arguments.host,
        arguments.port,
        arguments.endpoint,
        pairs_of("--header", arguments.header),
        verify=not arguments.insecure,
    )
    if arguments.ready_check_timeout_sec > 0:
        wait_ready(target, arguments.ready_check_timeout_sec)
    model = arguments.model or target.first_model()
    codec = codec_of(target, model, arguments.tokenizer)
    if not codec.exact:
        print(
            "slipstream: no --tokenizer, and the server has no /tokenize: lengths of prompts are "
            "guessed, a word for a token",
            file=sys.stderr,
        )
    samples = prompts_of(arguments, target, codec)
    warm_up = _warm_up_of(arguments, target, codec, samples)
    return asyncio.run(_run(arguments, target, model, codec, samples, warm_up))


def prompts_of(arguments: argparse.Namespace, target: Target, codec: Codec) -> list[Sample]:
    """The requests that the options describe, in a form that this server takes."""
    from src.bench.samples import in_groups, in_text

    size = texts_of(arguments, target)
    several = {"num_prompts": arguments.num_prompts * size}
    samples = samples_of(argparse.Namespace(**{**vars(arguments), **several}), codec)
    # As text, a trace's chunks would not keep their lengths.
    is_trace = arguments.dataset_name == "timed_trace"
    as_ids = is_trace and target.kind == "completions" and codec.exact
    samples = samples if as_ids else in_text(samples, codec, arguments.seed)
    return in_groups(samples, size) if size > 1 else samples


def texts_of(arguments: argparse.Namespace, target: Target) -> int:
    """Texts of each request.

    Raises
    ------
    ConfigError
        There may not be so many.
    """
    asked: int | None = arguments.texts_per_request
    if target.kind == "embeddings":
        return asked or 1
    if target.kind == "rerank":
        size = asked or _RANKED
        if size < 2:
            raise ConfigError(f"--texts-per-request: a query and documents are 2, got {size}")
        return size
    if asked is not None:
        raise ConfigError("--texts-per-request is for vectors and ranks (--backend)")
    return 1


def _warm_up_of(
    arguments: argparse.Namespace, target: Target, codec: Codec, samples: list[Sample]
) -> list[Sample]:
    """Uncounted requests for a warm-up; random ones leave no cached prefixes for those counted."""
    count = arguments.num_warmups
    if arguments.dataset_name == "random" and count:
        others = {"seed": arguments.seed + 1, "num_prompts": count}
        return prompts_of(argparse.Namespace(**{**vars(arguments), **others}), target, codec)
    return [samples[index % len(samples)] for index in range(count)]


def times_of(arguments: argparse.Namespace, samples: list[Sample]) -> list[float]:
    """When each sample is sent, in seconds from the start.

    Raises
    ------
    ConfigError
        Options contradict each other or are out of range.
    """
    from src.bench.arrivals import RampUp, arrival_times

    is_trace = arguments.dataset_name == "timed_trace"
    if arguments.self_timed and not is_trace:
        raise ConfigError("--self-timed needs --dataset-name timed_trace")
    ramp_up = None
    if arguments.ramp_up_strategy is not None:
        start, end = arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
        if start is None or end is None:
            raise ConfigError("a ramp-up needs --ramp-up-start-rps and --ramp-up-end-rps")
        if not math.isinf(arguments.request_rate):
            raise ConfigError("--request-rate and a ramp-up exclude each other")
        ramp_up = RampUp(arguments.ramp_up_strategy, start, end)
    times = arrival_times(
        len(samples),
        rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        ramp_up=ramp_up,
        seed=arguments.seed,
    )
    if is_trace and arguments.self_timed is not False:
        return [sample.timestamp or 0.0 for sample in samples]
    return times


async def _run(
    arguments: argparse.Namespace,
    target: Target,
    model: str,
    codec: Codec,
    samples: list[Sample],
    warm_up: list[Sample],
) -> int:
    from src.bench.openai_client import POOLED, Endpoint, OpenAIClient
    from src.bench.report import error_lines, report_lines, result_fields

    endpoint = Endpoint(
        url=target.url,
        kind=target.kind,
        model=arguments.served_model_name or model,
        headers=target.headers,
        fields=_fields(arguments, is_chat=target.kind == "chat"),
        ignore_eos=ignores_eos(arguments),
        count_tokens=(lambda text: len(codec.encode(text))) if codec.exact else None,
        verify=target.verify,
    )
    async with OpenAIClient.open(endpoint) as client:
        done, drafts = await _measured(arguments, client, target, samples, warm_up)
    for line in error_lines(done.answers):
        print(line, file=sys.stderr)
    metrics = metrics_of(arguments, done.answers, done.duration)
    names = arguments.percentile_metrics
    if target.kind in POOLED:
        # There are no tokens whose times could be told.
        names = [name for name in names if name not in ("ttft", "tpot", "itl")]
    rate = arguments.request_rate
    shown_rate = None if math.isinf(rate) else rate
    *lines, end = report_lines(
        metrics,
        names=names,
        max_concurrency=arguments.max_concurrency,
        request_rate=shown_rate,
    )
    print("\n".join([*lines, *drafts.lines(), end]))
    fields = result_fields(metrics, done.answers, names) | drafts.fields()
    save_result(arguments, model, codec.name, _traffic(arguments) | fields)
    return 0 if metrics.completed else EXIT_ALL_FAILED


async def _measured(
    arguments: argparse.Namespace,
    client: OpenAIClient,
    target: Target,
    samples: list[Sample],
    warm_up: list[Sample],
) -> tuple[Run, Drafts]:
    """The run, and what the server has drafted in it."""
    from src.bench.drafts import read_drafts
    from src.bench.load import run_load
    from src.bench.progress import Progress

    prefix = arguments.request_id_prefix
    if warm_up:
        done = await run_load(
            client.ask,
            warm_up,
            [0.0] * len(warm_up),
            max_concurrency=arguments.max_concurrency,
            request_id_prefix=f"{prefix}warm-",
        )
        _say_of_warm_up(done.answers)
    before = await asyncio.to_thread(read_drafts, target)
    with Progress(len(samples), shown=not arguments.disable_tqdm) as progress:
        done = await run_load(
            client.ask,
            samples,
            times_of(arguments, samples),
            max_concurrency=arguments.max_concurrency,
            request_id_prefix=prefix,
            on_answer=progress,
        )
    after = await asyncio.to_thread(read_drafts, target)
    return done, after.since(before)


def _say_of_warm_up(answers: list[Answer]) -> None:
    failed = [answer.error for answer in answers if not answer.success]
    if failed:
        print(f"{len(failed)} of {len(answers)} warm-ups failed: {failed[0]}", file=sys.stderr)


def _fields(arguments: argparse.Namespace, *, is_chat: bool) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in SAMPLER_NAMES}
    fields: dict[str, Any] = {n: value for n, value in given.items() if value is not None}
    if arguments.logprobs is not None:
        wanted = {"logprobs": True, "top_logprobs": arguments.logprobs}
        fields |= wanted if is_chat else {"logprobs": arguments.logprobs}
    return {**fields, **arguments.extra_body}


def _traffic(arguments: argparse.Namespace) -> dict[str, Any]:
    rate = arguments.request_rate
    traffic = {
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    if arguments.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        traffic |= {name: getattr(arguments, name) for name in names}
    return traffic


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return found
