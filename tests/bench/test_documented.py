"""Every option of what measures stands in docs/benchmarks.md."""

from __future__ import annotations

import argparse
import re

import pytest

from src.cli.bench import latency, prefix_cache, serve, startup, throughput
from src.cli.options import CommandModule
from src.core.settings import CHECKOUT

PAGE = (CHECKOUT / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize("module", [latency, throughput, serve, startup, prefix_cache])
def test_every_option_is_described(module: CommandModule) -> None:
    kinds = argparse.ArgumentParser().add_subparsers()
    module.add_command(kinds)
    (parser,) = kinds.choices.values()
    options = {
        option
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }
    named = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    # Whoever is told of a switch knows how to turn it.
    spelt = {
        option.replace("--no-self", "--self").replace("--no-ignore", "--ignore")
        for option in options
    }
    assert not spelt - named


def test_what_is_left_out_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from src.cli.main import main

    section = PAGE.partition("## Left out of vLLM's")[2]
    left_out = re.findall(r"`(--[a-z-]+)`", section)
    assert len(left_out) > 3
    for option in left_out:
        with pytest.raises(SystemExit):
            main(["bench", "serve", option, "1"])
        assert "unrecognized arguments" in capsys.readouterr().err
