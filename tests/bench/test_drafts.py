"""What a server has drafted is read from its metrics, and is part of the report."""

from __future__ import annotations

import pytest

from src.bench import drafts as drafts_module
from src.bench.drafts import Drafts, read_drafts
from src.bench.errors import BenchError
from src.bench.target import Target

TEXT = """# HELP vllm:spec_decode_num_drafts_total Rows.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a} b"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a} b"} 2.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 1.2e+02
vllm:spec_decode_num_accepted_tokens_total 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0
"""
TARGET = Target(root="http://server", url="http://server/v1/completions", kind="completions")


def served(monkeypatch: pytest.MonkeyPatch, text: str | None) -> Drafts:
    def answer(self: Target, path: str) -> str:
        assert path == "/metrics"
        if text is None:
            raise BenchError("there is none")
        return text

    monkeypatch.setattr(Target, "text", answer)
    return read_drafts(TARGET)


def test_counts_are_summed_over_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(monkeypatch, TEXT) == Drafts(12, 120, 60)


@pytest.mark.parametrize("text", [None, "", "process_cpu_seconds_total 5\n"])
def test_a_server_without_them_has_drafted_nothing(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    found = served(monkeypatch, text)
    assert found == Drafts()
    assert (found.lines(), found.fields()) == ([], {})
    assert (found.rate, found.length) == (0.0, 1.0)


def test_the_report_is_of_the_run_alone() -> None:
    run = Drafts(12, 120, 60).since(Drafts(2, 20, 35))
    assert run == Drafts(10, 100, 25)
    assert run.fields() == {
        "spec_decode_acceptance_rate": 25.0,
        "spec_decode_acceptance_length": 3.5,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 100,
        "spec_decode_accepted_tokens": 25,
    }
    lines = run.lines()
    assert "Speculative Decoding" in lines[0]
    assert any(line.startswith("Acceptance rate (%):") and "25.00" in line for line in lines)
    assert all(len(line) <= drafts_module._WIDTH + 5 for line in lines)
