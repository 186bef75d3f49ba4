"""Every drafter of a server, over real sockets: the answers are those of a server without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.asking import COMPLETIONS
from tests.http.processes import ServerProcess
from tests.support.drafts import make_medusa, make_mtp

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
# What a grammar leaves no choice about is a draft.
FORCED: dict[str, Any] = {
    "prompt": "An object:",
    "max_tokens": 100,
    "temperature": 0,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "thing",
            "schema": {
                "type": "object",
                "properties": {
                    "colour_of_the_thing": {"enum": ["greenish", "reddish"]},
                    "what_it_is_made_of": {"enum": ["wood", "glass"]},
                },
                "required": ["colour_of_the_thing", "what_it_is_made_of"],
                "additionalProperties": False,
            },
        },
    },
}
DEMO = Path("configs/demo")
# Prices are forgotten, and likely guesses tried, within some hundred steps. Where a grammar was
# slow ahead of a text once, it is not looked at for a minute.
LONGEST_SECONDS = 100.0
SETTINGS = {
    "off": {"METHOD": "off"},
    "suffix": {"METHOD": "suffix"},
    "ngram": {"METHOD": "ngram"},
    "prediction": {"METHOD": "auto"},
    "history": {"METHOD": "auto", "SHARED_HISTORY_BYTES": "1048576"},
    "mtp": {"METHOD": "mtp"},
    "draft": {"METHOD": "draft"},
    "medusa": {"METHOD": "medusa"},
    "eagle3": {"METHOD": "eagle3", "MODEL": str(DEMO / "eagle3")},
}


def accepted_of(text: str, source: str) -> float:
    """Accepted drafts of a source, as `/metrics` has it."""
    name = f'slipstream_accepted_draft_tokens_total{{source="{source}"}} '
    return sum(
        float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)
    )


def ask(
    source: str, environment: dict[str, str], bodies: list[dict[str, Any]], *sources: str
) -> tuple[list[Any], list[float]]:
    """Choices of each body in turn, and how many drafts of each of ``sources`` were accepted.

    What pays is measured, and beside other work nothing may seem to for a while. So all is asked
    again until there are some of the first of ``sources``, and of all that a grammar forces.
    """
    variables = {f"SLIPSTREAM_SPECULATION__{k}": v for k, v in SETTINGS[source].items()}
    variables["SLIPSTREAM_MODEL__DETERMINISTIC"] = "true"
    awaited = {each for each in sources[:1] if source != "off"}
    if FORCED in bodies and "grammar" in sources:
        awaited.add("grammar")
    with ServerProcess.serve({**environment, **variables}) as server:
        server.wait_ready()
        found: list[list[Any]] = []
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            choices = []
            for body in bodies:
                answer = httpx.post(server.url + COMPLETIONS, json=body, timeout=60)
                assert answer.status_code == 200, answer.text
                choices.append(answer.json()["choices"])
            found.append(choices)
            assert choices == found[0]
            metrics = server.get("/metrics").text
            if all(accepted_of(metrics, each) for each in awaited) or time.monotonic() > deadline:
                break
        return found[0], [accepted_of(metrics, each) for each in sources]


@pytest.fixture(scope="module")
def expected(environment: dict[str, str]) -> list[Any]:
    """What a server without drafts says to `ASKED`, twice, and to `FORCED`."""
    choices, [accepted] = ask("off", environment, [ASKED, ASKED, FORCED], "suffix")
    assert choices[0] == choices[1]
    assert accepted == 0
    return choices


@pytest.mark.parametrize("source", ["suffix", "ngram", "prediction", "history"])
def test_a_drafter_serves_and_changes_nothing(
    source: str, environment: dict[str, str], expected: list[Any]
) -> None:
    asked = dict(ASKED)
    if source == "prediction":
        text = expected[0][0]["text"]
        asked["prediction"] = {"type": "content", "content": text}
    forced = [FORCED] * 3 if source == "suffix" else []
    found, accepted = ask(source, environment, [asked, asked, *forced], source, "grammar")
    assert found == [*expected[:2], *expected[2:] * len(forced)]
    assert accepted[0] > 0
    assert (accepted[1] > 0) == bool(forced)


@pytest.mark.parametrize("source", ["draft", "medusa"])
def test_a_drafter_with_weights_serves_and_changes_nothing(
    source: str,
    environment: dict[str, str],
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model as its own draft, or random heads."""
    path = environment["SLIPSTREAM_MODEL"]
    if source == "medusa":
        make_medusa(tmp_path)
        path = str(tmp_path)
    monkeypatch.setitem(SETTINGS, source, {**SETTINGS[source], "MODEL": path})
    found, [accepted] = ask(source, environment, [ASKED, ASKED], source)
    assert found == expected[:2]
    assert accepted > 0


def test_the_head_of_the_demo_model_serves_and_changes_nothing(environment: dict[str, str]) -> None:
    own = {**environment, "SLIPSTREAM_MODEL": str(DEMO)}
    asked = {**ASKED, "prompt": "The sea is", "logit_bias": None}
    warm = {**asked, "temperature": 0.8, "seed": 5}
    expected, _ = ask("off", own, [asked, warm])
    found, [accepted] = ask("eagle3", own, [asked, warm], "eagle3")
    assert found == expected
    assert accepted > 0


def test_a_layer_of_the_checkpoint_serves_and_changes_nothing(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """One that computes as the model does."""
    path = make_mtp(tmp_path, "glm4_moe", copies=True).path
    own = {**environment, "SLIPSTREAM_MODEL": str(path)}
    asked = {**ASKED, "prompt": [9, 60, 7, 33, 8], "logit_bias": None}
    expected, _ = ask("off", own, [asked, asked])
    found, [accepted] = ask("mtp", own, [asked, asked], "mtp")
    assert found == expected
    assert accepted > 0
