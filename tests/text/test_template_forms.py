"""Turns that call functions, in the form in which each template shows the call."""

from __future__ import annotations

import copy
import json
import re
import resource
from typing import Any

import pytest

from src.core.errors import InvalidRequestError
from src.text import template_forms
from src.text.call_turns import CallForms
from src.text.chat_template import ChatTemplate
from src.text.template_forms import TemplateForms
from src.text.template_pool import Budget, shared_pool
from tests.support.slowness import slowness
from tests.text.chat_templates import (
    BY_KIND,
    DEEPSEEK_DISTILL,
    LLAMA3,
    MISTRAL,
    MISTRAL_IDS,
    PARTS_ONLY,
    PARTS_OR_STRING,
    QWEN3,
    QWEN3_FIRST,
    showing_calls,
)

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PUBLISHED = {
    "qwen3": QWEN3,
    "qwen3, the first": QWEN3_FIRST,
    "deepseek's distills": DEEPSEEK_DISTILL,
    "mistral": MISTRAL,
    "mistral with ids": MISTRAL_IDS,
    "llama3": LLAMA3,
}
TEMPLATES = PUBLISHED | BY_KIND
ARGUMENTS = {"city": "Köln", "days": 3, "fine": True}
CALL_ID = "call_5f0c2d9b7e6a4c1f8d3b2a19"
USER = {"role": "user", "content": "And now?"}
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "content": "17 degrees"}
TOOLS = [{"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}]


def call(arguments: Any, call_id: str = CALL_ID, name: str = "weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# What clients send for a turn of calls alone, and how they spell arguments.
CONTENTS: dict[str, dict[str, Any]] = {
    "absent": {},
    "null": {"content": None},
    "empty": {"content": ""},
    "white space": {"content": "\n\n"},
    "no parts": {"content": []},
    "empty part": {"content": [{"type": "text", "text": ""}]},
}
SPELLINGS: dict[str, Any] = {"object": ARGUMENTS, "text": json.dumps(ARGUMENTS)}


def shown_arguments(rendered: str, name: str = "weather") -> Any:
    """What a parser reads of the one call that is shown."""
    assert rendered.count(name) == 1
    assert rendered.count('"city"') == len(re.findall(r"K(ö|\\u00f6)ln", rendered)) == 1, rendered
    begin = rendered.rindex("{", 0, rendered.index('"city"'))
    return json.JSONDecoder().raw_decode(rendered[begin:])[0]


def chat_of(kind: str, turn: dict[str, Any]) -> list[dict[str, Any]]:
    return [USER, turn] if kind == "takes no results" else [USER, turn, RESULT]


def rendered(kind: str, chat: list[dict[str, Any]], **how: Any) -> str:
    template = ChatTemplate(TEMPLATES[kind], special_tokens=SPECIAL)
    template.prepare()
    before = copy.deepcopy(chat)
    tools = TOOLS if kind == "shows calls with tools alone" else None
    text = template.render(chat, tools=tools, **how)
    assert chat == before, "the caller's messages are not touched"
    return text


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_turn_of_calls_alone_shows_its_call_once(kind: str, content: str, spelling: str) -> None:
    turn = {"role": "assistant", **CONTENTS[content], "tool_calls": [call(SPELLINGS[spelling])]}
    text = rendered(kind, chat_of(kind, turn))
    assert shown_arguments(text) == ARGUMENTS
    assert "None" not in text
    assert "null" not in text
    if kind != "takes no results":
        assert text.count("17 degrees") == 1


# Templates that show nothing else of a turn that has calls.
SAYS_NOTHING = ("mistral", "mistral with ids", "llama3")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_turn_with_text_shows_its_call_too(kind: str, spelling: str) -> None:
    turn = {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [call(SPELLINGS[spelling])],
    }
    text = rendered(kind, chat_of(kind, turn))
    assert shown_arguments(text) == ARGUMENTS
    assert text.count("Let me look.") == (0 if kind in SAYS_NOTHING else 1)


@pytest.mark.parametrize("kind", [kind for kind in TEMPLATES if kind != "takes no results"])
def test_calls_of_older_turns_are_shown_as_well(kind: str) -> None:
    first = {"role": "assistant", "tool_calls": [call({"a": 1}, "call_1", "first")]}
    second = {"role": "assistant", "content": None, "tool_calls": [call(ARGUMENTS)]}
    said = {"role": "assistant", "content": "Fine."}
    result = RESULT | {"tool_call_id": "call_1"}
    text = rendered(kind, [USER, first, result, said, USER, second, RESULT])
    assert shown_arguments(text) == ARGUMENTS
    assert text.count("first") == 1


@pytest.mark.parametrize("kind", [kind for kind in TEMPLATES if kind != "takes no results"])
def test_a_turn_with_several_calls_shows_each_with_its_result(kind: str) -> None:
    names = ("first", "second", "third")
    calls = [call({"n": f"{name} value"}, f"call_{name}", name) for name in names]
    results = [
        {"role": "tool", "tool_call_id": f"call_{name}", "content": f"{name} result"}
        for name in reversed(names)
    ]
    turn = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": calls}
    said = {"role": "assistant", "content": "Fine."}
    text = rendered(kind, [USER, turn, *results, said, USER])
    for name in names:
        assert text.count(f"{name} value") == text.count(f"{name} result") == 1, text
    if kind in ("llama3", "shows one call of a turn"):
        # One after the other.
        places = [text.index(f"{name} {what}") for name in names for what in ("value", "result")]
        assert places == sorted(places)


@pytest.mark.parametrize("kind", ["llama3", "shows one call of a turn"])
def test_results_that_belong_to_no_call_are_not_lost(kind: str) -> None:
    calls = [call({"n": i}, "", f"f{i}") for i in range(2)]
    for one in calls:
        del one["id"]
    results = [{"role": "tool", "content": f"result {i}"} for i in range(2)]
    stray = {"role": "tool", "tool_call_id": "of nobody", "content": "stray"}
    turn = {"role": "assistant", "content": "Look:", "tool_calls": calls}
    text = rendered(kind, [USER, turn, stray, *results])
    shown = [text.index(word) for word in ("f0", "result 0", "f1", "result 1", "stray")]
    assert shown == sorted(shown)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_was_thought_is_no_obstacle(kind: str) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call(SPELLINGS["text"])]}
    text = rendered(kind, chat_of(kind, turn | {"reasoning_content": "Hm."}))
    assert shown_arguments(text) == ARGUMENTS


def by_jinja(source: str, chat: list[dict[str, Any]]) -> str:
    """What transformers' own environment makes of messages that are in the right form already."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(source)
    text: str = compiled.render(messages=chat, tools=None, add_generation_prompt=True, **SPECIAL)
    return text


# Content and arguments as the template wants them.
WANTED: dict[str, tuple[dict[str, Any], Any]] = {
    "qwen3, the first": ({"content": ""}, ARGUMENTS),
    "deepseek's distills": ({"content": None}, json.dumps(ARGUMENTS, ensure_ascii=False)),
    "adds to content": ({"content": ""}, ARGUMENTS),
    "adds to content and arguments": ({"content": ""}, json.dumps(ARGUMENTS, ensure_ascii=False)),
    "asks whether content is none": ({"content": None}, ARGUMENTS),
    "qwen3": ({}, ARGUMENTS),
    "llama3": ({}, ARGUMENTS),
    "adds to content behind what was thought": ({"content": ""}, ARGUMENTS),
}


@pytest.mark.parametrize("kind", WANTED)
def test_it_is_what_jinja_makes_of_the_wanted_form(kind: str) -> None:
    content, arguments = WANTED[kind]
    wanted = [USER, {"role": "assistant", **content, "tool_calls": [call(arguments)]}, RESULT]
    given = [USER, {"role": "assistant", "content": None, "tool_calls": [call(ARGUMENTS)]}, RESULT]
    assert rendered(kind, given) == by_jinja(TEMPLATES[kind], wanted)


def test_text_of_arguments_is_kept_as_it_was_written() -> None:
    spelt = '{"city":"K\\u00f6ln",  "days":3}'
    turn = {"role": "assistant", "tool_calls": [call(spelt)]}
    assert spelt in rendered("deepseek's distills", [USER, turn, RESULT])


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("arguments", ["", "{}", {}])
def test_no_arguments_are_an_empty_object(kind: str, arguments: Any) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
    assert "{}" in rendered(kind, chat_of(kind, turn))


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("spoken", [{}, {"content": None}, {"reasoning": "Hm."}])
def test_an_answer_that_says_nothing_does_not_end_a_conversation(
    kind: str, spoken: dict[str, Any]
) -> None:
    text = rendered(kind, [USER, {"role": "assistant", **spoken}, USER])
    assert text.count("And now?") == 2
    assert "None" not in text


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_nothing_to_continue_is_said_whatever_the_template_wants(content: dict[str, Any]) -> None:
    how = {"continue_final_message": True, "add_generation_prompt": False}
    for kind in ("adds to content", "qwen3"):
        with pytest.raises(InvalidRequestError, match="no content to continue"):
            rendered(kind, [USER, {"role": "assistant", **content}], **how)


def test_a_template_without_calls_is_given_what_it_can_show() -> None:
    smallest = (
        "{% for m in messages %}{% set c = m.content %}"
        "{{ '<|im_start|>' + m.role + '\\n' + c }}{% endfor %}"
    )
    template = ChatTemplate(smallest)
    turn = {"role": "assistant", "content": None, "tool_calls": [call(ARGUMENTS)]}
    assert template.render([USER, turn, RESULT]).count("<|im_start|>") == 3
    nothing = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    assert ChatTemplate(nothing).render([USER, turn, RESULT]) == '"And now?""""17 degrees"'
    with_text = turn | {"content": "Let me look."}
    assert "Let me look." in template.render([USER, with_text, RESULT])


@pytest.mark.parametrize("source", [PARTS_ONLY, PARTS_OR_STRING])
def test_templates_of_parts_take_a_turn_of_calls(source: str) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call(ARGUMENTS)]}
    assert ChatTemplate(source).render([USER, turn, RESULT]).count("17 degrees") == 1


