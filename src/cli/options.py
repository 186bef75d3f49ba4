"""Options that several commands share, and their evaluation."""

from __future__ import annotations

import argparse
from typing import Any, Final, Protocol

from src.cli.speculative_config import speculative_settings
from src.core.config import Config
from src.core.sampling_params import SamplingParams
from src.core.settings import load_config

EXIT_USAGE: Final = 2

Commands = Any  # argparse's type for it is private


class CommandModule(Protocol):
    """A module of one command."""

    def add_command(self, commands: Commands) -> None:
        """Declare the command."""


def add_command(commands: Commands, name: str, about: str, run: Any) -> argparse.ArgumentParser:
    """Add a command with the common options; ``run`` takes the parsed arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(run=run)
    group = parser.add_argument_group("settings")
    group.add_argument("--config", metavar="FILE", help="TOML file with settings")
    group.add_argument("--model", metavar="PATH", help="checkpoint directory or hub id")
    group.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        type=_assignment,
        dest="overrides",
        help="any setting, e.g. --set scheduler.max_num_seqs=8; may be repeated",
    )
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="vLLM's option of this name, for the settings of the section speculation",
    )
    return parser


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling parameters that are useful at a terminal."""
    group = parser.add_argument_group("sampling (the checkpoint's own defaults where not given)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="output tokens at most")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--seed", type=int, metavar="S", help="same seed, same answer")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )


def config_of(arguments: argparse.Namespace) -> Config:
    """The configuration from file, environment and options.

    Raises
    ------
    ConfigError
        A setting is invalid; the message names the key, the value and what was expected.
    """
    overrides: list[tuple[str, str]] = []
    if arguments.model is not None:
        overrides.append(("model.path", arguments.model))
    if arguments.speculative_config is not None:
        overrides.extend(speculative_settings(arguments.speculative_config))
    overrides.extend(arguments.overrides)
    return load_config(arguments.config, overrides=overrides)


def sampling_of(arguments: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    """Sampling parameters: the given options, on top of the checkpoint's ``defaults``."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    given = {name: getattr(arguments, name) for name in names}
    if arguments.stop:
        given["stop"] = tuple(arguments.stop)
    return SamplingParams(
        **{**defaults, **{name: value for name, value in given.items() if value is not None}}
    )


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected SECTION.KEY=VALUE, got {text!r}")
    return name.strip(), value
