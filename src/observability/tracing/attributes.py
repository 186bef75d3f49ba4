"""Span attributes: names of the OpenTelemetry GenAI conventions, and vLLM's for its dashboards.

https://github.com/open-telemetry/semantic-conventions-genai, gen-ai-spans.md. Names that begin with
``slipstream.`` are our own, where neither has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from src.core.records import RequestRecord
from src.core.sampler_parameters import SAMPLER_PARAMETERS
from src.core.sampling_params import SamplingParams
from src.observability.durations import Durations
from src.observability.tracing.request import PromptTrace, RequestTrace, TextsTrace

PROVIDER: Final = "slipstream"

_MAX_STOPS: Final = 16


def request_attributes(trace: RequestTrace) -> dict[str, Any]:
    """Attributes of the request's own span: parameters, outcome and usage."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        **trace.attributes,
    }
    if trace.response_id:
        found["gen_ai.response.id"] = trace.response_id
    if trace.error is not None:
        found["error.type"] = type(trace.error).__qualname__
    if trace.disconnected:
        found["slipstream.client_disconnected"] = True
    if trace.texts is not None:
        found |= _of_texts(trace, trace.texts)
    if not trace.prompts:
        return found
    found |= _asked(trace.prompts[0])
    records = [c.record for prompt in trace.prompts for c in prompt.completions]
    prompt_tokens = sum(prompt.num_tokens for prompt in trace.prompts)
    output_tokens = sum(record.num_tokens for record in records)
    found |= {
        "gen_ai.response.finish_reasons": [_reason(record) for record in records],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
        "gen_ai.usage.cache_read.input_tokens": sum(
            # Only the first: the other completions find in the cache what the first computed.
            prompt.completions[0].record.cached_tokens
            for prompt in trace.prompts
            if prompt.completions
        ),
        # vLLM's names for the same values.
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": output_tokens,
        "gen_ai.usage.num_sequences": len(records),
        "gen_ai.request.id": trace.response_id,
        "gen_ai.request.n": trace.prompts[0].params.n,
        "gen_ai.latency.e2e": trace.ended - trace.received,
    }
    if drafted := sum(record.drafted for record in records):
        found["slipstream.usage.drafted_tokens"] = drafted
        found["slipstream.usage.accepted_tokens"] = sum(record.accepted for record in records)
    if records and records[0].lora:
        found["slipstream.request.adapter"] = records[0].lora
    firsts = [record.first_token for record in records if record.first_token is not None]
    if firsts:
        found["gen_ai.latency.time_to_first_token"] = min(firsts) - trace.received
        if found.get("gen_ai.request.stream"):
            found["gen_ai.response.time_to_first_chunk"] = min(firsts) - trace.received
    if len(records) == 1:
        found |= latencies(records[0])
    if trace.content_chars:
        found |= _content(trace)
    return found


def _of_texts(trace: RequestTrace, texts: TextsTrace) -> dict[str, Any]:
    """Attributes of a request that asks for something else than text."""
    found = {
        "slipstream.texts": texts.num_texts,
        "gen_ai.usage.input_tokens": texts.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": texts.cached_tokens,
        "gen_ai.usage.prompt_tokens": texts.num_tokens,
        "gen_ai.request.id": trace.response_id,
        "gen_ai.latency.e2e": trace.ended - trace.received,
    }
    if texts.first is not None:
        # Of the first one. Others wait for those before them.
        queue = Durations.of(texts.first).queue
        if queue is not None:
            found["gen_ai.latency.time_in_queue"] = queue
        if texts.first.lora:
            found["slipstream.request.adapter"] = texts.first.lora
    return found


def completion_attributes(record: RequestRecord) -> dict[str, Any]:
    """Attributes of one of several completions."""
    return {
        "gen_ai.usage.output_tokens": record.num_tokens,
        "gen_ai.response.finish_reasons": [_reason(record)],
        **latencies(record),
    }


def latencies(record: RequestRecord) -> dict[str, float]:
    """Seconds of the phases of one completion, by vLLM's names."""
    durations = Durations.of(record)
    named = {
        "gen_ai.latency.time_in_queue": durations.queue,
        "gen_ai.latency.time_in_model_prefill": durations.prefill,
        "gen_ai.latency.time_in_model_decode": durations.decode,
        "gen_ai.latency.time_in_model_inference": durations.inference,
    }
    return {name: seconds for name, seconds in named.items() if seconds is not None}


def _asked(prompt: PromptTrace) -> dict[str, Any]:
    params = prompt.params
    found: dict[str, Any] = {
        "gen_ai.output.type": "text",
        "gen_ai.request.max_tokens": prompt.max_tokens,
    }
    for parameter in SAMPLER_PARAMETERS:
        value = getattr(params, parameter.name)
        # A top_k of -1 is off too. A temperature of 0 is reported like any other; it means greedy.
        if parameter.always_traced or (value != parameter.off and value >= 0):
            found[parameter.trace] = float(value)
    found |= _unusual(params)
    return found


def _unusual(params: SamplingParams) -> dict[str, Any]:
    """Parameters that are reported only if they differ from their default."""
    found: dict[str, Any] = {}
    if params.seed is not None:
        found["gen_ai.request.seed"] = params.seed
    if params.stop:
        found["gen_ai.request.stop_sequences"] = list(params.stop[:_MAX_STOPS])
    if params.n != 1:
        found["gen_ai.request.choice.count"] = params.n
    return found


def _reason(record: RequestRecord) -> str:
    return "abort" if record.finish_reason is None else record.finish_reason.value


def _content(trace: RequestTrace) -> dict[str, str]:
    """Prompts and outputs as JSON, in the conventions' form, each cut at the configured length."""
    most = trace.content_chars
    messages = [
        message
        for prompt in trace.prompts
        if prompt.given is not None
        for message in _messages(prompt.given, most)
    ]
    outputs = [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "".join(completion.text or ())[:most]}],
            "finish_reason": _reason(completion.record),
        }
        for prompt in trace.prompts
        for completion in prompt.completions
    ]
    return {
        "gen_ai.input.messages": msgspec.json.encode(messages).decode(),
        "gen_ai.output.messages": msgspec.json.encode(outputs).decode(),
    }


def _messages(given: str | Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """Messages up to ``most`` characters of text in total; the last one is cut."""
    if isinstance(given, str):
        return [{"role": "user", "parts": [{"type": "text", "content": given[:most]}]}]
    found: list[dict[str, Any]] = []
    for message in given:
        if most <= 0:
            break
        content = message.get("content")
        if not isinstance(content, str):
            content = msgspec.json.encode(content, enc_hook=str).decode()
        text = content[:most]
        most -= len(text)
        role = str(message.get("role", "user"))
        found.append({"role": role, "parts": [{"type": "text", "content": text}]})
    return found
