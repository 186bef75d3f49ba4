"""The requests of a workload, and synthetic ones: random, with or without shared prefixes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

import msgspec

from src.bench.codecs import Codec
from src.core.errors import ConfigError

# Maximal number of attempts to make a text with the wanted number of tokens.
_TRIES: Final = 10


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a workload.

    Attributes
    ----------
    prompt
        Text or token ids.
    prompt_len
        Tokens of the prompt, as far as known before it is sent.
    output_len
        Maximal number of output tokens.
    timestamp
        Seconds from the start of a recorded trace, if the request comes from one.
    others
        Further texts or token ids of the same request, where it may have several.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    timestamp: float | None = None
    others: tuple[str | list[int], ...] = ()


def in_groups(samples: Sequence[Sample], size: int) -> list[Sample]:
    """One sample for ``size`` of these at a time, with the prompts of all; the last may have less.

    Its length is that of all prompts together.
    """
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [
        msgspec.structs.replace(
            group[0],
            prompt_len=sum(sample.prompt_len for sample in group),
            others=tuple(sample.prompt for sample in group[1:]),
        )
        for group in groups
    ]


def random_samples(
    ids: Sequence[int],
    count: int,
    *,
    input_len: int | tuple[int, int],
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[Sample]:
    """Prompts of random token ids after one prefix that all of them share.

    Lengths are drawn uniformly from ``length * (1 - range_ratio)`` to ``length * (1 +
    range_ratio)``, rounded outwards. The ``prefix_len`` tokens of the prefix are added to them.

    Parameters
    ----------
    ids
        The token ids to draw from.
    input_len
        Tokens of a prompt after the prefix, or their minimum and maximum.

    Raises
    ------
    ConfigError
        A length is out of range.
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {range_ratio}")
    inputs = _range(input_len, range_ratio) if isinstance(input_len, int) else input_len
    outputs = _range(output_len, range_ratio)
    if inputs[0] < 0 or prefix_len < 0 or output_len < 1:
        raise ConfigError("lengths of prompts must be at least 0, of outputs at least 1")
    if prefix_len + inputs[0] < 1:
        raise ConfigError("--random-input-len and --random-prefix-len leave a prompt empty")
    source = random.Random(seed)
    prefix = source.choices(ids, k=prefix_len)
    samples = []
    for _ in range(count):
        prompt = prefix + source.choices(ids, k=source.randint(*inputs))
        samples.append(
            Sample(
                prompt=prompt,
                prompt_len=len(prompt),
                output_len=max(1, source.randint(*outputs)),
            )
        )
    return samples


def prefix_repetition_samples(
    ids: Sequence[int],
    count: int,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    seed: int = 0,
) -> list[Sample]:
    """Prompts with ``num_prefixes`` random prefixes in equal parts, each with a suffix of its own.

    They are in random order; all lengths are in tokens.

    Raises
    ------
    ConfigError
        A length is out of range.
    """
    if prefix_len < 0 or suffix_len < 0 or prefix_len + suffix_len < 1 or output_len < 1:
        raise ConfigError("prefix and suffix together, and the output, need at least 1 token")
    if not 1 <= num_prefixes <= count:
        raise ConfigError(
            f"--prefix-repetition-num-prefixes must be from 1 to --num-prompts ({count}), "
            f"got {num_prefixes}"
        )
    source = random.Random(seed)
    prefixes = [source.choices(ids, k=prefix_len) for _ in range(num_prefixes)]
    samples = [
        Sample(
            prompt=prefixes[index % num_prefixes] + source.choices(ids, k=suffix_len),
            prompt_len=prefix_len + suffix_len,
            output_len=output_len,
        )
        for index in range(count)
    ]
    source.shuffle(samples)
    return samples


def in_text(samples: Sequence[Sample], codec: Codec, seed: int = 0) -> list[Sample]:
    """The samples with prompts as text, with the same number of tokens where possible."""
    source = random.Random(seed)
    return [
        sample if isinstance(sample.prompt, str) else _in_text(sample, sample.prompt, codec, source)
        for sample in samples
    ]


def _in_text(sample: Sample, ids: list[int], codec: Codec, source: random.Random) -> Sample:
    """Tokens may merge in the text, so it is extended or cut until its length is right."""
    text = codec.decode(ids)
    found = codec.encode(text)
    for _ in range(_TRIES):
        missing = len(ids) - len(found)
        if not missing:
            break
        # Keep the beginning, so that prefixes are still shared.
        found = found + source.choices(codec.ids, k=missing) if missing > 0 else found[: len(ids)]
        text = codec.decode(found)
        found = codec.encode(text)
    return msgspec.structs.replace(sample, prompt=text, prompt_len=len(found))


def _range(length: int, range_ratio: float) -> tuple[int, int]:
    return math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
