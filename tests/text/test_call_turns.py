"""Calls of a turn one at a time, each with its results."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from src.text.call_turns import CallForms, shaped
from tests.support.slowness import own_time, slowness

ONE_AT_A_TIME = CallForms(one_at_a_time=True)
IDS = st.sampled_from(["a", "b", "c", None, ""])


def call(call_id: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": f"f{number}", "arguments": {}}
    return {"type": "function", "function": function} | ({} if call_id is None else {"id": call_id})


def turn(ids: list[Any]) -> dict[str, Any]:
    calls = [call(call_id, number) for number, call_id in enumerate(ids)]
    return {"role": "assistant", "tool_calls": calls}


def result(call_id: Any, number: int = 0) -> dict[str, Any]:
    named = {} if call_id is None else {"tool_call_id": call_id}
    return {"role": "tool", "content": f"result {number}", **named}


TURNS = st.tuples(st.lists(IDS, min_size=1, max_size=6), st.lists(IDS, max_size=8))


def by_definition(ids: list[Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call with all that is left of its results, or with one where nothing has an id."""
    shown: list[dict[str, Any]] = []
    left = list(results)
    for number, call_id in enumerate(ids):
        shown.append({"role": "assistant", "tool_calls": [call(call_id, number)]})
        own = [one for one in left if one.get("tool_call_id") == call_id]
        own = own[:1] if call_id is None else own
        shown += own
        left = [one for one in left if one not in own]
    return shown + left


@given(turns=st.lists(TURNS, max_size=3))
def test_each_call_is_followed_by_its_results(turns: list[tuple[list[Any], list[Any]]]) -> None:
    chat: list[dict[str, Any]] = []
    expected: list[dict[str, Any]] = []
    for ids, answered in turns:
        results = [result(call_id, number) for number, call_id in enumerate(answered)]
        chat += [turn(ids), *results]
        # The turn of one call stays as it is.
        expected += [turn(ids), *results] if len(ids) < 2 else by_definition(ids, results)
    assert shaped(copy.deepcopy(chat), ONE_AT_A_TIME) == expected


def test_ids_that_are_no_text_are_told_apart_too() -> None:
    chat = [turn([["a"], {"b": 1}]), result({"b": 1}, 1), result(["a"], 2), result("x", 3)]
    shown = [one.get("content") for one in shaped(chat, ONE_AT_A_TIME)]
    assert shown == [None, "result 2", None, "result 1", "result 3"]


def test_many_calls_and_results_take_time_by_their_number() -> None:
    ids = [f"call {number}" if number % 2 else None for number in range(5000)]
    # Of the last call first, and strays.
    results = [
        result(call_id, number) for number, call_id in enumerate([*reversed(ids), *["x"] * 3000])
    ]
    with own_time() as spent:
        shown = shaped([turn(ids), *results], ONE_AT_A_TIME)
        assert spent() < 1 * slowness()
    assert len(shown) == 5000 + 8000
