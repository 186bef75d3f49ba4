"""Write the plan logs anew, after a change of the scheduler's decisions that is meant.

Run ``python -m tests.replay.record`` in the checkout's root, read the difference (``git diff
tests/replay``), and say in the commit why the plans changed.
"""

from __future__ import annotations

from tests.replay.driver import TRACES, plans_path, replay


def main() -> None:
    for trace in TRACES:
        lines, simulation = replay(trace)
        plans_path(trace).write_text("\n".join(lines) + "\n")
        print(f"{plans_path(trace).name}: {len(lines)} plans, {simulation.scheduler.stats}")


if __name__ == "__main__":
    main()
