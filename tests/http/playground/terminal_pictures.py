"""Draws commands' output as a terminal shows it: docs/pictures/plan.png and doctor.png."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from benchmarks.plan_page import NAME, SHAPE
from benchmarks.shapes import write_checkpoint
from src.core.settings import CHECKOUT

COMMANDS = {
    "plan": ("plan", NAME, "--device", "h100-80gb"),
    "doctor": ("doctor",),
}
# Marks of `doctor`, and how they stand out.
MARKS = {"ok": "good", "SLOW": "slow", "BROKEN": "broken", "?": "slow"}

PAGE = """<!doctype html>
<meta charset="utf-8">
<style>
body { margin: 0; width: max-content; padding: 12px; background: #fff; }
main { border: 1px solid #d0d7de; border-radius: 10px; overflow: hidden; }
header { display: flex; gap: 8px; padding: 11px 14px; background: #eef1f4;
  border-bottom: 1px solid #d0d7de; }
header i { width: 12px; height: 12px; border-radius: 50%; background: #c4cad1; }
pre { margin: 0; padding: 16px 20px 18px; background: #fbfcfd; color: #1f2328;
  font: 13px/1.45 "DejaVu Sans Mono", "Liberation Mono", monospace; }
.command { font-weight: bold; }
.good { color: #1a7f37; }
.slow { color: #9a6700; font-weight: bold; }
.broken { color: #cf222e; font-weight: bold; }
.remedy { color: #0550ae; }
</style>
<main><header><i></i><i></i><i></i></header><pre></pre></main>
"""

# The output is text; it never becomes markup.
FILL = """([command, lines, marks]) => {
  const pre = document.querySelector('pre');
  const add = (text, kind) => {
    const span = document.createElement('span');
    span.textContent = text;
    if (kind) span.className = kind;
    pre.append(span);
  };
  add(`$ ${command}\\n`, 'command');
  for (const line of lines) {
    const first = line.split(' ', 1)[0];
    if (line.trimStart().startsWith('-> ')) {
      add(line, 'remedy');
    } else {
      add(first, marks[first]);
      add(line.slice(first.length), '');
    }
    pre.append('\\n');
  }
}"""


def draw_commands(browser: Browser, pictures: Path) -> None:
    """Run the commands in a directory that has a model's configuration, and draw what they say."""
    context = browser.new_context(device_scale_factor=2)
    page = context.new_page()
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory) / NAME, SHAPE)
        for name, arguments in COMMANDS.items():
            page.set_content(PAGE)
            command = f"python -m src {' '.join(arguments)}"
            marks = MARKS if name == "doctor" else {}
            page.evaluate(FILL, [command, output(directory, *arguments), marks])
            page.locator("body").screenshot(path=pictures / f"{name}.png")
    context.close()


def output(directory: str, *arguments: str) -> list[str]:
    """The lines that a command prints in a directory, whose own path they do not show."""
    done = subprocess.run(
        [sys.executable, "-m", "src", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.replace(f"{os.path.realpath(directory)}/", "").splitlines()
