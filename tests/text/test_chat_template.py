from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from src.core.errors import InvalidRequestError, ModelLoadError
from src.text import template_forms, template_pool
from src.text.chat_template import ChatTemplate
from src.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level, save
from tests.text.chat_templates import LLAMA3, MISTRAL, PARTS_ONLY, PARTS_OR_STRING, QWEN3

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {"llama3": LLAMA3, "qwen3": QWEN3, "mistral": MISTRAL, "parts": PARTS_OR_STRING}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What's <b>new</b> in 北京 & Köln?\n"}
ASSISTANT = {"role": "assistant", "content": " Not much. ", "name": None}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <city>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather"}}
TOOL_CHAT = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL | {"function": {"name": "weather", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": "17 °C"},
]
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one user message": ([USER], {}),
    "a conversation": ([SYSTEM, USER, ASSISTANT, USER], {}),
    "no generation prompt": ([USER, ASSISTANT], {"add_generation_prompt": False}),
    "tools": ([USER], {"tools": TOOLS}),
    "tool result": (TOOL_CHAT, {"tools": TOOLS}),
    "tool result without tools": (TOOL_CHAT, {}),
    "extra variable": ([USER], {"enable_thinking": False}),
    "reasoning": ([USER, ASSISTANT | {"reasoning": "Hm."}], {}),
    "continued": (
        [USER, {"role": "assistant", "content": "It is"}],
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
    "continued after a space": (
        [USER, {"role": "assistant", "content": "It is "}],
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
}


def spelt_out(message: dict[str, Any]) -> dict[str, Any]:
    """The message as transformers 5.23 reads it, for its older versions.

    Before 5.23 a template was shown keys that are None, before 5.21 reasoning under the name given.
    """
    message = {key: value for key, value in message.items() if value is not None}
    if "reasoning" in message:
        message["reasoning_content"] = message["reasoning"]
    return message


def transformers_render(template: str, messages: list[dict[str, Any]], how: dict[str, Any]) -> str:
    from transformers import PreTrainedTokenizerFast, __version__

    if Version(__version__) < Version("5.23"):
        messages = [spelt_out(message) for message in messages]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), chat_template=template, **SPECIAL
    )
    how = {"add_generation_prompt": True, **how}
    rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, **how)
    return rendered


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(name: str, chat: str) -> None:
    messages, how = CHATS[chat]
    expected = transformers_render(TEMPLATES[name], messages, how)
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)
    assert template.render(messages, **how) == expected
    assert "Köln" in expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_json_text_of_tool_arguments_is_the_object_it_holds(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)
    function = {"name": "weather", "arguments": json.dumps({"city": "Köln"})}
    as_text = [USER, TOOL_CHAT[1] | {"tool_calls": [CALL | {"function": function}]}, TOOL_CHAT[2]]
    assert template.render(as_text) == template.render(TOOL_CHAT)
    assert function["arguments"].startswith("{")  # the caller's message is not touched


def test_tool_arguments_that_hold_no_object_stay_text() -> None:
    template = ChatTemplate(QWEN3)
    call = CALL | {"function": {"name": "weather", "arguments": '{"city": '}}
    assert '"arguments": {"city": }' in template.render(
        [USER, {"role": "assistant", "tool_calls": [call]}]
    )


