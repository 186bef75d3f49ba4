"""What may be in a body is bounded before anything is built from it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from src.core.config import Config, HttpSection
from src.core.errors import InvalidRequestError
from src.http.chat.conversation import conversation
from src.http.protocol.chat import ChatMessage, ChatRequest, FunctionCall, ToolCall
from src.http.server import body as body_module
from src.http.server.body import MAX_DEPTH, check_structure
from tests.http.server.heartbeat import bound_on_turns, held_up

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

# Texts full of what has a meaning outside of them.
TEXTS = st.text(alphabet='{}[]:,"\\ \nae\u00e9\u4f60', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def count(value: Any) -> tuple[int, int]:
    """Nodes and commas, as the document's meaning has them."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = value if isinstance(value, list) else list(value.values())
    nodes = 1 + (len(value) if isinstance(value, dict) else 0)
    values = max(0, len(value) - 1)
    for item in inner:
        found = count(item)
        nodes, values = nodes + found[0], values + found[1]
    return nodes, values


def brackets_outside_texts(body: bytes) -> bytes:
    pieces = body_module._outside_texts(body)
    return b"".join(piece.translate(None, body_module._NO_STRUCTURE) for piece in pieces)


def depth(value: Any) -> int:
    """Levels of lists and objects."""
    if not isinstance(value, list | dict):
        return 0
    inner = value if isinstance(value, list) else value.values()
    return 1 + max(map(depth, inner), default=0)


@given(value=VALUES, piece=st.integers(1, 40), ascii_only=st.booleans())
def test_what_is_counted_is_what_would_be_built(value: Any, piece: int, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "PIECE_BYTES", piece)
        outside = brackets_outside_texts(body)
    assert body_module._structure(outside) == count(value)
    for most in range(6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(body_module, "MAX_DEPTH", most)
            assert body_module._is_too_deep(outside) == (depth(value) > most)


@given(body=st.binary(max_size=200), piece=st.integers(1, 40))
def test_counting_takes_any_bytes(body: bytes, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "PIECE_BYTES", piece)
        outside = brackets_outside_texts(body)
    assert len(outside) <= len(body)
    body_module._is_too_deep(outside)


async def test_texts_do_not_count() -> None:
    body = json.dumps({"prompt": '{"a": [1, 2]}' * 1000}).encode()
    await check_structure(body, max_nodes=10, max_values=10)
    for bad in ([[]] * 11, [{"a": 1}] * 6, [1] * 12):
        with pytest.raises(InvalidRequestError, match="at most 10"):
            await check_structure(json.dumps(bad).encode(), max_nodes=10, max_values=10)
    await check_structure(json.dumps([1] * 11).encode(), max_nodes=10, max_values=10)


async def test_depth_is_bounded() -> None:
    def nested(levels: int) -> bytes:
        return b"[" * levels + b"]" * levels

    bounds = {"max_nodes": 10_000, "max_values": 10_000}
    await check_structure(nested(MAX_DEPTH), b'"%s"' % nested(1000), **bounds)
    for beside in (b"", b" " * 100_000):
        with pytest.raises(InvalidRequestError, match="128 levels deep"):
            await check_structure(nested(MAX_DEPTH + 1) + beside, **bounds)


async def test_integers_of_thousands_of_digits_are_refused() -> None:
    """Reading one takes the square of its digits, in a field that is ignored too."""
    bounds = {"max_nodes": 1000, "max_values": 1_000_000}
    for digits in (400, 8_000, 70_000):
        fine = json.dumps({"prompt": "7" * digits + '"', "ids": [int("9" * 400)] * 200}).encode()
        await check_structure(fine, **bounds)
        body = b'{"prompt": "\\"", "x": [1, -2.' + b"9" * (digits + 1) + b"]}" + b" " * 70_000
        with pytest.raises(InvalidRequestError, match="at most 400 digits"):
            await check_structure(body, **bounds)


async def test_several_texts_count_together() -> None:
    await check_structure(b"[[],[]]", b"[[],[]]", max_nodes=6, max_values=2)
    for bounds in ({"max_nodes": 5, "max_values": 2}, {"max_nodes": 6, "max_values": 1}):
        with pytest.raises(InvalidRequestError, match="or more"):
            await check_structure(b"[[],[]]", b"[[],[]]", **bounds)


async def test_arguments_of_calls_are_bounded_together() -> None:
    def asking(*texts: str) -> ChatRequest:
        calls = [ToolCall(function=FunctionCall(name="f", arguments=text)) for text in texts]
        return ChatRequest(messages=[ChatMessage(role="assistant", tool_calls=calls)])

    many = "[" + "[]," * 30_000 + "[]]"
    # What stands in texts is no structure, and what is no JSON is not built.
    shown = json.dumps({"code": many * 10})
    messages, _ = await conversation(asking(many, many, shown, "{", ""), Config())
    assert len(messages[0]["tool_calls"]) == 5
    for texts in ((many,) * 3, ("[" * 200 + "]" * 200,)):
        with pytest.raises(InvalidRequestError, match="arguments of tool calls") as refusal:
            await conversation(asking(*texts), Config())
        assert refusal.value.param == "messages"


CHATTING = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("levels", [120, 200, 300, 500, 900])
async def test_what_is_nested_deeply_is_at_fault_itself(
    client: httpx.AsyncClient, levels: int
) -> None:
    deep: Any = {}
    for _ in range(levels):
        deep = {"a": deep}
    function = {"name": "f", "parameters": deep}
    call = {"function": {"name": "f", "arguments": json.dumps(deep)}}
    for path, body in (
        ("/v1/chat/completions", {**CHATTING, "chat_template_kwargs": deep}),
        ("/v1/chat/completions", {**CHATTING, "documents": [deep]}),
        ("/v1/chat/completions", {**CHATTING, "tools": [{"function": function}]}),
        ("/v1/chat/completions", {**CHATTING, "guided_json": json.dumps(deep)}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call]}]}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", **function}]}),
        ("/v1/responses", {"input": "x", "tool_choice": deep}),
        ("/v1/responses", {"input": [{"role": "user", "content": deep}]}),
        ("/v1/messages", {"max_tokens": 1, **CHATTING, "chat_template_kwargs": deep}),
        ("/v1/completions", {"prompt": "x", "guided_json": deep}),
    ):
        answer = await client.post(path, json={"max_tokens": 1, **body})
        assert answer.status_code == 400 or levels < MAX_DEPTH, (path, body.keys(), answer.text)
        assert answer.status_code in (200, 400), (path, body.keys(), answer.text)


