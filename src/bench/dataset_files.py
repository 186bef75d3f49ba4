"""Workloads from files: ShareGPT conversations, and traces with timestamps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from src.bench.codecs import Codec
from src.bench.samples import Sample
from src.core.errors import ConfigError

# vLLM's bounds of the length of usable conversations, in tokens.
_MIN_LEN: Final = 4
_MAX_PROMPT_LEN: Final = 1024
_MAX_TOTAL_LEN: Final = 2048


class _Conversation(msgspec.Struct):
    """One entry of a ShareGPT file; speakers are ignored."""

    conversations: list[_Turn] = []


class _Turn(msgspec.Struct):
    value: str = ""


class TracedRequest(msgspec.Struct):
    """One line of a trace in Mooncake's format.

    Attributes
    ----------
    timestamp
        Arrival time, in the trace's unit.
    input_length, output_length
        In tokens.
    hash_ids
        One per chunk of the prompt; prompts that begin with the same ids share that prefix. Without
        any, the prompt shares no prefix.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def sharegpt_samples(
    path: Path,
    codec: Codec,
    count: int,
    *,
    output_len: int | None = None,
    lengths: tuple[int, int] = (_MIN_LEN, _MAX_PROMPT_LEN),
    shuffle: bool = True,
    oversample: bool = True,
    seed: int = 0,
) -> list[Sample]:
    """Use the first turns of conversations as prompts; the second turns give the output lengths.

    As in vLLM, conversations are left out if they are too short (a turn below 4 tokens) or too long
    (over 2,048 tokens in total, or a prompt outside of ``lengths``).

    Parameters
    ----------
    path
        A JSON list of objects whose ``conversations`` are objects with a ``value``.
    output_len
        Replaces the second turns' length.
    oversample
        Whether to repeat conversations if there are fewer than ``count``.

    Raises
    ------
    ConfigError
        The file cannot be read, or has no usable conversation.
    """
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not in ShareGPT's format: {error}") from None
    entries = [entry for entry in entries if len(entry.conversations) >= 2]
    source = random.Random(seed)
    if shuffle:
        source.shuffle(entries)
    found = _conversations(entries, codec, output_len, lengths)
    samples = list(itertools.islice(found, count))
    if not samples:
        raise ConfigError(f"{path}: no conversation has two turns of a fitting length")
    if oversample and len(samples) < count:
        samples += source.choices(samples, k=count - len(samples))
    return samples


def _conversations(
    entries: Sequence[_Conversation],
    codec: Codec,
    output_len: int | None,
    lengths: tuple[int, int],
) -> Iterator[Sample]:
    for entry in entries:
        prompt, answer = entry.conversations[0].value, entry.conversations[1].value
        prompt_len = len(codec.encode(prompt))
        wanted = len(codec.encode(answer)) if output_len is None else output_len
        if (
            max(_MIN_LEN, lengths[0]) <= prompt_len <= lengths[1]
            and (output_len is not None or wanted >= _MIN_LEN)
            and prompt_len + wanted <= _MAX_TOTAL_LEN
        ):
            yield Sample(prompt=prompt, prompt_len=prompt_len, output_len=wanted)


def read_trace(path: Path, count: int | None = None) -> list[TracedRequest]:
    """The first ``count`` requests of a trace, one JSON object per line.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line is not a request; the message names the line.
    """
    decoder: msgspec.json.Decoder[TracedRequest] = msgspec.json.Decoder(TracedRequest)
    requests: list[TracedRequest] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if count is not None and len(requests) == count:
                    break
                if line.strip():
                    requests.append(_traced(decoder, line, f"{path}, line {number}"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not requests:
        raise ConfigError(f"{path}: there is no request in it")
    return requests


def _traced(decoder: msgspec.json.Decoder[Any], line: bytes, where: str) -> TracedRequest:
    try:
        request: TracedRequest = decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from None
    if request.input_length < 1 or request.output_length < 1:
        raise ConfigError(f"{where}: lengths must be at least 1")
    return request


def trace_samples(
    requests: Sequence[TracedRequest],
    ids: Sequence[int],
    *,
    chunk_len: int,
    seconds: float = 1.0,
    output_len: int | None = None,
    seed: int = 0,
) -> list[Sample]:
    """Prompts of random token ids that share prefixes where the trace's hashes do.

    Timestamps count from the first request on.

    Parameters
    ----------
    ids
        The token ids to draw from.
    chunk_len
        Number of tokens per hash (512 in Mooncake's traces).
    seconds
        Seconds per unit of the trace's timestamps, e.g. 0.001.
    output_len
        Replaces the trace's output lengths.

    Raises
    ------
    ConfigError
        A request has too few hashes for its prompt's length.
    """
    start = min((request.timestamp for request in requests), default=0.0)
    samples = []
    for index, request in enumerate(requests):
        hashes = request.hash_ids
        if hashes and len(hashes) * chunk_len < request.input_length:
            raise ConfigError(
                f"request {index + 1} of the trace has {request.input_length} tokens, but "
                f"{len(hashes)} hashes of --timed-trace-chunk-hash-size {chunk_len}"
            )
        chunks = [f"{seed}/{each}" for each in hashes] or [f"{seed}/alone/{index}"]
        size = chunk_len if hashes else request.input_length
        prompt = [token for chunk in chunks for token in random.Random(chunk).choices(ids, k=size)]
        samples.append(
            Sample(
                prompt=prompt[: request.input_length],
                prompt_len=request.input_length,
                output_len=request.output_length if output_len is None else output_len,
                timestamp=seconds * (request.timestamp - start),
            )
        )
    return sorted(samples, key=lambda sample: sample.timestamp or 0.0)
