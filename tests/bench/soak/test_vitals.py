from __future__ import annotations

import msgspec
import pytest

from src.bench.soak.vitals import MIB, Vitals, leaks, memory_growth

REST = Vitals(
    at=1.0, requests=10, blocks=100, held=0, free=100, alive=0, gauges=0.0, tasks=6, threads=7,
    descriptors=9, memory=300 * MIB, series=600,
)  # fmt: skip


def readings(count: int = 8, **growth: float) -> list[Vitals]:
    """Readings of a server of which some things grow from one to the next."""
    made = []
    for number in range(count):
        changes = {
            name: type(getattr(REST, name))(getattr(REST, name) + number * step)
            for name, step in growth.items()
        }
        fields = {"at": 10.0 * number + 1, "requests": 100 * number, **changes}
        made.append(msgspec.structs.replace(REST, **fields))
    return made


def test_a_sound_server_has_no_leak() -> None:
    assert leaks(readings()) == []
    assert leaks(readings(tasks=0.2, descriptors=1, threads=2, memory=2 * MIB, series=20)) == []


@pytest.mark.parametrize(
    ("growth", "words"),
    [
        ({"tasks": 1}, "tasks went from 6 to 13"),
        ({"descriptors": 3}, "descriptors went from 9 to 30"),
        ({"threads": 4}, "threads went from 7 to 35"),
        ({"series": 100}, "/metrics grew from 600 to 1300 lines"),
        ({"memory": 6 * MIB}, "memory grows: 42.0 MiB over 70 s and 700 requests"),
    ],
)
def test_what_grows_is_a_leak(growth: dict[str, float], words: str) -> None:
    (found,) = leaks(readings(**growth))
    assert words in found


@pytest.mark.parametrize(
    "changes", [{"held": 1}, {"free": 99}, {"alive": 1}, {"gauges": 0.5}, {"free": 101}]
)
def test_what_is_not_given_back_is_a_leak(changes: dict[str, float]) -> None:
    (found,) = leaks([REST, msgspec.structs.replace(REST, **changes)])
    assert "idle" in found


def test_one_jump_of_memory_is_no_slope() -> None:
    made = readings()
    made[3] = msgspec.structs.replace(made[3], memory=900 * MIB)
    assert memory_growth(made) == pytest.approx(0.0)
    assert memory_growth(made[:3]) is None