MOST = 8 * 2**20


def filled(head: str, unit: str, tail: str) -> bytes:
    number = (MOST - len(head) - len(tail)) // len(unit)
    return (head + (unit * number).rstrip(",") + tail).encode()


CHAT = '{"messages":[{"role":"user","content":"x"}],'
LARGE = {
    "tools": (
        "/v1/chat/completions",
        filled(CHAT + '"tools":[', '{"function":{"name":"f"}},', "]}"),
    ),
    "objects": (
        "/v1/chat/completions",
        filled(CHAT + '"chat_template_kwargs":{"a":[', "{},", "]}}"),
    ),
    "lists": ("/v1/completions", filled('{"prompt":[', "[],", "]}")),
    "keys": (
        "/v1/chat/completions",
        (CHAT + '"chat_template_kwargs":{').encode()
        + b",".join(b'"k%d":1' % number for number in range(600_000))
        + b"}}",
    ),
    "numbers": ("/v1/completions", filled('{"prompt":[', "1,", "]}")),
    "texts": ("/v1/completions", filled('{"prompt":[', '"ab",', "]}")),
    "brackets in a text": ("/v1/completions", filled('{"prompt":"', "{,[", '"}')),
    "quotes in a text": ("/v1/completions", filled('{"prompt":"', '{\\"a\\":[', '"}')),
    "depth": ("/v1/completions", filled('{"prompt":"x","y":', "[", "")),
    "unknown": ("/v1/completions", filled('{"prompt":"x","max_tokens":1,"y":[', "[],", "]}")),
    "one text": ("/v1/completions", filled('{"prompt":"', "word ", '"}')),
    "a number": ("/v1/completions", filled('{"prompt":"x","n":', "9", "}")),
    "long integers": (
        "/v1/completions",
        filled('{"prompt":"x","max_tokens":1,"metadata":[', "9" * 4300 + ",", "]}"),
    ),
    "an error that quotes": (
        "/v1/chat/completions",
        filled('{"messages":[{"content":"x","role":"', "user", '"}]}'),
    ),
    # All have the same hash.
    "colliding keys": (
        "/v1/completions",
        b'{"prompt":"x","logit_bias":{'
        + b",".join(b'"%d":0' % (number * (2**61 - 1)) for number in range(20_000))
        + b"}}",
    ),
    "backslashes": ("/v1/completions", filled('{"prompt":"', "\\\\", '"}')),
}


@pytest.mark.parametrize("name", LARGE)
async def test_no_body_holds_up_the_loop(
    client: httpx.AsyncClient, app: Starlette, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = app.state.server.config
    large = type(config.http)(max_body_bytes=MOST, allowed_hosts=("slipstream",))
    monkeypatch.setattr(
        app.state.server, "config", type(config)(http=large, scheduler=config.scheduler)
    )
    path, body = LARGE[name]

    async def three_times() -> None:
        for _ in range(3):
            answer = await client.post(
                path, content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, answer.text

    # Some tens of milliseconds; the rest is for slower machines.
    bound = bound_on_turns(0.3)
    most = await held_up(three_times, bound)
    print(f"{name}: {min(most) * 1e3:.0f} of {bound * 1e3:.0f} ms")
    assert min(most) < bound, most


def test_the_defaults_leave_room_for_large_requests() -> None:
    section = HttpSection()
    # 512 tools of 100 nodes each; a batch of 64 prompts of 8000 token ids.
    assert section.max_json_nodes > 512 * 100
    assert section.max_json_values > 64 * 8000


@pytest.mark.parametrize("ids", [256, 257])
async def test_as_many_lists_of_ids_as_texts_are_taken_have_the_documented_room(ids: int) -> None:
    section = HttpSection()
    body = msgspec.json.encode({"input": [[1] * ids] * section.max_embedding_inputs})
    assert len(body) < section.max_body_bytes
    most = {"max_nodes": section.max_json_nodes, "max_values": section.max_json_values}
    if ids == 256:
        await check_structure(body, **most)
        return
    with pytest.raises(InvalidRequestError, match="may have at most 524288 values"):
        await check_structure(body, **most)
