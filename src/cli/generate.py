"""``python -m src generate``: continue one prompt on standard output."""

from __future__ import annotations

import argparse
import asyncio
import sys

from src.cli.loading import open_engine
from src.cli.options import Commands, add_sampling, config_of, sampling_of
from src.cli.options import add_command as add
from src.core.config import Config
from src.engine.requests.prompts import Prompt


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(commands, "generate", "Continue a prompt, or answer it as a chat message.", run)
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="treat the prompt as a user's message to the assistant"
    )
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    prompt: Prompt = [{"role": "user", "content": text}] if arguments.chat else text
    asyncio.run(_generate(config_of(arguments), prompt, arguments))
    return 0


async def _generate(config: Config, prompt: Prompt, arguments: argparse.Namespace) -> None:
    async with open_engine(config) as engine:
        params = sampling_of(arguments, engine.model_info.default_sampling)
        async with engine.submit(prompt, params) as submission:
            async for delta in submission:
                print(delta.text, end="", flush=True)
        print()
