"""`python -m tests.mutants`: put one fault after the other into copies of the tree, and test those.

A fault that no test notices is a survivor, and is listed at the end. The checkout is only read.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.table import MUTATIONS
from tests.mutants.trial import Outcome, Trials, Verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutations that one of these is part of")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not arguments.words
        or any(word in f"{mutation.file}: {mutation.what}" for word in arguments.words)
    ]
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trials = Trials(Path(scratch), arguments.workers)
        with ThreadPoolExecutor(arguments.workers) as pool:
            selections = list(dict.fromkeys(mutation.tests for mutation in chosen))
            bad = [tests for tests, passes in zip(selections, pool.map(trials.passes, selections))
                   if not passes]  # fmt: skip
            if bad:
                print("these fail without any mutation:", *(" ".join(tests) for tests in bad))
                return 2
            verdicts = []
            for verdict in pool.map(trials.judge, chosen):
                verdicts.append(verdict)
                print(verdict.line, flush=True)
        trials.close()
    return report(verdicts)


def report(verdicts: list[Verdict]) -> int:
    """Print what needs somebody's attention; 0 if nothing does."""
    print(f"\n{len(verdicts)} mutations, {sum(v.seconds for v in verdicts):.0f} s of tests")
    for outcome in Outcome:
        print(f"  {outcome.value}: {sum(verdict.outcome is outcome for verdict in verdicts)}")
    unexplained = [v for v in verdicts if v.is_at_fault]
    for verdict in unexplained:
        print(f"\n{verdict.line}\n{verdict.explanation}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
