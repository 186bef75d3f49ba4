"""Load on a server in a process of its own, and the checkpoints of shapes that it serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import engine
from benchmarks.shapes import SHAPES, write_checkpoint
from src.core.settings import CHECKOUT
from src.text.tokenizer import Tokenizer
from tests.benchmarks.conftest import Lines

DEMO = str(CHECKOUT / "configs" / "demo.toml")


def test_every_id_of_a_shape_has_text(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "tiny", layers=1, all_have_text=True)
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 1
    tokenizer = Tokenizer.from_directory(directory)
    ids = set(range(SHAPES["tiny"]["vocab_size"])) - set(tokenizer.added_tokens)
    assert len(ids) > 4000
    assert all(tokenizer.decode([token_id]) for token_id in ids)
    # What it had before is as it was.
    ordinary = Tokenizer.from_directory(CHECKOUT / "configs" / "demo")
    text = "Once upon a time, w3000 of them"
    assert tokenizer.encode(text) == ordinary.encode(text)


@pytest.mark.anyio
async def test_streams_of_a_server_are_measured(results: Lines) -> None:
    sizes = ["--requests", "6", "--input-len", "8", "--output-len", "24", "--repeats", "2"]
    settings = ["--set", "compile.startup=off", "--set", "device.num_threads=1"]
    load = ["--http-only", "--shape", "tiny", "--streams", "2,80"]
    await engine.run(engine.parse(["--config", DEMO, *load, *sizes, *settings]))
    one, few, many = results("engine")
    assert [line["measure"] for line in (one, few, many)] == [
        "http, one stream",
        "http, 2 streams",
        "http, 80 streams",
    ]
    for line in (few, many):
        figures = line["figures"]
        assert figures["output_throughput"]["low"] > 0
        assert 0 < figures["ttft_median"]["low"] <= figures["ttft_p99"]["high"]
        # Tokens come one by one, so what lies between them is more than nothing; but for those that
        # came together, because nobody read meanwhile.
        assert 0 <= figures["itl_median"]["median"] <= figures["itl_p99"]["high"]
        assert figures["itl_p99"]["high"] > 0
        assert figures["tpot_median"]["repeats"] == 2
        assert (line["shape"], line["requests"], line["output_len"]) == ("tiny", 6, 24)
        assert line["compiled"] is False
    # Nobody waits for a row because there are few.
    assert many["config"]["scheduler"]["max_num_seqs"] == 80
    assert (few["concurrency"], many["concurrency"]) == (2, 80)


@pytest.mark.parametrize("streams", ["0", "2,x", ""])
def test_numbers_of_streams_are_positive(streams: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine.parse(["--streams", streams])
    assert "--streams" in capsys.readouterr().err
