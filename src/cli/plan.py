"""``python -m src plan MODEL``: does a model fit a device, and how fast can it be?"""

from __future__ import annotations

import argparse
import sys
from typing import Final

import msgspec

from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.config import INT32_MAX
from src.core.errors import ConfigError
from src.observability.logs import setup_logging

EXIT_DOES_NOT_FIT: Final = 1
# A start has a list of so many rows.
_MOST_REQUESTS: Final = 65_536
_MOST_RANKS: Final = 1024


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(
        commands,
        "plan",
        "Say whether a model fits a device and how fast it can be, from its configuration alone. "
        "Exit code 1 if it does not fit.",
        run,
    )
    parser.add_argument(
        "planned",
        metavar="MODEL",
        nargs="?",
        help="checkpoint directory or hub id (default: model.path)",
    )
    group = parser.add_argument_group("what if")
    group.add_argument(
        "--device",
        metavar="NAME",
        help="cpu (this machine), cuda (its GPU), a100-80gb, h100-80gb, h200, l4 or rtx4090 "
        "(default: device.type)",
    )
    group.add_argument("--context", type=_count, metavar="N", help="tokens of each request")
    group.add_argument("--concurrency", type=_requests, metavar="N", help="requests at once")
    group.add_argument("--quantization", choices=("int8", "int4"), help="weights rounded at load")
    group.add_argument(
        "--tensor-parallel", type=_ranks, metavar="N", default=1,
        help="what each of N devices would hold; serving on several is not available yet",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # What a start would warn of is part of the answer.
    setup_logging("error")
    if arguments.planned is not None:
        arguments.model = arguments.planned
    if arguments.quantization is not None:
        arguments.overrides = [
            *arguments.overrides,
            ("model.quantization", arguments.quantization),
        ]
    config = config_of(arguments)
    # Imported here because these load torch, which takes seconds.
    try:
        from src.engine.sizing.answer import plan_lines
        from src.engine.sizing.planning import Question, plan_model
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing, see python -m src doctor") from error
    question = Question(
        device=arguments.device,
        context=arguments.context,
        concurrency=arguments.concurrency,
        tensor_parallel=arguments.tensor_parallel,
    )
    plan = plan_model(config, question)
    if arguments.json:
        text = msgspec.json.format(msgspec.json.encode(plan)).decode()
    else:
        text = "\n".join(plan_lines(plan))
    print(text)
    sys.stdout.flush()
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _count(text: str) -> int:
    return _number(text, INT32_MAX)


def _requests(text: str) -> int:
    return _number(text, _MOST_REQUESTS)


def _ranks(text: str) -> int:
    return _number(text, _MOST_RANKS)


def _number(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {most}, got {text[:40]!r}")
    return int(text)
