"""Past responses within bounds, and whose go first."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.errors import InvalidRequestError
from src.http.protocol.chat import ChatMessage, ContentPart, FunctionCall, ToolCall
from src.http.protocol.responses import OutputMessage, ResponseBody
from src.http.responses.store import ResponseStore, StoredResponse, said, said_more
from src.http.server.errors import RouteNotFoundError

BOUNDS = {"max_entries": 6, "max_bytes": 100}
OWNERS = (b"alice", b"bob", b"carol")


def response(owner: bytes, name: str, *, held: bool = False) -> StoredResponse:
    body = ResponseBody(
        id=name,
        created_at=0,
        status="in_progress" if held else "completed",
        background=held,
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="m",
        output=[],
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning={},
        temperature=1.0,
        text={},
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
    )
    abort = (lambda: None) if held else None
    return StoredResponse(body=body, owner=owner, messages=None if held else b"[]", abort=abort)


def message(name: str) -> OutputMessage:
    return OutputMessage(id=name, status="completed", content=[])


def test_who_has_most_makes_room() -> None:
    store = ResponseStore()
    kept = [response(b"alice", f"a{i}") for i in range(3)]
    for entry in kept:
        store.put(entry, 10, **BOUNDS)
    floods = [response(b"bob", f"b{i}") for i in range(50)]
    for entry in floods:
        store.put(entry, 10, **BOUNDS)
    assert all(store.has(entry) for entry in kept)
    assert [store.has(entry) for entry in floods] == [False] * 47 + [True] * 3
    # By bytes too; and the last one to come is no exception.
    store.put(response(b"bob", "large"), 90, **BOUNDS)
    assert (len(store), store.size) == (3, 30)
    assert all(store.has(entry) for entry in kept)


def test_of_equals_who_put_nothing_for_longest_makes_room() -> None:
    store = ResponseStore()
    entries = [response(b"%d" % i, "same") for i in range(8)]
    for entry in entries:
        store.put(entry, 10, **BOUNDS)
    assert [store.has(entry) for entry in entries] == [False] * 2 + [True] * 6
    with pytest.raises(InvalidRequestError):
        store.put(response(b"7", "same"), 10, **BOUNDS)
    with pytest.raises(RouteNotFoundError):
        store.get("same", b"0")


def test_the_items_of_what_is_forgotten_are_forgotten() -> None:
    """However a response goes: for want of room, at its owner's word, or as another version."""
    store = ResponseStore()

    def put(name: str, *items: str) -> StoredResponse:
        entry = response(b"alice", name)
        entry.body.output += map(message, items)
        store.put(entry, 10, **BOUNDS)
        return entry

    entries = [put(f"r{i}", f"r{i} first", f"r{i} second") for i in range(9)]
    assert [store.item(f"r{i} second", b"alice") is not None for i in range(9)] == [
        *([False] * 3 + [True] * 6)
    ]
    store.delete("r5", b"alice")
    store.forget(entries[6])
    assert store._items.keys() == {f"r{i} {n}" for i in (3, 4, 7, 8) for n in ("first", "second")}
    # The same response as it goes on.
    entries[7].body.output.append(message("r7 third"))
    store.put(entries[7], 20, **BOUNDS)
    assert store.item("r7 third", b"alice") is not None
    for name in ("r3", "r4", "r7", "r8"):
        store.delete(name, b"alice")
    assert (len(store), store.size, store._items) == (0, 0, {})


def test_what_was_said_comes_back_as_it_was() -> None:
    """However many calls a message has: together they have been let in already."""
    call = ToolCall(id="c", function=FunctionCall(name="f", arguments='{"a": "\u00e9"}'))
    messages = [
        ChatMessage(role="developer", content="Be brief."),
        ChatMessage(role="user", content=[ContentPart(type="text", text="\U0001f642\n")] * 2000),
        ChatMessage(role="assistant", reasoning_content="Hm.", tool_calls=[call] * 2000),
        ChatMessage(role="tool", content="", tool_call_id="c"),
    ]
    answer = ChatMessage(role="assistant", content="Yes.")
    store = ResponseStore()
    entry = response(b"alice", "a")
    entry.messages = said_more(said(messages), answer)
    store.put(entry, 10, **BOUNDS)
    history = store.history("a", b"alice")
    assert all(isinstance(message, ChatMessage) for message in history)
    assert msgspec.to_builtins(history) == msgspec.to_builtins([*messages, answer])


@given(
    st.lists(
        st.tuples(st.sampled_from(OWNERS), st.integers(0, 7), st.integers(0, 60), st.booleans()),
        max_size=40,
    )
)
def test_bounds_hold_and_a_fair_share_is_nobodys_to_take(
    puts: list[tuple[bytes, int, int, bool]],
) -> None:
    store = ResponseStore()
    alive: dict[tuple[bytes, str], tuple[StoredResponse, int]] = {}
    for owner, number, size, held in puts:
        if held and not store.has_room(size, **BOUNDS):
            continue
        key = owner, f"r{number}"
        before = {k: v for k, v in alive.items() if k != key}
        if key in alive:
            store.delete(key[1], owner)
        entry = response(*key, held=held)
        store.put(entry, size, **BOUNDS)
        alive = {k: v for k, v in (before | {key: (entry, size)}).items() if store.has(v[0])}
        assert len(store) == len(alive) <= BOUNDS["max_entries"]
        assert store.size == sum(size for _, size in alive.values()) <= BOUNDS["max_bytes"]
        lost = before.keys() - alive.keys()
        assert not any(before[k][0].is_held for k in lost)
        # Who lost had, by one measure or the other, a full share of what there is.
        counts, sizes = Counter[bytes](), Counter[bytes]()
        for (of, _), (_, taken) in before.items():
            counts[of] += 1
            sizes[of] += taken
        for of, _ in lost:
            assert (
                any(e.is_held for e, _ in alive.values())
                or counts[of] + (of == owner) >= BOUNDS["max_entries"] / len(OWNERS)
                or sizes[of] + (of == owner) * size >= BOUNDS["max_bytes"] / len(OWNERS)
            )
