"""Ids of calls of another model, for templates that take nine letters and digits."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.text.call_ids import shorten_ids
from src.text.chat_template import ChatTemplate
from tests.text.chat_templates import BY_KIND, MISTRAL_IDS

FITS = re.compile("[0-9A-Za-z]{9}")
IDS = st.sampled_from(
    ["call_1", "call_2", "toolu_01AbC", "fc_12345", "aB3dE6gH9", "aB3dE6gH90", "call_1234", "x"]
)


def turn(*ids: str | None) -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": {}}} for i in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(call_id: str | None) -> dict[str, Any]:
    named = {} if call_id is None else {"tool_call_id": call_id}
    return {"role": "tool", "content": "r", **named}


def shortened(chat: list[dict[str, Any]]) -> list[str]:
    """The ids of all calls and results, in order."""
    chat = copy.deepcopy(chat)
    shorten_ids(chat)
    ids: list[str] = []
    for message in chat:
        ids += [call["id"] for call in message.get("tool_calls", ())]
        if message["role"] == "tool":
            ids.append(message["tool_call_id"])
    return ids


@given(st.lists(IDS | st.text(max_size=12).filter(bool), min_size=1, max_size=12))
def test_each_id_has_nine_characters_of_its_own_that_stay(ids: list[str]) -> None:
    chat = [message for i in ids for message in (turn(i), result(i))]
    short = shortened(chat)
    assert all(FITS.fullmatch(i) for i in short)
    assert short[::2] == short[1::2]
    # As many as there were, and the same for the same.
    assert len(set(zip(ids, short[::2], strict=True))) == len(set(ids)) == len(set(short))
    # What was said before is spelt as it was.
    assert shortened(chat[:2]) == short[:2]
    assert all(short == i for i, short in zip(ids, short[::2], strict=True) if FITS.fullmatch(i))


def test_an_id_that_fits_stays_and_others_depend_on_nothing_else() -> None:
    assert shortened([turn("aB3dE6gH9"), result("aB3dE6gH9")]) == ["aB3dE6gH9"] * 2
    (alone,) = shortened([turn("call_1")])
    assert shortened([turn("call_7", "call_1"), result("call_1")])[1:] == [alone, alone]


def test_ids_do_not_collide_with_one_that_another_became() -> None:
    (taken,) = shortened([turn("call_1")])
    first, second, of_first, of_second = shortened(
        [turn("call_1", taken), result("call_1"), result(taken)]
    )
    assert (first, second) == (of_first, of_second)
    assert first == taken
    assert second != taken


@pytest.mark.parametrize("none", [None, ""])
def test_calls_and_results_without_ids_belong_together_in_order(none: str | None) -> None:
    ids = shortened([turn(none, "call_1", none), result(none), result("call_1"), result(none)])
    assert len(set(ids[:3])) == 3
    assert ids[3:] == ids[:3]
    assert FITS.fullmatch(shortened([result(none)])[0])


def test_only_a_template_that_asks_for_it_gets_short_ids() -> None:
    chat = [{"role": "user", "content": "u"}, turn("call_1", "call_2"), result("call_2")]
    text = ChatTemplate(MISTRAL_IDS, special_tokens={"bos_token": "", "eos_token": ""}).render(chat)
    one, two = re.findall('"id": "([^"]*)"', text)
    assert re.findall('"call_id": "([^"]*)"', text) == [two]
    assert FITS.fullmatch(one)
    assert FITS.fullmatch(two)
    assert one != two
    shows_ids = BY_KIND["prints content"].replace('{"name"', '{"id": "{{ t.id }}", "name"')
    assert '"id": "call_2"' in ChatTemplate(shows_ids).render(chat)