def test_what_only_python_reads_as_json_is_read_where_it_is_short() -> None:
    template = ChatTemplate(QWEN3)

    def rendered(arguments: str) -> str:
        call = CALL | {"function": {"name": "weather", "arguments": arguments}}
        return template.render([USER, {"role": "assistant", "tool_calls": [call]}])

    assert '"arguments": {"wind": NaN}' in rendered('{"wind":NaN}')
    # Spaces as they came: nothing was read.
    assert '"wind":NaN}' in rendered('{"hours": [' + "1, " * 30_000 + '1], "wind":NaN}')
    assert '"wind": 1.5}' in rendered('{"hours": [' + "1, " * 30_000 + '1], "wind":1.5}')


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mistral"])
def test_parts_are_joined_for_a_template_that_takes_strings(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    as_parts = template.render([{"role": "user", "content": parts}])
    assert as_parts == template.render([{"role": "user", "content": "one\ntwo"}])
    assert "one\ntwo" in as_parts


@pytest.mark.parametrize("source", [PARTS_OR_STRING, PARTS_ONLY])
def test_parts_are_left_to_a_template_that_iterates_over_them(source: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert ChatTemplate(source).render(messages) == transformers_render(source, messages, {})


def test_a_string_becomes_a_part_where_only_parts_are_shown() -> None:
    rendered = ChatTemplate(PARTS_ONLY).render([{"role": "user", "content": "hello"}])
    assert rendered == "USER: hello\nASSISTANT:"


@pytest.mark.parametrize("content", ["It is", [{"type": "text", "text": "It is"}]])
@pytest.mark.parametrize("source", [PARTS_OR_STRING, PARTS_ONLY])
def test_a_final_message_of_either_form_is_continued(source: str, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    how = {"continue_final_message": True, "add_generation_prompt": False}
    assert ChatTemplate(source).render(messages, **how).endswith("It is")


def test_documents_and_named_templates() -> None:
    template = ChatTemplate(
        {"default": "{{ documents[0].text }}", "tool_use": "{{ tools[0].function.name }}"}
    )
    assert template.render([USER], documents=[{"title": "t", "text": "d"}]) == "d"
    assert template.render([USER], tools=TOOLS) == "weather"


def test_loop_controls_and_unescaped_json() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content | tojson }}{% endfor %}"
    )
    template = ChatTemplate(source)
    content = "<ü> & 'q'"
    assert template.render([{"role": "user", "content": content}, USER]) == f'"{content}"'


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


REFUSED: list[tuple[str, list[Any], dict[str, Any], str]] = [
    (MISTRAL, [{"role": "oracle", "content": "x"}], {}, "Only user and assistant roles"),
    (MISTRAL, [{"role": "user"}], {}, "no attribute 'content'"),
    ("{{ 'a' + 3 }}", [USER], {}, "TypeError"),
    (QWEN3, [], {}, "at least one"),
    (QWEN3, ["hello"], {}, r"messages\[0\]: expected an object"),
    (QWEN3, [{"content": "x"}], {}, r"messages\[0\].role"),
    (QWEN3, [USER, {"role": "user", "content": 3}], {}, r"messages\[1\].content: .* got int"),
    (
        QWEN3,
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        {},
        r"messages\[0\].content\[0\]: .*'image_url'",
    ),
    (QWEN3, [{"role": "user", "content": [{"type": "text"}]}], {}, r"content\[0\]"),
    (QWEN3, [{"role": "user", "content": ["x"]}], {}, r"content\[0\]"),
    (QWEN3, [USER | {"extra": object()}], {}, "JSON types"),
    (QWEN3, [USER | {"extra": nested(5_000)}], {}, "nested too deeply"),
    (QWEN3, [USER], {"tools": nested(5_000)}, "nested too deeply"),
    (
        QWEN3,
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 10**5}}]}],
        {},
        "nested too deeply",
    ),
    (QWEN3, [USER], {"messages": []}, "'messages' cannot be set"),
    (QWEN3, [USER], {"range": 3}, "'range' cannot be set"),
    (QWEN3, [USER], {"continue_final_message": True}, "add_generation_prompt"),
    (
        QWEN3,
        [{"role": "assistant", "tool_calls": []}],
        {"continue_final_message": True, "add_generation_prompt": False},
        "no content",
    ),
    (
        "{{ messages[0].role }}",
        [USER],
        {"continue_final_message": True, "add_generation_prompt": False},
        "cannot be continued",
    ),
    ("{% if %}", [USER], {}, "not valid Jinja"),
    ("{{ 1 // 0 }}", [USER], {}, "ZeroDivisionError"),
    ("{{ messages.x.y }}", [USER], {}, "no attribute"),
    ("{{ ''.__class__.__mro__ }}", [USER], {}, "unsafe"),
    ("{{ messages.append(1) }}", [USER], {}, "not safely callable|unsafe"),
    ("{% set ns = namespace(_x=1) %}", [USER], {}, "underscore"),
    ("{{ 'x' * 10**12 }}", [USER], {}, "MemoryError"),
    ("{{ 10 ** 99999 }}", [USER], {}, "4300 digits"),
    ("{% for i in range(9**9) %}{% endfor %}", [USER], {}, "Range too big"),
    ("{% for a in [0] %}" * 25 + "{% endfor %}" * 25, [USER], {}, "not valid Jinja"),
    ("{{ raise_exception('no ' * 10**6) }}", [USER], {}, r"refused by .*: (no ){1000}"),
    (
        "{% for i in range(100) %}{{ 'x' * 1000000 }}{% endfor %}",
        [USER],
        {},
        "longer than",
    ),
    (
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        [USER],
        {},
        "RecursionError",
    ),
]


