"""The synchronous front, on a real engine."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
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
    eventually(lambda: threading.active_count() == before)


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("limits", [{"max_waiting_tokens": 30}, {"max_waiting_requests": 2}])
def test_a_batch_with_more_than_the_queue_takes(
    checkpoint: Path, reference: Any, limits: dict[str, int]
) -> None:
    changes = {f"scheduler__{name}": value for name, value in limits.items()}
    prompts = random_prompts(30, longest=14, seed=5)
    params = SamplingParams(temperature=0, max_tokens=3, n=2)
    with LLM(small_config(checkpoint, **changes)) as llm:
        results = llm.generate(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        expected = greedy(reference, prompt, 3)
        assert [completion.token_ids for completion in result.completions] == [expected] * 2


def test_an_interrupted_batch_is_aborted(llm: LLM) -> None:
    def interrupt() -> None:
        eventually(lambda: llm.engine.stats.num_running > 0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]] * 400, SamplingParams(max_tokens=100, ignore_eos=True))
    thread.join()
    eventually(lambda: llm.engine.stats.num_running + llm.engine.stats.num_waiting == 0)
    (result,) = llm.generate("Hello", SamplingParams(max_tokens=1))
    assert len(result.token_ids) == 1


def test_an_interrupt_while_a_batch_is_handed_over_aborts_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over = asyncio.run_coroutine_threadsafe

    def interrupted(coroutine: Any, loop: asyncio.AbstractEventLoop) -> None:
        hand_over(coroutine, loop)
        eventually(lambda: llm.engine.stats.num_running > 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]] * 400, SamplingParams(max_tokens=100, ignore_eos=True))
    monkeypatch.undo()
    # All of it would take three times as long.
    eventually(lambda: llm.engine.stats.num_running + llm.engine.stats.num_waiting == 0, 6.0)


def test_nothing_is_left_of_one_that_nobody_refers_to(checkpoint: Path) -> None:
    before = threading.active_count()
    llm = LLM(small_config(checkpoint))
    llm.generate("Hello", SamplingParams(max_tokens=1))
    engine, ended = llm.engine, weakref.ref(llm)
    del llm
    gc.collect()
    assert ended() is None
    eventually(lambda: threading.active_count() == before)
    assert engine.status.phase == "closed"


def test_a_closed_one_says_so(checkpoint: Path) -> None:
    llm = LLM(small_config(checkpoint))
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("Hello")


SCRIPTS = {
    "bound": "llm = LLM(config); print(len(llm.generate(prompts, params)))",
    "unbound": "print(len(LLM(config).generate(prompts, params)))",
    "in a thread": """
def use():
    global llm
    llm = LLM(config)
    print(len(llm.generate(prompts, params)))
thread = threading.Thread(target=use)
thread.start()
thread.join()
""",
    "in a cycle": "llm = LLM(config); llm.me = llm; print(len(llm.generate(prompts, params)))",
    "two": "a = LLM(config); b = LLM(config); print(len(b.generate(prompts, params)))",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_process_that_closes_nothing_ends(checkpoint: Path, script: str) -> None:
    start = f"""
import threading
from pathlib import Path
from src import LLM, SamplingParams
from tests.support.engines import small_config
config = small_config(Path({str(checkpoint)!r}))
prompts, params = [[5, 6, 7]] * 3, SamplingParams(max_tokens=2)
"""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", start + script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
