from __future__ import annotations

import itertools
import json
import re
from typing import Any

import httpx
import pytest

from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

GREEDY = {"temperature": 0}
PROMPT = "Once upon a time"


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; checks its frame."""
    body = {"prompt": PROMPT, **GREEDY, **fields, "stream": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, empty = answer.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_completion_is_what_the_engine_generates(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    body = await complete(client, max_tokens=12)
    expected = await engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=12))
    (choice,) = body["choices"]
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason.value
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["id"].startswith("cmpl-")
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(expected.prompt_token_ids)
    assert usage["completion_tokens"] == len(expected.token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_text_and_its_token_ids_are_the_same_prompt(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    ids = await engine.tokenize(PROMPT)
    by_text = await complete(client, max_tokens=8)
    by_ids = await complete(client, prompt=ids, max_tokens=8)
    assert by_text["choices"] == by_ids["choices"]


async def test_sixteen_tokens_are_the_default(client: httpx.AsyncClient) -> None:
    body = await complete(client, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


async def test_the_default_shrinks_to_what_fits(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    prompt = [7] * (engine.model_info.max_model_len - 3)
    body = await complete(client, prompt=prompt, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 3


async def test_a_stream_joins_to_the_completion(client: httpx.AsyncClient) -> None:
    whole = await complete(client, max_tokens=40, ignore_eos=True)
    events = await stream(client, max_tokens=40, ignore_eos=True)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


async def test_usage_comes_last_when_asked_for(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True}
    *events, last = await stream(client, max_tokens=5, ignore_eos=True, stream_options=options)
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5


async def test_null_options_of_a_stream_are_absent_ones(client: httpx.AsyncClient) -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    events = await stream(client, max_tokens=3, stream_options=options)
    assert all("usage" not in event and event["choices"] for event in events)


async def test_the_newer_name_of_the_token_limit(client: httpx.AsyncClient) -> None:
    for fields in ({}, {"max_tokens": 4}):
        body = await complete(client, max_completion_tokens=4, ignore_eos=True, **fields)
        assert body["usage"]["completion_tokens"] == 4


async def test_a_minimum_over_the_default_raises_it(client: httpx.AsyncClient) -> None:
    body = await complete(client, min_tokens=20, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 20


async def test_usage_comes_always_when_asked_for(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(client, max_tokens=5, ignore_eos=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_several_prompts_n_times_have_indices_prompt_by_prompt(
    client: httpx.AsyncClient,
) -> None:
    prompts = ["Once upon a time", "The quick brown fox"]
    alone = [await complete(client, prompt=p, n=2, max_tokens=6) for p in prompts]
    both = await complete(client, prompt=prompts, n=2, max_tokens=6)
    expected = [choice["text"] for body in alone for choice in body["choices"]]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in both["choices"]] == expected
    assert both["usage"]["completion_tokens"] == sum(
        body["usage"]["completion_tokens"] for body in alone
    )


async def test_several_prompts_stream_together(client: httpx.AsyncClient) -> None:
    fields = {"prompt": [[20, 21, 22], [30, 31]], "n": 2, "max_tokens": 6}
    whole = await complete(client, **fields)
    texts = ["", "", "", ""]
    for event in await stream(client, **fields):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


async def test_seeds_repeat_and_differ(client: httpx.AsyncClient) -> None:
    def sampled(seed: int) -> Any:
        return complete(client, temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)

    first, again, other = [(await sampled(seed))["choices"][0]["text"] for seed in (1, 1, 2)]
    assert first == again != other


async def test_a_stop_string_ends_the_text_before_it(client: httpx.AsyncClient) -> None:
    whole = (await complete(client, max_tokens=30, ignore_eos=True))["choices"][0]["text"]
    stop = whole[10:13]
    choice = (await complete(client, max_tokens=30, ignore_eos=True, stop=[stop]))["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    kept = await complete(
        client, max_tokens=30, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    )
    assert kept["choices"][0]["text"] == whole[: whole.index(stop)] + stop


async def test_a_stop_token_is_named(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
    result = await engine.generate(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    )
    stop = result.token_ids[5]
    body = await complete(client, max_tokens=9, ignore_eos=True, stop_token_ids=[stop])
    assert body["choices"][0]["stop_reason"] == stop
    assert body["usage"]["completion_tokens"] == result.token_ids.index(stop) + 1


async def test_logprobs_have_the_legacy_shape(client: httpx.AsyncClient) -> None:
    body = await complete(client, max_tokens=6, ignore_eos=True, logprobs=3)
    choice = body["choices"][0]
    shape = choice["logprobs"]
    assert {len(entries) for entries in shape.values()} == {6}
    for token, logprob, top in zip(
        shape["tokens"], shape["token_logprobs"], shape["top_logprobs"], strict=True
    ):
        # Greedy: the chosen token is the likeliest.
        assert logprob == pytest.approx(max(top.values()))
        assert token in top
        assert logprob < 0
    assert shape["text_offset"][0] == 0
    check_offsets(choice["text"], shape)


def check_offsets(text: str, shape: dict[str, Any]) -> None:
    """Every token that is whole text stands in the text where its offset says."""
    offsets = [*shape["text_offset"], len(text)]
    assert offsets == sorted(offsets)
    for index, name in enumerate(shape["tokens"]):
        if not name.startswith("bytes:") and offsets[index] < offsets[index + 1]:
            assert text.startswith(name, offsets[index])


async def test_offsets_count_characters_of_the_text_and_not_of_names(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    prompt = "é日本🙂 a 日 end"
    body = await complete(client, prompt=prompt, max_tokens=8, logprobs=1, echo=True, seed=3)
    choice = body["choices"][0]
    text, shape = choice["text"], choice["logprobs"]
    assert text.startswith(prompt)
    check_offsets(text, shape)
    parts = [name for name in shape["tokens"] if name.startswith("bytes:")]
    assert parts, "this tokenizer has no tokens for such characters"
    assert all(re.fullmatch(r"bytes:(\\x[0-9a-f]{2})+", name) for name in parts)
    # The output begins where the prompt ends, whatever the names of the prompt's tokens are.
    ids = await engine.tokenize(prompt)
    assert shape["text_offset"][len(ids)] == len(prompt)
    # Every token of the prompt begins at the character that holds its first byte.
    encoded = prompt.encode()
    ends = list(itertools.accumulate(len(engine.tokenizer.token_bytes(i)) for i in ids[:-1]))
    expected = [len(encoded[:end].decode(errors="ignore")) for end in [0, *ends]]
    assert shape["text_offset"][: len(ids)] == expected


async def test_logprobs_are_the_same_in_a_stream(client: httpx.AsyncClient) -> None:
    fields = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    whole = (await complete(client, **fields))["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {key: [] for key in whole}
    for event in await stream(client, **fields):
        for key, entries in (event["choices"][0]["logprobs"] or {}).items():
            joined[key] += entries
    assert joined["tokens"] == whole["tokens"]
    assert joined["text_offset"] == whole["text_offset"]
    assert joined["token_logprobs"] == pytest.approx(whole["token_logprobs"], abs=1e-4)


async def test_tokens_may_be_named_by_their_ids(client: httpx.AsyncClient) -> None:
    fields = {"max_tokens": 3, "logprobs": 1, "return_tokens_as_token_ids": True}
    tokens = (await complete(client, **fields))["choices"][0]["logprobs"]["tokens"]
    assert all(token.startswith("token_id:") for token in tokens)


async def test_log_likelihood_requests_of_evaluation_harnesses(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    context, continuation = await engine.tokenize("Once upon"), await engine.tokenize(" a time")
    ids = context + continuation
    body = await complete(client, prompt=ids, max_tokens=1, logprobs=1, echo=True)
    choice = body["choices"][0]
    shape = choice["logprobs"]
    # One entry per prompt token and one for the token that had to be generated.
    assert len(shape["token_logprobs"]) == len(ids) + 1
    assert shape["token_logprobs"][0] is None
    assert shape["top_logprobs"][0] is None
    scored = shape["token_logprobs"][len(context) : -1]
    tops = shape["top_logprobs"][len(context) : -1]
    assert all(value <= max(top.values()) + 1e-6 for value, top in zip(scored, tops, strict=True))
    assert choice["text"].startswith(engine.tokenizer.decode(ids))
    none = await complete(client, prompt=ids, max_tokens=0, logprobs=1, echo=True)
    only = none["choices"][0]["logprobs"]
    assert only["token_logprobs"][1:] == pytest.approx(shape["token_logprobs"][1:-1], abs=1e-4)
    assert none["usage"]["completion_tokens"] == 0
    assert none["choices"][0]["text"] == engine.tokenizer.decode(ids)


async def test_echo_in_a_stream_comes_first(client: httpx.AsyncClient) -> None:
    whole = (await complete(client, max_tokens=4, echo=True))["choices"][0]["text"]
    events = await stream(client, max_tokens=4, echo=True)
    assert events[0]["choices"][0]["text"].startswith(PROMPT)
    assert "".join(event["choices"][0]["text"] for event in events) == whole


async def test_prompt_logprobs_have_vllms_shape(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    ids = await engine.tokenize(PROMPT)
    body = await complete(client, max_tokens=1, prompt_logprobs=2)
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for token_id, entry in zip(ids[1:], others, strict=True):
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
        assert len(entry) >= 2


async def test_what_restricts_tokens_is_honoured(client: httpx.AsyncClient) -> None:
    body = await complete(
        client, max_tokens=5, allowed_token_ids=[40], logprobs=0, return_tokens_as_token_ids=True
    )
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:40"] * 5
    body = await complete(
        client, max_tokens=5, logit_bias={"41": 100}, logprobs=0, return_tokens_as_token_ids=True
    )
    assert "token_id:41" in body["choices"][0]["logprobs"]["tokens"]


async def test_cached_prompt_tokens_are_counted_and_a_salt_keeps_them_apart(
    client: httpx.AsyncClient,
) -> None:
    def asking(salt: str) -> Any:
        return complete(client, prompt=[60 + i % 90 for i in range(100)], cache_salt=salt)

    def cached(body: dict[str, Any]) -> int:
        count: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(await asking("a")) == 0
    assert cached(await asking("a")) >= 64
    assert cached(await asking("b")) == 0


@pytest.mark.usefixtures("late_soon")
async def test_a_deadline_ends_it_with_what_it_has(client: httpx.AsyncClient) -> None:
    body = await complete(client, max_tokens=900, ignore_eos=True, timeout=300)
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert 0 < body["usage"]["completion_tokens"] < 900


async def test_a_deadline_before_the_first_token_is_an_error(client: httpx.AsyncClient) -> None:
    fields = {"prompt": [50] * 900, "max_tokens": 5, "timeout": 1e-6}
    for streaming in (False, True):
        answer = await client.post("/v1/completions", json={**fields, "stream": streaming})
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "deadline_exceeded"


async def test_requests_carry_an_id(client: httpx.AsyncClient) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    named = await client.post("/v1/completions", json=body, headers={"x-request-id": "abc-1"})
    assert named.headers["x-request-id"] == "abc-1"
    made_up = await client.post("/v1/completions", json=body, headers={"x-request-id": "a\tb"})
    assert len(made_up.headers["x-request-id"]) == 32
