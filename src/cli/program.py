"""``python -m src program MODEL``: what a model computes, step by step."""

from __future__ import annotations

import argparse

from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.errors import ConfigError
from src.observability.logs import setup_logging


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(
        commands,
        "program",
        "Print a model's program: functions, mixers, step tensors and parameters with shapes and "
        "encodings, from its configuration alone.",
        run,
    )
    parser.add_argument(
        "listed",
        metavar="MODEL",
        nargs="?",
        help="checkpoint directory, GGUF file or hub id (default: model.path)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    setup_logging("error")
    if arguments.listed is not None:
        arguments.model = arguments.listed
    config = config_of(arguments)
    # Imported here because these load torch, which takes seconds.
    try:
        from src.models.listing import program_lines
        from src.models.model import Model
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing, see python -m src doctor") from error
    from src.engine.sizing.planning import outline_of

    outline = outline_of(config)
    assert isinstance(outline, Model)
    print("\n".join(program_lines(outline)))
    return 0
