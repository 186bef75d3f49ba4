"""Checks every causal language model of transformers and writes the tables of docs/models.md.

What has been checked stands in a file, line by line: started again, it goes on with the others.
Rows of the page that have not been checked again stay.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

from src.core.settings import CHECKOUT
from tests.architectures import page, pool


def versions() -> str:
    """Of what is compared."""
    return ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="instead of all; they are checked again")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=CHECKOUT / ".architectures.jsonl")
    parser.add_argument("--page", type=Path, default=CHECKOUT / "docs" / "models.md")
    parser.add_argument("--again", action="store_true", help="check what stands in the file too")
    options = parser.parse_args()
    if options.again:
        options.results.unlink(missing_ok=True)
    known = page.lines_of(options.results)
    chosen = options.model_types or [one for one in page.model_types() if one not in known]
    pool.run(chosen, options.processes, options.results)
    written = options.page.read_text(encoding="utf-8")
    lines = page.lines_on(written) | page.lines_of(options.results)
    if all(one in lines for one in page.model_types()):
        options.page.write_text(page.text(written, lines, versions()), encoding="utf-8")
    print(page.summary(lines))


if __name__ == "__main__":
    main()