def forms_of(source: str) -> CallForms:
    def render(variables: dict[str, Any], budget: Budget) -> str:
        return shared_pool().render(source, {**SPECIAL, **variables}, budget)

    return TemplateForms(render).calls


# Calls behind the last message of the user alone.
LAST_CALLS = (
    "{% for m in messages %}{{ m.role }}{{ m.content or '' }}"
    "{% if 'user' not in messages[loop.index0:] | map(attribute='role') %}"
    "{% for t in m.tool_calls or [] %}{{ t.function.name }}{% set a = t.function.arguments %}"
    "{{ a if a is string else a | tojson }}{% endfor %}{% endif %}{% endfor %}"
)
SHOWS_TWICE = showing_calls(
    "{{ c }}",
    "{{ t.function.name }}{% set a = t.function.arguments %}"
    "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{{ a | tojson }}{% endif %}",
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Of forms that show as much the first.
        (LAST_CALLS, CallForms(("absent", "empty"))),
        (SHOWS_TWICE, CallForms(("absent", "empty"), "text")),
        # What the template says to everybody.
        ("null or None?" + BY_KIND["adds to arguments"], CallForms(("absent", "empty"), "text")),
        (BY_KIND["shows one call of a turn"], CallForms(("absent", "empty"), one_at_a_time=True)),
        (BY_KIND["asks whether content is none"], CallForms(("null",), beside_text="split")),
        (MISTRAL_IDS, CallForms(("absent", "empty"), nine_character_ids=True)),
    ],
)
def test_the_first_of_the_forms_that_show_most(source: str, expected: CallForms) -> None:
    assert forms_of(source) == expected


def test_probes_of_a_template_that_never_ends_take_no_longer_than_a_rendering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def used() -> float:
        """CPU seconds of the processes that have ended."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    monkeypatch.setattr(template_forms, "PROBE_SECONDS", 0.3)
    endless = (
        "{% macro more(n) %}{% if n %}{{ more(n - 1) }}{{ more(n - 1) }}{% endif %}{% endmacro %}"
        "{{ more(60) }}"
    )
    ChatTemplate("").prepare()  # its process has started
    took = []
    # Others' processes that end meanwhile are counted too, but hardly at every attempt.
    for attempt in range(5):
        template = ChatTemplate(f"{endless}{attempt}")
        before = used()
        refusal = str(template.prepare())
        assert "more than 0.3 s of CPU time on a conversation of a few words" in refusal
        with pytest.raises(InvalidRequestError, match="on a conversation of a few words"):
            template.render([USER])
        took.append(used() - before)
        # That of one process, with its start.
        if took[-1] < 1.5 * slowness():
            return
    raise AssertionError(took)
