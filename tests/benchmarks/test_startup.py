"""Starts in fresh processes: what is measured of them, and where they find artifacts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import startup
from src import Config
from src.ops.build.cache_root import cache_root
from tests.benchmarks.conftest import Lines
from tests.support.engines import small_config

DEMO = Path(__file__).parents[2] / "configs" / "demo"


@pytest.mark.timeout(900)  # of which compilers take most, where nothing is in the cache
def test_a_start_is_measured_up_to_compiled_code() -> None:
    config = small_config(DEMO, compile__enforce_eager=False, compile__startup="background")
    seen = startup.start(config, str(cache_root()))
    assert seen.keys() == startup.STARTUP.keys() | startup.COMPILATION.keys()
    assert 0 < seen["ready"] < seen["first_token"] < seen["compiled"]
    assert seen["graphs"] == 4
    assert 0 < seen["compilation"] < seen["compiled"]


def test_cold_and_warm_starts_are_recorded(results: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without compilers, whose work takes a minute.
    monkeypatch.setenv("CXX", "no-such-compiler")
    counts = ["--cold-repeats", "1", "--repeats", "1"]
    startup.main(["--models", "tiny", "--depths", "--set", "compile.startup=off", *counts])
    cold, warm = results("startup")
    assert [line["measure"] for line in (cold, warm)] == ["tiny, cold start", "tiny, warm start"]
    for line in (cold, warm):
        figures = {name: figure["median"] for name, figure in line["figures"].items()}
        assert 0 < figures["ready"] < figures["first_token"] <= figures["kernels"]
        assert (figures["graphs"], figures["compilation"]) == (0, 0)
        assert line["config"]["compile"]["startup"] == "off"


class Starts:
    """In the place of processes: takes down where artifacts are, and leaves one there."""

    def __init__(self) -> None:
        self.seen: list[tuple[Path, set[str]]] = []
        self.caches: list[str] = []

    def __call__(self, config: Config, cache: str) -> dict[str, float]:
        self.seen.append((Path(config.model.path), {file.name for file in Path(cache).iterdir()}))
        self.caches.append(cache)
        (Path(cache) / "left").touch()
        number = float(len(self.seen))
        return dict.fromkeys((*startup.STARTUP, *startup.COMPILATION), number)


def test_only_cold_starts_begin_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts()
    monkeypatch.setattr(startup, "start", starts)
    found = startup.measure(small_config(DEMO), cold_repeats=2, warm_repeats=2)
    assert [files for _, files in starts.seen] == [set(), set(), {"left"}, {"left"}]
    assert [[start["ready"] for start in found[kind]] for kind in ("cold", "warm")] == [
        [1, 2],
        [3, 4],
    ]
    assert not any(Path(cache).exists() for cache in starts.caches)


def test_depths_take_turns_and_find_the_kernels_alone(
    results: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts()
    monkeypatch.setattr(startup, "start", starts)
    monkeypatch.setattr(
        startup, "_build_kernels", lambda cache: (Path(cache) / "cpu-kernels").mkdir()
    )
    startup.main(["--models", "--depths", "1", "3", "--depth-shape", "tiny", "--cold-repeats", "2"])
    assert [path.name for path, _ in starts.seen] == ["1", "3", "3", "1"]
    assert all(files == {"cpu-kernels"} for _, files in starts.seen)
    one, three, ratio = results("startup")
    assert (one["layers"], three["layers"]) == (1, 3)
    # Starts 1 and 4 have one layer, 2 and 3 have three: 2 / 1, and 3 / 4.
    assert ratio["figures"]["compilation"]["low"] == 0.75
    assert ratio["figures"]["compilation"]["high"] == 2
    assert one["config"]["compile"]["startup"] == "wait"
