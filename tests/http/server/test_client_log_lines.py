"""Nothing that a client sends writes a line of the log, and names that it chooses are not there."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import httpx
import pytest

from src.observability.logs import TextFormatter
from tests.http.asking import ASKS_WEATHER, CHAT, COMPLETIONS, MESSAGES, RESPONSES

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

NAME = "secret\n2026-11-27 00:00:00.000 INFO    engine.loop: forged\u2028forged\x1b[2J\x85"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the text log says of everything, the least important too."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter())
    logger, level = logging.getLogger("src"), logging.getLogger("src").level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


# None of these can be enforced, each for a reason of its own.
UNENFORCED = {
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "pattern": {"type": "string", "pattern": f"(?=secret){NAME}"},
    "contains": {"contains": {"const": NAME}},
    "$ref": {"$ref": f"#/$defs/{NAME}"},
}


@pytest.mark.parametrize("kind", UNENFORCED)
async def test_names_of_tools_and_properties_stay_out_of_the_log(
    demo_client: httpx.AsyncClient, log: io.StringIO, kind: str
) -> None:
    schema = {"type": "object", "properties": {NAME: UNENFORCED[kind], f"{NAME}2": {}}}
    function = {"name": "get_weather", "description": NAME, "parameters": schema}
    answer = await demo_client.post(
        CHAT,
        json={
            "messages": ASKS_WEATHER,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "max_tokens": 4,
        },
    )
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200:
        # That something was left out is said; what it was called is not.
        assert "cannot be enforced and are left out: 1\n" in log.getvalue()
    assert "secret" not in log.getvalue()
    assert "forged" not in log.getvalue()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "user": NAME, NAME: 1}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "model": NAME}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "request_id": NAME}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "stop": [NAME], "bad_words": [NAME]}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "guided_regex": f"({NAME}"}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "guided_grammar": f"start: {NAME}"}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "logit_bias": {NAME: 1}}),
        (CHAT, {"messages": [{"role": NAME, "content": NAME}], "max_tokens": 1}),
        (CHAT, {"messages": ASKS_WEATHER, "max_tokens": 1, "chat_template_kwargs": {NAME: NAME}}),
        (RESPONSES, {"input": NAME, "max_output_tokens": 16, "metadata": {NAME: NAME}}),
        (RESPONSES, {"input": "x", "previous_response_id": NAME}),
        (MESSAGES, {"messages": [{"role": "user", "content": NAME}], "max_tokens": 1}),
        ("/v1/load_lora_adapter", {"lora_name": NAME, "lora_path": NAME}),
        ("/v1/unload_lora_adapter", {"lora_name": NAME}),
        ("/tokenize", {"prompt": NAME}),
        ("/detokenize", {"tokens": NAME}),
    ],
)
async def test_no_field_of_a_request_is_in_the_log(
    demo_client: httpx.AsyncClient, log: io.StringIO, path: str, body: dict[str, object]
) -> None:
    model = {} if path.startswith(("/v1/load", "/v1/unload")) else {"model": "demo"}
    answer = await demo_client.post(path, json={**model, **body})
    assert answer.status_code < 500, answer.text
    assert "secret" not in log.getvalue()
    assert "forged" not in log.getvalue()