@pytest.mark.parametrize(("source", "messages", "how", "message"), REFUSED)
def test_what_cannot_be_rendered_is_the_requests_fault(
    source: str, messages: list[Any], how: dict[str, Any], message: str
) -> None:
    template = ChatTemplate(source, special_tokens=SPECIAL)
    with pytest.raises(InvalidRequestError, match=message):
        template.render(messages, **how)


def test_preparing_a_faulty_template_leaves_the_error_to_the_request() -> None:
    ChatTemplate(LLAMA3).prepare()
    template = ChatTemplate("{% if %}")
    template.prepare()
    with pytest.raises(InvalidRequestError, match="not valid Jinja"):
        template.render([USER])


def test_many_threads_render_one_template() -> None:
    template = ChatTemplate(QWEN3)
    chats = [[{"role": "user", "content": f"number {i}"}] for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        rendered = list(pool.map(template.render, chats))
    assert rendered == [template.render(chat) for chat in chats]


def write_jinja(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("from jinja", encoding="utf-8")


def write_variants(directory: Path) -> None:
    write_jinja(directory)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")


def write_json(directory: Path) -> None:
    content = json.dumps({"chat_template": "from json"})
    (directory / "chat_template.json").write_text(content, encoding="utf-8")


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]


@pytest.mark.parametrize(
    ("config", "write", "expected", "expected_with_tools"),
    [
        ("in config", None, "in config", "in config"),
        (NAMED, None, "named", "tools"),
        ("in config", write_jinja, "from jinja", "from jinja"),
        (None, write_json, "from json", "from json"),
        ("in config", write_variants, "from jinja", "with tools"),
    ],
)
def test_where_a_checkpoint_keeps_its_template(
    tmp_path: Path, config: Any, write: Any, expected: str, expected_with_tools: str
) -> None:
    directory = save(byte_level(), tmp_path, {} if config is None else {"chat_template": config})
    if write is not None:
        write(directory)
    template = Tokenizer.from_directory(directory).chat_template
    assert template.render([USER]) == expected
    assert template.render([USER], tools=TOOLS) == expected_with_tools


@pytest.mark.parametrize("config", [7, ["x"], [{"name": "a", "template": "b"}, NAMED[0]]])
def test_a_template_of_another_form_is_a_load_error(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"chat.template"):
        Tokenizer.from_directory(save(byte_level(), tmp_path, {"chat_template": config}))


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}" * 4 + "{% endfor %}" * 4,
        "{% macro more(n) %}{% if n %}{{ more(n - 1) }}{{ more(n - 1) }}{% endif %}{% endmacro %}"
        "{{ more(60) }}",
    ],
)
def test_rendering_ends_in_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_forms, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(template_pool, "MAX_SECONDS", 0.2)
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.2 s of CPU time"):
        ChatTemplate(source).render([USER] * 1000)
