"""The synchronous front, on a real engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from src import LLM, SamplingParams
from src.core.errors import InvalidRequestError, ModelLoadError
from tests.support.engines import greedy, random_prompts, small_config


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(small_config(checkpoint, scheduler__max_waiting_requests=4)) as llm:
        yield llm


def test_a_batch_longer_than_the_queue_comes_back_in_order(llm: LLM, reference: Any) -> None:
    prompts = random_prompts(40, longest=10, seed=21)
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.prompt_token_ids == prompt
        assert result.token_ids == greedy(reference, prompt, 3)


def test_one_prompt_many_prompts_and_params_for_each(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (single,) = llm.generate("Hello", params)
    (of_ids,) = llm.generate(single.prompt_token_ids, params)
    assert of_ids.token_ids == single.token_ids
    longer = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    first, second = llm.generate(["Hello", "Hello"], [params, longer])
    assert (first.token_ids, len(second.token_ids)) == (single.token_ids, 5)
    with pytest.raises(ValueError, match="expected one SamplingParams or 2 of them, got 1"):
        llm.generate(["Hello", "Hello"], [params])


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    conversation = [{"role": "user", "content": "Hello"}]
    (one,) = llm.chat(conversation, params)
    two = llm.chat([conversation, conversation], params)
    assert [result.token_ids for result in two] == [one.token_ids] * 2


def test_a_bad_prompt_is_raised_as_itself_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="token ids must be from 0 to 319, got 999"):
        llm.generate([[5, 6], [999]], SamplingParams(max_tokens=3))
    (result,) = llm.generate("Hello", SamplingParams(max_tokens=1))
    assert len(result.token_ids) == 1


def test_a_progress_bar_when_asked(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Hello", "you"], SamplingParams(max_tokens=1), progress=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["Hello", "you"], SamplingParams(max_tokens=1), progress=False)
    assert capsys.readouterr().err == ""


def test_a_failed_load_is_raised_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ModelLoadError):
        LLM(small_config(tmp_path))
    assert threading.active_count() <= before + 1  # asyncio's own worker may linger a moment
