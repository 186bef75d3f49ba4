"""Every type of block and item that the official packages may send is decided about.

A new version of `anthropic` or `openai` that adds a type fails here, and names it: the type goes
into a table below once it is honoured, told as text, replaced, passed over or refused.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any, Final

import anthropic.types
import anthropic.types.beta
import httpx
import msgspec
import openai.types.responses
import pytest
import typing_extensions

from src.core.errors import InvalidRequestError
from src.http.chat.placeholders import placeholder
from src.http.messages.translation import translate as translate_messages
from src.http.protocol.chat import ChatMessage
from src.http.protocol.messages import MessageRequest
from src.http.protocol.responses import ResponseRequest
from src.http.responses.translation import PASSED_OVER
from src.http.responses.translation import translate as translate_response

PNG: Final = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
TEXT: Final = {"type": "text", "text": "some text"}
LOOK: Final = {"type": "function", "name": "look", "parameters": {"type": "object"}}

# What a block or an item comes to: these messages, as (role, content, calls, id of the call).
Told = list[tuple[str, str | None, list[tuple[str | None, str, Any]] | None, str | None]]
REFUSED: Final = None
PASSED: Final[Told] = []


def said(text: str | None, role: str = "user") -> Told:
    return [(role, text, None, None)]


def called(name: str, arguments: Any, call_id: str = "t1", result: str | None = None) -> Told:
    told: Told = [("assistant", None, [(call_id, name, arguments)], None)]
    return told if result is None else [*told, ("tool", result, None, call_id)]


def result_is(text: str) -> Told:
    return [("tool", text, None, "t1")]


IMAGE_TOLD: Final = "[An image (image/png) was left out here: this model reads text only.]"
PAGE: Final = {
    "type": "web_fetch_result",
    "url": "https://a.example",
    "content": {
        "type": "document",
        "title": "A",
        "source": {"type": "text", "media_type": "text/plain", "data": "page"},
    },
}

# Role in which it is sent, the block, and what becomes of it.
BLOCKS: Final[dict[str, tuple[str, dict[str, Any], Told | None]]] = {
    "text": ("user", TEXT, said("some text")),
    "image": ("user", {"type": "image", "source": PNG}, said(IMAGE_TOLD)),
    "document": (
        "user",
        {"type": "document", "title": "T", "source": {"type": "content", "content": [TEXT]}},
        said("T\n\nsome text"),
    ),
    "search_result": (
        "user",
        {"type": "search_result", "title": "T", "source": "https://a.example", "content": [TEXT]},
        said("T\nhttps://a.example\nsome text"),
    ),
    "thinking": (
        "assistant",
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        said("", "assistant"),
    ),
    "redacted_thinking": (
        "assistant",
        {"type": "redacted_thinking", "data": "x"},
        said("", "assistant"),
    ),
    "tool_use": (
        "assistant",
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}},
        called("look", {"a": 1}),
    ),
    "tool_result": (
        "user",
        {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT]},
        result_is("some text"),
    ),
    "server_tool_use": (
        "assistant",
        {"type": "server_tool_use", "id": "t1", "name": "web_search", "input": {"query": "a"}},
        called("web_search", {"query": "a"}),
    ),
    "web_search_tool_result": (
        "assistant",
        {
            "type": "web_search_tool_result",
            "tool_use_id": "t1",
            "content": [
                {
                    "type": "web_search_result",
                    "title": "T",
                    "url": "https://a.example",
                    "encrypted_content": "AAAA",
                }
            ],
        },
        result_is("T\nhttps://a.example"),
    ),
    "web_fetch_tool_result": (
        "assistant",
        {"type": "web_fetch_tool_result", "tool_use_id": "t1", "content": PAGE},
        result_is("https://a.example\nA\n\npage"),
    ),
    "code_execution_tool_result": (
        "assistant",
        {
            "type": "code_execution_tool_result",
            "tool_use_id": "t1",
            "content": {
                "type": "code_execution_result",
                "stdout": "out",
                "stderr": "err",
                "return_code": 0,
                "content": [],
            },
        },
        result_is("out\nerr"),
    ),
    "bash_code_execution_tool_result": (
        "assistant",
        {
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "t1",
            "content": {
                "type": "bash_code_execution_tool_result_error",
                "error_code": "unavailable",
            },
        },
        result_is("unavailable"),
    ),
    "text_editor_code_execution_tool_result": (
        "assistant",
        {
            "type": "text_editor_code_execution_tool_result",
            "tool_use_id": "t1",
            "content": {
                "type": "text_editor_code_execution_str_replace_result",
                "lines": ["-a", "+b"],
            },
        },
        result_is("-a\n+b"),
    ),
    "tool_search_tool_result": (
        "assistant",
        {
            "type": "tool_search_tool_result",
            "tool_use_id": "t1",
            "content": {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": "look"}],
            },
        },
        result_is("look"),
    ),
    "advisor_tool_result": (
        "assistant",
        {
            "type": "advisor_tool_result",
            "tool_use_id": "t1",
            "content": {"type": "advisor_result", "text": "advice"},
        },
        result_is("advice"),
    ),
    "mcp_tool_use": (
        "assistant",
        {
            "type": "mcp_tool_use",
            "id": "t1",
            "name": "look",
            "server_name": "s",
            "input": {"a": 1},
        },
        called("look", {"a": 1}),
    ),
    "mcp_tool_result": (
        "assistant",
        {"type": "mcp_tool_result", "tool_use_id": "t1", "content": "seen", "is_error": False},
        result_is("seen"),
    ),
    "container_upload": (
        "user",
        {"type": "container_upload", "file_id": "f1"},
        said(placeholder("container_upload")),
    ),
    "compaction": (
        "assistant",
        {"type": "compaction", "content": "what went before"},
        said("what went before", "assistant"),
    ),
    # They change which tools there are, which the list of tools says here.
    "tool_addition": (
        "user",
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "look"}},
        REFUSED,
    ),
    "tool_removal": (
        "user",
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}},
        REFUSED,
    ),
    "mcp_tool_listing": (
        "assistant",
        {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []},
        said("", "assistant"),
    ),
    "fallback": (
        "assistant",
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}, "trigger": None},
        said("", "assistant"),
    ),
}
# In a result of a tool: the block, and its text.
RESULT_BLOCKS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "text": (TEXT, "some text"),
    "image": ({"type": "image", "source": PNG}, IMAGE_TOLD),
    "document": (PAGE["content"], "A\n\npage"),  # type: ignore[dict-item]
    "search_result": (BLOCKS["search_result"][1], "T\nhttps://a.example\nsome text"),
    "tool_reference": ({"type": "tool_reference", "tool_name": "look"}, "look"),
    "browser_state": (
        {
            "type": "browser_state",
            "tabs": [{"tab_id": 1, "title": "T", "url": "https://a.example", "active": True}],
        },
        "T\nhttps://a.example",
    ),
}
CALL: Final = {"call_id": "t1", "id": "x1", "status": "completed"}
OWN: Final = {"id": "t1", "status": "completed"}
ITEM_IMAGE: Final = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
ITEMS: Final[dict[str, tuple[dict[str, Any], Told | None]]] = {
    "message": ({"role": "user", "content": "hello"}, said("hello")),
    "function_call": (
        {**CALL, "name": "look", "arguments": '{"a": 1}'},
        called("look", '{"a": 1}'),
    ),
    "function_call_output": (
        {**CALL, "output": [ITEM_IMAGE]},
        result_is(placeholder("input_image") or ""),
    ),
    "custom_tool_call": (
        {**CALL, "name": "apply_patch", "input": "*** Begin"},
        called("apply_patch", {"input": "*** Begin"}),
    ),
    "custom_tool_call_output": (
        {**CALL, "output": [{"type": "input_text", "text": "Done"}, ITEM_IMAGE]},
        result_is(f"Done\n{placeholder('input_image')}"),
    ),
    "reasoning": ({"summary": [], "encrypted_content": "AAAA"}, PASSED),
    "additional_tools": ({"role": "developer", "tools": [LOOK]}, PASSED),
    # To an item that this server does not have.
    "item_reference": ({"id": "x1"}, REFUSED),
    "file_search_call": (
        {**OWN, "queries": ["a"], "results": [{"filename": "a.md", "text": "found", "score": 1}]},
        called("file_search", {"queries": ["a"]}, result="a.md\nfound"),
    ),
    "web_search_call": (
        {**OWN, "action": {"type": "search", "query": "a"}},
        called("web_search", {"action": {"type": "search", "query": "a"}}),
    ),
    "computer_call": (
        {**CALL, "action": {"type": "click", "x": 1, "y": 2}, "pending_safety_checks": []},
        called("computer", {"action": {"type": "click", "x": 1, "y": 2}}),
    ),
    "computer_call_output": (
        {**CALL, "output": {"type": "computer_screenshot", "image_url": "data:"}},
        result_is(placeholder("computer_screenshot") or ""),
    ),
    "tool_search_call": (
        {**CALL, "arguments": {"query": "look"}, "execution": "client"},
        called("tool_search", {"query": "look"}),
    ),
    "tool_search_output": ({**CALL, "tools": [LOOK]}, result_is("look")),
    "compaction": ({"encrypted_content": "AAAA"}, said(placeholder("compaction"))),
    "image_generation_call": (
        {**OWN, "result": "iVBORw0KGgo=", "revised_prompt": "a cat"},
        called("image_generation", {"revised_prompt": "a cat"}, result=placeholder("image")),
    ),
    "code_interpreter_call": (
        {**OWN, "code": "1+1", "container_id": "c", "outputs": [{"type": "logs", "logs": "2"}]},
        called("code_interpreter", {"code": "1+1"}, result="2"),
    ),
    "local_shell_call": (
        {**CALL, "action": {"type": "exec", "command": ["ls"]}},
        called("local_shell", {"action": {"type": "exec", "command": ["ls"]}}),
    ),
    "local_shell_call_output": ({**OWN, "output": "a.md"}, result_is("a.md")),
    "shell_call": (
        {**CALL, "action": {"commands": ["ls"]}},
        called("shell", {"action": {"commands": ["ls"]}}),
    ),
    "shell_call_output": (
        {
            **CALL,
            "output": [{"stdout": "a.md", "stderr": "", "outcome": {"type": "exit"}}],
        },
        result_is("a.md"),
    ),
    "apply_patch_call": (
        {**CALL, "operation": {"type": "delete_file", "path": "a.md"}},
        called("apply_patch", {"operation": {"type": "delete_file", "path": "a.md"}}),
    ),
    "apply_patch_call_output": ({**CALL, "output": "gone"}, result_is("completed\ngone")),
    "mcp_call": (
        {**OWN, "name": "look", "server_label": "s", "arguments": '{"a": 1}', "output": "seen"},
        called("look", '{"a": 1}', result="seen"),
    ),
    "mcp_list_tools": ({**OWN, "server_label": "s", "tools": []}, PASSED),
    "mcp_approval_request": (
        {**OWN, "name": "look", "server_label": "s", "arguments": "{}"},
        PASSED,
    ),
    "mcp_approval_response": ({"approval_request_id": "r", "approve": True}, PASSED),
    "program": ({**CALL, "code": "1+1", "fingerprint": "f"}, called("program", {"code": "1+1"})),
    "program_output": ({**CALL, "result": "2"}, result_is("2")),
    # They ask for something to be done here.
    "configuration_update": ({"reasoning": {"effort": "low"}}, REFUSED),
    "compaction_trigger": ({}, REFUSED),
}
PARTS: Final = {"input_text": True, "input_image": False, "input_file": False}


def types_of(union: Any) -> set[str]:
    """The values of ``type`` of all members of a union of dictionaries."""
    return set(_types_of(union))


def _types_of(of: Any) -> Iterator[str]:
    if typing_extensions.is_typeddict(of):
        named = typing.get_type_hints(of)["type"]
        yield from (text for text in _strings(named))
    for part in typing.get_args(of):
        yield from _types_of(part)


def _strings(of: Any) -> Iterator[str]:
    for part in typing.get_args(of):
        if isinstance(part, str):
            yield part
        else:
            yield from _strings(part)


def content_of(kind: Any, field: str = "content") -> Any:
    return typing.get_type_hints(kind)[field]


def test_every_type_of_the_packages_is_decided_about() -> None:
    beta, stable = anthropic.types.beta, anthropic.types
    blocks = types_of(stable.ContentBlockParam) | types_of(beta.BetaContentBlockParam)
    assert blocks == set(BLOCKS)
    results = types_of(content_of(stable.ToolResultBlockParam))
    results |= types_of(content_of(beta.BetaToolResultBlockParam))
    assert results == set(RESULT_BLOCKS)
    responses = openai.types.responses
    assert types_of(responses.ResponseInputItemParam) == set(ITEMS)
    parts = types_of(responses.ResponseInputContentParam)
    parts |= types_of(content_of(responses.ResponseCustomToolCallOutputParam, "output"))
    assert parts == set(PARTS)


def told(messages: list[ChatMessage]) -> Told:
    return [
        (
            message.role,
            message.content
            if message.content is None or isinstance(message.content, str)
            else "\n".join(part.text or "" for part in message.content),
            None
            if message.tool_calls is None
            else [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls],
            message.tool_call_id,
        )
        for message in messages
    ]


def messages_told(messages: list[dict[str, Any]], *, replaces_media: bool = True) -> Told:
    request = msgspec.convert({"messages": messages, "max_tokens": 1}, MessageRequest)
    chat = translate_messages(request, sets_thinking=False, replaces_media=replaces_media)
    return told(chat.messages)


def items_told(items: list[dict[str, Any]], media: Any = "messages") -> Told:
    request = msgspec.convert({"input": items}, ResponseRequest)
    return told(translate_response(request, (), lambda item_id: None, 0, media=media).turn)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_what_the_table_says(kind: str) -> None:
    role, block, expected = BLOCKS[kind]
    assert block["type"] == kind
    message = {"role": role, "content": [block]}
    if expected is None:
        with pytest.raises(InvalidRequestError, match=kind) as refused:
            messages_told([message])
        assert refused.value.param == "messages[0].content[0].type"
    else:
        assert messages_told([message]) == expected


@pytest.mark.parametrize("kind", RESULT_BLOCKS)
def test_a_block_of_a_result_is_its_text(kind: str) -> None:
    block, text = RESULT_BLOCKS[kind]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    assert messages_told([{"role": "user", "content": [result]}]) == result_is(text)


@pytest.mark.parametrize("kind", ITEMS)
def test_an_item_is_what_the_table_says(kind: str) -> None:
    item, expected = ITEMS[kind]
    hello = {"role": "user", "content": "first"}
    if expected is None:
        with pytest.raises(InvalidRequestError) as refused:
            items_told([hello, {"type": kind, **item}])
        assert refused.value.param in ("input[1].type", "input[1].id")
    else:
        assert items_told([hello, {"type": kind, **item}]) == [*said("first"), *expected]


def test_a_type_that_nobody_knows_is_told_by_its_text_or_refused_by_its_name() -> None:
    later = {"type": "later", "content": [{"type": "later_part", "text": "a"}, {"x": "b"}]}
    assert messages_told([{"role": "user", "content": [later]}]) == said("a")
    assert messages_told([{"role": "assistant", "content": [later]}]) == said("a", "assistant")
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [later]}
    assert messages_told([{"role": "user", "content": [result]}]) == result_is("a")
    film = {"type": "film", "source": {"type": "url", "url": "https://a.example/a.mp4"}}
    for block in (
        *({"type": "later", "x": "a"}, {"type": "later", "data": "AAAA"}, {"text": "a"}),
        # An address of bytes is nothing to read.
        film,
    ):
        with pytest.raises(InvalidRequestError):
            messages_told([{"role": "user", "content": [block]}])
    # A result belongs to the user, and not into another.
    for outer in ("assistant", "system"):
        with pytest.raises(InvalidRequestError, match="tool_result"):
            messages_told([{"role": outer, "content": [BLOCKS["tool_result"][1]]}])
    nested = {**BLOCKS["tool_result"][1], "content": [BLOCKS["tool_result"][1]]}
    with pytest.raises(InvalidRequestError, match="tool_result"):
        messages_told([{"role": "user", "content": [nested]}])
    with pytest.raises(InvalidRequestError, match="later_call"):
        items_told([{"type": "later_call", "text": "a"}])


def test_a_call_that_says_nothing_has_no_arguments() -> None:
    """Servers leave out what a search looked for, and results of what has failed."""
    searched = {"type": "web_search_call", "id": "t1", "status": "completed"}
    assert items_told([searched]) == called("web_search", {})
    failed = {"type": "image_generation_call", "id": "t1", "status": "failed", "result": None}
    assert items_told([failed]) == called("image_generation", {}, result="")
    drawn = {**failed, "result": "iVBORw0KGgo="}
    assert items_told([drawn]) == called("image_generation", {}, result=placeholder("image"))


def members_that_may_be_missing(of: Any) -> Iterator[tuple[str, str, bool]]:
    """Type, member, and whether it is null rather than left out, of all members of a union."""
    if typing_extensions.is_typeddict(of):
        hints, extras = (typing.get_type_hints(of, include_extras=each) for each in (False, True))
        for kind in _strings(hints.pop("type")):
            for name, hint in hints.items():
                if typing.get_origin(extras[name]) is not typing_extensions.Required:
                    yield kind, name, False
                if type(None) in typing.get_args(hint):
                    yield kind, name, True
    for part in typing.get_args(of):
        yield from members_that_may_be_missing(part)


def test_an_item_goes_without_what_it_may_go_without() -> None:
    """Each optional member in turn, and all of them together."""
    missing: dict[str, list[tuple[str, bool]]] = {}
    for kind, name, is_null in members_that_may_be_missing(
        openai.types.responses.ResponseInputItemParam
    ):
        if ITEMS[kind][1] is not REFUSED:
            missing.setdefault(kind, []).append((name, is_null))
    assert len(missing) > 20
    for kind, members in missing.items():
        whole = {"type": kind, **ITEMS[kind][0]}
        bare = dict(whole)
        for name, is_null in members:
            if is_null:
                bare[name] = None
                items_told([{"role": "user", "content": "first"}, {**whole, name: None}])
            elif name in whole:
                bare.pop(name, None)
                rest = {key: value for key, value in whole.items() if key != name}
                items_told([{"role": "user", "content": "first"}, rest])
        items_told([{"role": "user", "content": "first"}, bare])


@pytest.mark.parametrize(
    "union", [anthropic.types.ContentBlockParam, anthropic.types.beta.BetaContentBlockParam]
)
def test_a_block_goes_without_what_it_may_go_without(union: Any) -> None:
    for kind, name, is_null in members_that_may_be_missing(union):
        role, block, expected = BLOCKS[kind]
        rest = {**block, name: None} if is_null else {k: block[k] for k in block.keys() - {name}}
        if expected is not REFUSED:
            messages_told([{"role": role, "content": [rest]}])


def test_nothing_is_left_out_unsaid_where_nothing_may_be_replaced() -> None:
    image = {"type": "image", "source": PNG}
    for block in (image, {"type": "later", "content": [TEXT, image]}):
        with pytest.raises(InvalidRequestError, match="image"):
            messages_told([{"role": "user", "content": [block]}], replaces_media=False)
    held = {**BLOCKS["mcp_tool_result"][1], "content": [image]}
    with pytest.raises(InvalidRequestError, match="image"):
        messages_told([{"role": "assistant", "content": [held]}], replaces_media=False)
    for kind in ("function_call_output", "custom_tool_call_output", "compaction",
                 "computer_call_output", "image_generation_call"):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            items_told([{"type": kind, **ITEMS[kind][0]}], media="none")
    # A user's own picture is refused as long as the setting does not say more.
    picture = {"role": "user", "content": [ITEM_IMAGE]}
    with pytest.raises(InvalidRequestError, match="takes text only"):
        items_told([picture])
    assert items_told([picture], media="all") == said(placeholder("input_image"))


def test_deep_blocks_end_nobody() -> None:
    deep: Any = "text"
    for _ in range(200):
        deep = [deep]
    block = {"type": "later", "content": deep, "title": "T"}
    assert messages_told([{"role": "user", "content": [block]}]) == said("T")


def test_the_assistants_turn_is_parted_where_tools_ran_elsewhere() -> None:
    use, found = BLOCKS["server_tool_use"][1], BLOCKS["web_search_tool_result"][1]
    blocks = [{"type": "thinking", "thinking": "hm"}, TEXT, use, found, {**TEXT, "text": "So."}]
    assert messages_told([{"role": "assistant", "content": blocks}]) == [
        ("assistant", "some text", [("t1", "web_search", {"query": "a"})], None),
        *result_is("T\nhttps://a.example"),
        *said("So.", "assistant"),
    ]


@pytest.mark.parametrize("item", ["custom_tool_call", "custom_tool_call_output", "mcp_call"])
def test_what_names_no_call_is_refused_by_its_field(item: str) -> None:
    fields = dict(ITEMS[item][0])
    for field in ("call_id", "id") if item.endswith("output") else ("name",):
        fields.pop(field)
    expected = "call_id" if item.endswith("output") else "name"
    with pytest.raises(InvalidRequestError) as refused:
        items_told([{"type": item, **fields}])
    assert refused.value.param == f"input[0].{expected}"


@pytest.mark.anyio
@pytest.mark.timeout(60)
async def test_a_session_of_another_model_goes_on_and_is_listed(client: httpx.AsyncClient) -> None:
    items = [
        {"type": kind, **item} for kind, (item, expected) in ITEMS.items() if expected is not None
    ]
    items.append({"role": "user", "content": "And now?"})
    answer = await client.post("/v1/responses", json={"input": items, "max_output_tokens": 2})
    assert answer.status_code == 200, answer.text
    listed = await client.get(
        f"/v1/responses/{answer.json()['id']}/input_items?limit=100&order=asc"
    )
    assert listed.status_code == 200, listed.text
    kinds = [item["type"] for item in listed.json()["data"]]
    assert kinds == [item.get("type", "message") for item in items]
    assert all(item["id"] for item in listed.json()["data"])
    # What was only passed over is no reason to stop either.
    assert set(PASSED_OVER) < set(kinds)
    again = await client.post(
        "/v1/responses",
        json={
            "previous_response_id": answer.json()["id"],
            "input": "Go on",
            "max_output_tokens": 2,
        },
    )
    assert again.status_code == 200, again.text

    messages = [
        {"role": role, "content": [block]}
        for role, block, expected in BLOCKS.values()
        if expected is not None
    ]
    messages.append({"role": "user", "content": json.dumps("And now?")})
    answer = await client.post("/v1/messages", json={"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
