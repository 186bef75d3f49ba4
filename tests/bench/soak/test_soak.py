"""A few seconds of everything, against a real server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from src.bench.soak.server import hurt
from src.bench.soak.soak import SoakReport
from src.cli.main import main
from src.core.config import Config, SchedulerSection
from src.core.settings import CHECKOUT


def test_bounds_that_a_user_sets_stay() -> None:
    assert hurt(Config()).scheduler.max_num_seqs == 16
    config = hurt(Config(scheduler=SchedulerSection(max_num_seqs=3)))
    assert config.scheduler.max_num_seqs == 3
    assert config.scheduler.max_waiting_requests == 32
    assert config.http.admin_key is not None


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_server_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    demo, file = str(CHECKOUT / "configs" / "demo.toml"), tmp_path / "soak.json"
    options = ["--duration", "2", "--concurrency", "12", "--output-json", str(file)]
    code = main(["bench", "soak", "--config", demo, *options])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "held: no leak, no hang, no wrong answer" in said
    report = msgspec.json.decode(file.read_bytes(), type=SoakReport)
    assert report.readings[-1].held == report.num_failures == 0
    # A load that nobody refused would have hurt nobody.
    assert report.outcomes["burst"]["refused"] > 0
    assert report.outcomes["question"]["answered"] > 0
