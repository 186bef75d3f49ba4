"""Reads the command line and runs one command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from src.cli import chat, generate, inspect, plan, program, run_batch, serve, top
from src.cli.bench import commands as bench
from src.cli.doctor import command as doctor
from src.cli.options import EXIT_USAGE
from src.core.errors import SlipstreamError

DESCRIPTION: Final = "Slipstream: an LLM inference engine and OpenAI-compatible server."
EXIT_BROKEN_PIPE: Final = 141  # the code that a shell reports for SIGPIPE
EPILOG: Final = """\
examples:
  python -m src serve                                   serve the bundled demo model
  python -m src serve --model /some/checkpoint --port 9000
  python -m src generate "Once upon a time" --max-tokens 32
  python -m src chat --set model.dtype=float32
  python -m src run-batch -i requests.jsonl -o answers.jsonl
  python -m src plan Qwen/Qwen3-0.6B --context 8192     does it fit, and how fast can it be?
  python -m src program /some/checkpoint                the model's program, with names and shapes
  python -m src doctor                                  what is slow or missing here
  python -m src inspect --output trace.json             save a server's timeline for ui.perfetto.dev
  python -m src top                                     watch a server in the terminal
  python -m src bench serve --base-url http://127.0.0.1:8000 --request-rate 10

Settings come from a TOML file (--config or $SLIPSTREAM_CONFIG), then from SLIPSTREAM_SECTION__KEY
variables, then from --set; docs/configuration.md lists them all.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (``sys.argv`` by default) name; returns the exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except SlipstreamError as error:
        # Only the first line, because torch puts stack traces into its messages.
        print(f"slipstream: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader of our output is gone (e.g. `head`). Python would flush once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m src",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (serve, generate, chat, run_batch, plan, program, doctor, inspect, top, bench):
        module.add_command(commands)
    return parser
