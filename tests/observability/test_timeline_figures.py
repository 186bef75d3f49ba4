"""The figures of a timeline, against a calculation by hand and by numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.observability.timeline_figures import PHASES, figures, milliseconds, quantiles, summary
from tests.observability.test_trace_events import MS, make_step, make_track, make_view


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5)), min_size=1, max_size=60).filter(
        lambda pairs: any(weight for _, weight in pairs)
    )
)
def test_quantiles_are_numpy_s(pairs: list[tuple[float, int]]) -> None:
    found = quantiles([value for value, _ in pairs], [weight for _, weight in pairs])
    repeated = np.repeat([value for value, _ in pairs], [weight for _, weight in pairs])
    assert found is not None
    assert found.count == len(repeated)
    assert found.most == repeated.max()
    for ours, fraction in ((found.p50, 0.5), (found.p99, 0.99)):
        assert ours == np.quantile(repeated, fraction, method="inverted_cdf")


def test_no_values_have_no_quantiles() -> None:
    assert quantiles([]) is None
    assert quantiles([1.0], [0]) is None


def test_the_phases_are_the_parts_of_a_step_in_order() -> None:
    found = figures([make_step(1, 100.0)], [])
    assert list(found.phases) == [name for name, _ in PHASES]
    expected = {
        "plan": 0.1,
        "launch": 0.1,
        "queue": 0.2,
        "device": 1.0,
        "return": 0.05,
        "wait for loop": 0.05,
        "commit": 0.1,
        "publish": 0.1,
    }
    for name, value in expected.items():
        assert found.phases[name].p50 == pytest.approx(value * MS)


def test_sums_and_latencies() -> None:
    steps = [
        make_step(i, 100.0 + 0.01 * i, idle_before=0.5 * MS, preemptions=i == 2, decode_rows=i)
        for i in range(4)
    ]
    early = make_track(1, arrival=99.0, first_token=99.5, ended=100.02)
    found = figures(steps, [early, make_track(2, first_token=100.03)])
    assert (found.num_steps, found.output_tokens, found.prompt_tokens) == (4, 4, 32)
    assert found.seconds == pytest.approx(steps[-1].published - 100.0)
    assert found.bubble == pytest.approx(4 * 0.5 / (4 * 0.5 + 4 * 1.0))
    assert (found.preemptions, found.cached_tokens) == (1, 64)
    assert found.between_tokens is not None
    assert found.between_tokens.count == 1 + 2 + 3
    assert found.between_tokens.p50 == pytest.approx(0.01)
    # The first token of the one came before the first step that is looked at.
    assert (found.ttft is not None, found.ttft and found.ttft.count) == (True, 1)
    assert found.whole is not None
    assert found.whole.p50 == pytest.approx(1.02)


def test_times_of_other_tasks_stand_for_themselves() -> None:
    steps = [make_step(1, 100.0, sampled_rows=1, pooled_rows=2), make_step(2, 102.0)]
    text, vector, score = (
        make_track(1, ended=101.0),
        make_track(2, ended=100.5, task="embed"),
        make_track(3, ended=100.25, task="score"),
    )
    found = figures(steps, [text, vector, score])
    # A vector is no token.
    assert found.output_tokens == 2
    assert found.whole is not None
    assert (found.whole.count, found.whole.p50) == (1, pytest.approx(1.0))
    assert list(found.tasks) == ["embed", "score"]
    assert found.tasks["embed"].p50 == pytest.approx(0.5)
    lines = summary(make_view(steps, [text, vector, score]))
    (line,) = [line for line in lines if line.startswith("to embed")]
    assert line.split()[2:4] == ["500", "ms"]


def test_the_summary_names_the_slowest_steps() -> None:
    slow = make_step(2, 100.1)
    slow = make_step(2, 100.1, device_end=slow.device_start + 0.5)
    lines = summary(make_view([make_step(1, 100.0), slow, make_step(3, 101.0)], []))
    place = lines.index("slowest steps on the device")
    assert lines[place + 1].strip().startswith("step 2: 500 ms")
    assert summary(make_view([], [])) == ["no step was recorded yet"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (1.2e-5, "0.012 ms"), (0.00345, "3.45 ms"), (0.25, "250 ms"), (1.5, "1500 ms"),
     (12.345, "12.3 s"), (12345.6, "12346 s")],
)  # fmt: skip
def test_times_have_a_unit(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_drafts_are_part_of_the_summary() -> None:
    steps = [make_step(i, 100.0 + 0.01 * i, drafted_tokens=4, accepted_tokens=3) for i in range(5)]
    found = figures(steps, [])
    assert (found.drafted_tokens, found.accepted_tokens) == (20, 15)
    # Accepted drafts are output too.
    assert found.output_tokens == sum(step.sampled_rows for step in steps) + 15
    lines = summary(make_view(steps, []))
    assert "20 drafts verified, 15 (75.0 %) accepted" in lines
    assert not any("drafts" in line for line in summary(make_view([make_step(1, 100.0)], [])))
