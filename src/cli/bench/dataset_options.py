"""Options for the workload: vLLM's datasets, with its names and defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from src.core.errors import ConfigError

if TYPE_CHECKING:
    from src.bench.codecs import Codec
    from src.bench.samples import Sample

DATASETS: Final = ("random", "sharegpt", "prefix_repetition", "timed_trace")
_FROM_FILES: Final = ("sharegpt", "timed_trace")


def add_dataset(parser: argparse.ArgumentParser, *, num_prompts: int = 1000) -> None:
    """Add the options of all datasets."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name", choices=DATASETS, default="random",
        help="random: random tokens (default); sharegpt: a file of conversations; "
        "prefix_repetition: random tokens behind shared prefixes; timed_trace: a recorded trace",
    )  # fmt: skip
    group.add_argument("--dataset-path", type=Path, metavar="FILE")
    group.add_argument(
        "--num-prompts", type=positive, default=num_prompts, metavar="N",
        help=f"requests (default: {num_prompts})",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    group.add_argument(
        "--input-len", type=int, metavar="TOKENS", help="short for --random-input-len"
    )
    group.add_argument(
        "--output-len", type=int, metavar="TOKENS", help="of every dataset, whatever it says itself"
    )
    group.add_argument("--disable-shuffle", action="store_true", help="conversations in order")
    group.add_argument(
        "--no-oversample", action="store_true",
        help="fewer requests, rather than some twice, where a file has too few",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
        help="ask for the whole output length (default: but for sharegpt over HTTP)",
    )  # fmt: skip
    for name, default, about in (
        ("--random-input-len", 1024, "of a prompt"),
        ("--random-output-len", 128, "of an output"),
        ("--random-prefix-len", 0, "that all prompts begin with, beside the rest"),
        ("--prefix-repetition-prefix-len", 256, "of a prefix"),
        ("--prefix-repetition-suffix-len", 256, "of a suffix"),
        ("--prefix-repetition-output-len", 128, "of an output"),
    ):
        group.add_argument(
            name, type=int, default=default, metavar="TOKENS", help=f"{about} (default: {default})"
        )
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R",
        help="lengths from (1 - R) to (1 + R) of theirs, 0 to below 1 (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--prefix-repetition-num-prefixes", type=positive, default=10, metavar="N",
        help="different prefixes (default: 10)",
    )  # fmt: skip
    group.add_argument("--sharegpt-output-len", type=positive, metavar="TOKENS")
    group.add_argument(
        "--timed-trace-chunk-hash-size", type=positive, default=16, metavar="TOKENS",
        help="that one of a trace's hash_ids stands for; 512 in Mooncake's (default: 16)",
    )  # fmt: skip
    group.add_argument(
        "--timed-trace-sec-multiplier", type=float, default=1.0, metavar="S",
        help="seconds in a unit of a trace's timestamps; 0.001 for milliseconds (default: 1)",
    )  # fmt: skip


def samples_of(arguments: argparse.Namespace, codec: Codec) -> list[Sample]:
    """The requests that the options describe; synthetic ones have token ids as prompts.

    Raises
    ------
    ConfigError
        A file is missing or cannot be used, or a number is out of range.
    """
    from src.bench import dataset_files, samples

    name, path = arguments.dataset_name, arguments.dataset_path
    if (path is not None) != (name in _FROM_FILES):
        raise ConfigError(
            f"--dataset-name {name} {'takes no' if path is not None else 'needs a'} --dataset-path"
        )
    count, seed, output_len = arguments.num_prompts, arguments.seed, arguments.output_len
    if name == "random":
        return samples.random_samples(
            codec.ids,
            count,
            input_len=_first(arguments.input_len, arguments.random_input_len),
            output_len=_first(output_len, arguments.random_output_len),
            range_ratio=arguments.random_range_ratio,
            prefix_len=arguments.random_prefix_len,
            seed=seed,
        )
    if name == "prefix_repetition":
        return samples.prefix_repetition_samples(
            codec.ids,
            count,
            prefix_len=arguments.prefix_repetition_prefix_len,
            suffix_len=arguments.prefix_repetition_suffix_len,
            num_prefixes=arguments.prefix_repetition_num_prefixes,
            output_len=_first(output_len, arguments.prefix_repetition_output_len),
            seed=seed,
        )
    if name == "sharegpt":
        wanted = output_len if output_len is not None else arguments.sharegpt_output_len
        return dataset_files.sharegpt_samples(
            path,
            codec,
            count,
            output_len=wanted,
            shuffle=not arguments.disable_shuffle,
            oversample=not arguments.no_oversample,
            seed=seed,
        )
    return dataset_files.trace_samples(
        dataset_files.read_trace(path, count),
        codec.ids,
        chunk_len=arguments.timed_trace_chunk_hash_size,
        seconds=arguments.timed_trace_sec_multiplier,
        output_len=output_len,
        seed=seed,
    )


def ignores_eos(arguments: argparse.Namespace) -> bool:
    """Whether to force full output lengths; by default only for synthetic datasets."""
    made_up = arguments.dataset_name != "sharegpt"
    return made_up if arguments.ignore_eos is None else bool(arguments.ignore_eos)


def positive(text: str) -> int:
    """Parse an integer above 0."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number over 0, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """Parse an integer of at least 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def _first(general: int | None, special: int) -> int:
    return special if general is None else general
