"""Every drafter of a server, over real sockets: the answers are those of a server without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.asking import COMPLETIONS
from tests.http.processes import ServerProcess
from tests.support.drafts import make_mtp

pytestmark = pytest.mark.timeout(180)

STORY = "The cat sat on the mat. The dog sat on the rug. " * 3
# Biased, so that a model with random weights says something often enough.
ASKED: dict[str, Any] = {
    "prompt": STORY + "The cat sat",
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 1,
    "logit_bias": {"65": 60, "66": 60},
}
SETTINGS = {
    "off": {"METHOD": "off"},
    "suffix": {"METHOD": "suffix"},
    "ngram": {"METHOD": "ngram"},
    "prediction": {"METHOD": "auto"},
    "history": {"METHOD": "auto", "SHARED_HISTORY_BYTES": "1048576"},
    "mtp": {"METHOD": "mtp"},
}


def accepted_of(text: str, source: str) -> float:
    """Accepted drafts of a source, as `/metrics` has it."""
    name = f'slipstream_accepted_draft_tokens_total{{source="{source}"}} '
    return sum(
        float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)
    )


def answers_of(
    source: str, environment: dict[str, str], asked: dict[str, Any]
) -> tuple[list[Any], float]:
    """Choices of the same question asked twice, and how many drafts were accepted."""
    variables = {f"SLIPSTREAM_SPECULATION__{k}": v for k, v in SETTINGS[source].items()}
    variables["SLIPSTREAM_MODEL__DETERMINISTIC"] = "true"
    with ServerProcess.serve({**environment, **variables}) as server:
        server.wait_ready()
        choices = []
        for _ in range(2):
            answer = httpx.post(server.url + COMPLETIONS, json=asked, timeout=60)
            assert answer.status_code == 200, answer.text
            choices.append(answer.json()["choices"])
        return choices, accepted_of(server.get("/metrics").text, source)


@pytest.fixture(scope="module")
def expected(environment: dict[str, str]) -> list[Any]:
    choices, accepted = answers_of("off", environment, ASKED)
    assert choices[0] == choices[1]
    assert accepted == 0
    return choices


@pytest.mark.parametrize("source", [each for each in SETTINGS if each not in ("off", "mtp")])
def test_a_drafter_serves_and_changes_nothing(
    source: str, environment: dict[str, str], expected: list[Any]
) -> None:
    asked = dict(ASKED)
    if source == "prediction":
        text = expected[0][0]["text"]
        asked["prediction"] = {"type": "content", "content": text}
    found, accepted = answers_of(source, environment, asked)
    assert found == expected
    assert accepted > 0


def test_a_layer_of_the_checkpoint_serves_and_changes_nothing(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """One that computes as the model does."""
    path = make_mtp(tmp_path, "glm4_moe", copies=True).path
    own = {**environment, "SLIPSTREAM_MODEL": str(path)}
    asked = {**ASKED, "prompt": [9, 60, 7, 33, 8], "logit_bias": None}
    expected, _ = answers_of("off", own, asked)
    found, accepted = answers_of("mtp", own, asked)
    assert found == expected
    assert accepted > 0
