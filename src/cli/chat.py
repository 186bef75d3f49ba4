"""``python -m src chat``: talk to the model in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import Final

from src.cli.loading import open_engine
from src.cli.options import Commands, add_sampling, config_of, sampling_of
from src.cli.options import add_command as add
from src.core.errors import RequestError
from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine

PROMPT: Final = "> "
HELP: Final = """\
/reset    forget the conversation
/help     show this
Ctrl-C    stop the answer; at the prompt, clear the line
Ctrl-D    leave"""


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(commands, "chat", "Talk to the model. /help shows what else there is.", run)
    parser.add_argument("--system", metavar="TEXT", help="a system message before everything")
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    The event loop runs while the model loads and answers, and stops while the user types. So
    ``input`` keeps its line editing, and Ctrl-C applies either to the answer or to the prompt.
    """
    config = config_of(arguments)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        engine = runner.run(stack.enter_async_context(open_engine(config)))
        try:
            params = sampling_of(arguments, engine.model_info.default_sampling)
            _converse(runner, engine, params, arguments.system)
        finally:
            runner.run(stack.aclose())
    return 0


def _converse(
    runner: asyncio.Runner, engine: AsyncEngine, params: SamplingParams, system: str | None
) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    print(f"{engine.model_info.name}; /help for help", file=sys.stderr)
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print(HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(runner, engine, messages, params)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(
    runner: asyncio.Runner,
    engine: AsyncEngine,
    messages: list[dict[str, str]],
    params: SamplingParams,
) -> str | None:
    """Print the answer as it arrives; returns its text so far, ``None`` if it was refused."""
    pieces: list[str] = []
    try:
        runner.run(_stream(engine, messages, params, pieces))
    except KeyboardInterrupt:
        print(" [stopped]")
    except RequestError as error:
        print(f"{error.message}\n(/reset starts over)", file=sys.stderr)
        return None
    return "".join(pieces)


async def _stream(
    engine: AsyncEngine,
    messages: list[dict[str, str]],
    params: SamplingParams,
    pieces: list[str],
) -> None:
    async with engine.submit(messages, params) as submission:
        async for delta in submission:
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
    print()
