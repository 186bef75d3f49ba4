"""How much answers may hold together until their readers have taken them."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from src.core.config import Config, HttpSection
from src.core.errors import InvalidRequestError, QueueFullError
from src.http.embeddings.vectors import held_numbers
from src.http.server.held_answers import HeldAnswers


def hold(answers: HeldAnswers, stack: ExitStack, size: int, owner: str = "") -> None:
    stack.enter_context(answers.holding(size, owner, 100))


def test_all_answers_together_hold_no_more_than_the_bound() -> None:
    answers, stack = HeldAnswers(), ExitStack()
    with stack:
        hold(answers, stack, 60)
        hold(answers, stack, 40)
        with pytest.raises(QueueFullError, match=r"of 100 bytes wait.* with 1 more") as raised:
            hold(answers, stack, 1)
        assert raised.value.code == "answers_full"
        assert answers.size == 100
    assert answers.size == 0
    assert not answers._held


def test_one_answer_is_let_in_whatever_its_size() -> None:
    answers, stack = HeldAnswers(), ExitStack()
    with stack:
        hold(answers, stack, 500)
        with pytest.raises(QueueFullError):
            hold(answers, stack, 1)
    with stack:
        hold(answers, stack, 1)


def test_an_owner_leaves_as_much_room_as_it_takes() -> None:
    answers, stack = HeldAnswers(), ExitStack()
    with stack:
        hold(answers, stack, 30, "one")
        hold(answers, stack, 20, "one")
        with pytest.raises(QueueFullError, match="of 50 bytes wait for readers with this key"):
            hold(answers, stack, 1, "one")
        # A first one of another is let in, as long as there is room at all.
        hold(answers, stack, 40, "other")
        with pytest.raises(QueueFullError, match="with this key"):
            hold(answers, stack, 5, "other")
        with pytest.raises(QueueFullError, match="with 11 more they would exceed"):
            hold(answers, stack, 11, "third")
        hold(answers, stack, 10, "third")


def test_an_error_lets_go() -> None:
    answers = HeldAnswers()
    with pytest.raises(ZeroDivisionError), answers.holding(60, "one", 100):
        _ = 1 / 0
    assert answers.size == 0


def test_as_many_texts_as_are_taken_have_room_for_the_documented_vectors() -> None:
    answers, texts = HeldAnswers(), HttpSection().max_embedding_inputs
    server = SimpleNamespace(config=Config(), keep=lambda kind: answers)
    call: Any = SimpleNamespace(server=server, tenant="")
    with ExitStack() as stack:
        for _ in range(7):
            stack.enter_context(held_numbers(call, texts, texts * 4096))
        with pytest.raises(QueueFullError, match="max_held_vector_bytes"):
            stack.enter_context(held_numbers(call, texts, texts * 4096))
    with pytest.raises(InvalidRequestError, match="8390656 numbers"), ExitStack() as stack:
        stack.enter_context(held_numbers(call, texts, texts * 4096 + texts))
