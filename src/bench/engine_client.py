"""A client for an engine in this process, without a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from src.bench.answers import Answer, Deliveries
from src.bench.codecs import TokenizerCodec
from src.bench.environment import portable
from src.bench.errors import BenchError
from src.bench.samples import Sample
from src.core.config import Config
from src.core.errors import ConfigError, SlipstreamError
from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine


def measured_config(config: Config, *, num_requests: int) -> Config:
    """Adapt a configuration for benchmarks: compiled at the start, a queue for all requests."""
    scheduler, section = config.scheduler, config.compile
    if section.startup == "background":
        section = msgspec.structs.replace(section, startup="wait")
    return msgspec.structs.replace(
        config,
        compile=section,
        scheduler=msgspec.structs.replace(
            scheduler, max_waiting_requests=max(scheduler.max_waiting_requests, num_requests)
        ),
    )


def without_prefix_cache(config: Config) -> Config:
    """The configuration without a prefix cache."""
    cache = msgspec.structs.replace(config.cache, enable_prefix_caching=False)
    return msgspec.structs.replace(config, cache=cache)


async def fastest_kernels(engine: AsyncEngine) -> str:
    """Wait for the CPU kernels (a server would start without them); returns which they are."""
    if b"slipstream_cpu_kernels_info{" not in engine.metrics.render()[0]:
        return "cuda"
    # Imported here because it imports torch.
    from src.ops.build.kernels import ensure_built

    return await asyncio.to_thread(ensure_built, wait=True)


def all_answered(answers: Sequence[Answer]) -> None:
    """Make sure that all answers are complete.

    Raises
    ------
    BenchError
        A request failed; the message says why.
    """
    failed = [answer.error for answer in answers if not answer.success]
    if failed:
        raise BenchError(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")


def engine_facts(engine: AsyncEngine, kernels: str) -> dict[str, Any]:
    """Facts of a running engine on which figures depend, including its configuration."""
    info = engine.model_info
    config = msgspec.to_builtins(engine.config)
    # No server runs, and its section contains keys.
    del config["http"]
    return {
        "model_id": info.name,
        "dtype": info.dtype,
        "max_model_len": info.max_model_len,
        "kernels": kernels,
        "compiled": engine.stats.compiled,
        "config": portable(config),
    }


class EngineClient:
    """Streams one answer per call of `ask`.

    Parameters
    ----------
    params
        Sampling parameters; each sample sets the output length.
    """

    def __init__(self, engine: AsyncEngine, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params
        self.codec = TokenizerCodec(engine.tokenizer, engine.model_info.name)

    def check_lengths(self, longest: int) -> None:
        """Check that the longest request of a workload fits the model.

        Raises
        ------
        ConfigError
            It does not.
        """
        most = self._engine.model_info.max_model_len
        if longest > most:
            raise ConfigError(
                f"prompt and output of {longest} tokens do not fit this model's {most}: ask for "
                "less with --input-len and --output-len, or set model.max_model_len"
            )

    async def ask(self, sample: Sample, request_id: str) -> Answer:
        """Stream one answer; if the engine refuses the request, the answer has an ``error``."""
        params = msgspec.structs.replace(self._params, max_tokens=sample.output_len)
        answer = Answer(start=time.perf_counter(), prompt_tokens=sample.prompt_len)
        deliveries = Deliveries(answer)
        pieces = []
        try:
            async with self._engine.submit(
                sample.prompt, params, request_id=request_id
            ) as submission:
                async for delta in submission:
                    now = time.perf_counter()
                    if delta.token_ids:
                        deliveries.tokens(now)
                    pieces.append(delta.text)
                usage = submission.usage
        except SlipstreamError as error:
            answer.error = f"{type(error).__name__}: {error}"
            answer.latency = time.perf_counter() - answer.start
            return answer
        answer.text = "".join(pieces)
        answer.prompt_tokens = usage.prompt_tokens
        answer.output_tokens = usage.completion_tokens
        answer.cached_tokens = usage.cached_tokens
        return answer
