"""Calls as the families' model cards, chat templates and papers have them written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from src.text.answer import Answer, ToolCallArguments, ToolCallBegin, whole_answer
from src.text.tool_calls.parser import ToolCallParser
from src.text.tool_calls.syntaxes import SYNTAXES
from src.text.tool_calls.typed_values import ANY, kinds_of_arguments
from tests.support.slowness import own_time, slowness
from tests.text.answers import Read, cut, read, read_in_pieces

PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    },
    "plan": {
        "type": "object",
        "properties": {
            "days": {"type": "integer"},
            "budget": {"type": "number"},
            "direct": {"type": "boolean"},
            "stops": {"type": "array", "items": {"type": "string"}},
            "options": {"$ref": "#/$defs/Options"},
            "note": {"type": "string"},
            "until": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"Options": {"type": "object"}},
    },
    "now": {},
}
KINDS = {name: kinds_of_arguments(parameters) for name, parameters in PARAMETERS.items()}


def parser(syntax: str, *, eager: bool = False, **how: bool) -> ToolCallParser:
    return ToolCallParser(SYNTAXES[syntax], KINDS, eager=eager, **how)


def call(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return name, arguments


PARIS = call("get_weather", city="Paris")
ROME = call("get_weather", city="Rome", unit="celsius")
NOW = call("now")

# DeepSeek's tags are written with a full-width bar and a block for the space.
DS = {
    "calls": "<｜tool▁calls▁begin｜>",
    "end": "<｜tool▁calls▁end｜>",
    "call": "<｜tool▁call▁begin｜>",
    "close": "<｜tool▁call▁end｜>",
    "sep": "<｜tool▁sep｜>",
}


def deepseek_v3(*calls: str) -> str:
    parts = [
        f"{DS['call']}function{DS['sep']}{name}\n```json\n{arguments}\n```{DS['close']}"
        for name, arguments in (text.split(" ", 1) for text in calls)
    ]
    return DS["calls"] + "\n".join(parts) + DS["end"]


def deepseek_v31(*calls: str) -> str:
    parts = [
        f"{DS['call']}{name}{DS['sep']}{arguments}{DS['close']}"
        for name, arguments in (text.split(" ", 1) for text in calls)
    ]
    return DS["calls"] + "".join(parts) + DS["end"]


def kimi(*calls: str) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(text.split(" ", 1) for text in calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


W_PARIS = 'get_weather {"city": "Paris"}'
W_ROME = 'get_weather {"city": "Rome", "unit": "celsius"}'
J_PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
J_ROME = '{"name": "get_weather", "arguments": {"city": "Rome", "unit": "celsius"}}'
XML_PARIS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>"
)
XML_ROME = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>"
)
XML_PLAN = (
    "<tool_call>\n<function=plan>\n<parameter=days>\n3\n</parameter>\n<parameter=budget>\n99.5\n"
    "</parameter>\n<parameter=direct>\nTrue\n</parameter>\n<parameter=stops>\n"
    "[\"a\\n</parameter>\", 'b']\n</parameter>\n<parameter=options>\n"
    '{\n  "x": [1]\n}\n</parameter>\n'
    "<parameter=note>\n\n42\n  two\n\n</parameter>\n<parameter=until>\nNone\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM_PARIS = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
)
GLM_47_ROME = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    "<arg_key>unit</arg_key><arg_value>celsius</arg_value></tool_call>"
)
TO = "<|channel|>commentary to=functions."
CASES: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("deepseek_v3", "Let me see." + deepseek_v3(W_PARIS, W_ROME), "Let me see.", [PARIS, ROME]),
    ("deepseek_v3", deepseek_v3("now {}", "now null"), "", [NOW, NOW]),
    ("deepseek_v3", deepseek_v3("now ").replace("now ", "now"), "", [NOW]),
    # the tags around all of them may be missing
    ("deepseek_v3", deepseek_v3(W_PARIS).removeprefix(DS["calls"]), "", [PARIS]),
    ("deepseek_v31", "So.\n" + deepseek_v31(W_PARIS, W_ROME), "So.\n", [PARIS, ROME]),
    ("deepseek_v31", deepseek_v31("now ", "now {}"), "", [NOW, NOW]),
    ("kimi_k2", "Let me see." + kimi(W_PARIS, W_ROME), "Let me see.", [PARIS, ROME]),
    ("kimi_k2", kimi("now ", W_PARIS), "", [NOW, PARIS]),
    ("kimi_k2", kimi(W_PARIS).replace("functions.", ""), "", [PARIS]),
    ("qwen3_coder", f"I will look.\n\n{XML_PARIS}\n{XML_ROME}", "I will look.\n\n", [PARIS, ROME]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [NOW]),
    # a model that forgets the outer tag, and one that writes JSON all the same
    ("qwen3_coder", XML_PARIS.removeprefix("<tool_call>\n"), "", [PARIS]),
    ("qwen3_coder", f"<tool_call>\n{J_PARIS}\n</tool_call>", "", [PARIS]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n", "", [NOW]),
    ("glm45", f"So:\n{GLM_PARIS}\n{GLM_47_ROME}", "So:\n", [PARIS, ROME]),
    ("glm45", "<tool_call>now\n</tool_call>", "", [NOW]),
    ("glm45", "<tool_call>now</tool_call>", "", [NOW]),
    ("glm45", f"<tool_call>{J_PARIS}</tool_call>", "", [PARIS]),
    ("openai", f'{TO}get_weather <|constrain|>json<|message|>{{"city": "Paris"}}', "", [PARIS]),
    # the recipient may stand in the role, and the channel may be another
    (
        "openai",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Paris"}<|call|>',
        "",
        [PARIS],
    ),
    (
        "openai",
        f'<|start|>assistant{TO}get_weather code<|message|>{{"city": "Paris"}}<|end|>{TO}now'
        "<|message|>",
        "",
        [PARIS, NOW],
    ),
    ("granite", f"<|tool_call|>[{J_PARIS}, {J_ROME}]", "", [PARIS, ROME]),
    ("granite", f"<tool_call>[{J_PARIS}]", "", [PARIS]),
    ("phi4_mini_json", f"functools[{J_PARIS},{J_ROME}]", "", [PARIS, ROME]),
    ("phi4_mini_json", f"<|tool_call|>{J_PARIS}</|tool_call|>", "", [PARIS]),
    ("nemotron_json", f"So <TOOLCALL>[{J_PARIS}, {J_ROME}]</TOOLCALL>", "So ", [PARIS, ROME]),
    ("nemotron_json", '<TOOLCALL>[get_weather(city="Paris")]</TOOLCALL>', "", [PARIS]),
    (
        "llama4_pythonic",
        '<|python_start|>[get_weather(city="Paris"), get_weather(city="Rome", unit="celsius")]'
        "<|python_end|>",
        "",
        [PARIS, ROME],
    ),
    ("llama4_pythonic", "Well.\n[now()]", "Well.\n", [NOW]),
    (
        "llama4_pythonic",
        f"<|python_start|>Well.<|python_end|>{J_PARIS.replace('arguments', 'parameters')}",
        "<|python_start|>Well.<|python_end|>",
        [PARIS],
    ),
    ("llama3_function", 'So <function=get_weather>{"city": "Paris"}</function>', "So ", [PARIS]),
    ("llama3_function", "<function=now></function>", "", [NOW]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("mistral", "[TOOL_CALLS]now[ARGS]", "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [NOW]),
]  # fmt: skip


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), CASES)
def test_calls_are_read_however_the_text_is_cut(
    syntax: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    whole = read(parser(syntax), text)
    assert whole.content == content
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == calls
    for eager in (False, True):
        assert read_in_pieces(parser(syntax, eager=eager), text) == whole
        for place in range(1, len(text)):
            assert read_in_pieces(parser(syntax, eager=eager), cut(text, [place])) == whole


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_the_example_of_each_syntax_is_a_call(syntax: str) -> None:
    example = SYNTAXES[syntax].example
    kinds = {"add": kinds_of_arguments({"properties": {"a": {"type": "integer"}}})}
    assert read(ToolCallParser(SYNTAXES[syntax], kinds), example) == Read("", [("add", '{"a": 1}')])


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), CASES)
def test_the_name_comes_before_the_arguments_and_these_as_they_are_written(
    syntax: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    reader = parser(syntax, eager=True)
    events = [event for character in text for event in reader.feed(character)] + reader.finish()
    kinds = [
        type(event) for event in events if not hasattr(event, "text") or hasattr(event, "index")
    ]
    assert kinds[0] is ToolCallBegin
    assert kinds.count(ToolCallBegin) == len(calls)
    assert ToolCallArguments in kinds


def test_arguments_between_tags_become_json_by_their_schema() -> None:
    ((name, arguments),) = read(parser("qwen3_coder"), XML_PLAN).calls
    assert name == "plan"
    assert json.loads(arguments) == {
        "days": 3,
        "budget": 99.5,
        "direct": True,
        # What is no JSON is tried as Python's.
        "stops": ["a\n</parameter>", "b"],
        "options": {"x": [1]},
        # A string stays one, and only the line breaks next to the tags are not its own.
        "note": "\n42\n  two\n",
        "until": None,
    }


def test_a_string_between_tags_is_shown_as_it_comes() -> None:
    reader = parser("qwen3_coder", eager=True)
    reader.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    pieces = ('a "', "\n", "\n", "é</par", "ameter>", " \n", "<parameter=", "unit>\nkelvin\n")
    shown = [reader.feed(text) for text in pieces]
    texts = [
        "".join(event.text for event in events if isinstance(event, ToolCallArguments))
        for events in shown
    ]
    # The closing tag is one where a tag follows that may follow it.
    assert texts == ['a \\"', "", "\\n", "\\né", "", "", '"', ', "unit": "kelvin']


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "-1e3", -1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": "string", "nullable": True}, "nothing", "nothing"),
        ({"type": "string", "nullable": False}, "null", "null"),
        ({"type": "string", "enum": ["a"], "nullable": True}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/Count"}], "nullable": True}, "null", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "integer", "nullable": True}, "7", 7),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "true"}, "true", "true"),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "True", True),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "1", "1"),
        ({"$ref": "#/$defs/Count"}, "1", 1),
        ({"$ref": "#/$defs/Self"}, "1", 1),
        ({"$ref": "#/$defs/Nothing"}, "x", "x"),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, '{"a": 1', '{"a": 1'),
        ({"type": "array"}, "[1, 'x']", [1, "x"]),
        # Where nothing is said it is what it looks like.
        ({}, "01234", "01234"),
        ({}, "12", 12),
        (True, "[1]", [1]),
    ],
)
def test_a_value_is_of_the_kind_that_the_schema_says(schema: Any, text: str, expected: Any) -> None:
    parameters = {
        "properties": {"x": schema},
        "$defs": {"Count": {"type": "integer"}, "Self": {"anyOf": [{"$ref": "#/$defs/Self"}]}},
    }
    kinds = {"f": kinds_of_arguments(parameters)}
    spelt = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    for eager in (False, True):
        reader = ToolCallParser(SYNTAXES["glm45"], kinds, eager=eager)
        ((_, arguments),) = read(reader, spelt).calls
        assert json.loads(arguments) == {"x": expected}


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ([True], {"boolean"}),
        ([1], {"number", "integer"}),
        ([10**400], {"number", "integer"}),
        ([1.5], {"number"}),
        ([1.5, 2.0], {"number", "integer"}),
        ([None, "a"], {"null", "string"}),
        ([{}, []], {"object", "array"}),
        ([], ANY),
    ],
)
def test_listed_values_are_of_the_kinds_that_they_have(values: list[Any], kinds: set[str]) -> None:
    schemas = {"x": {"enum": values}}
    if len(values) == 1:
        schemas["y"] = {"const": values[0]}
    found = kinds_of_arguments({"properties": schemas})
    assert found == dict.fromkeys(schemas, kinds)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1] * 500_000},
        {"enum": [1.5] * 500_000},
        {"enum": [True, "a", 1.5] * 170_000},
        {"anyOf": [{}] * 500_000},
    ],
)
def test_what_is_listed_many_times_holds_nothing_up(schema: dict[str, Any]) -> None:
    with own_time() as spent:
        kinds_of_arguments({"properties": {"x": schema}})
        assert spent() < 0.2 * slowness()


BAD_AND_GOOD = [
    ("hermes", '<tool_call>{"name": oops}</tool_call>\n<tool_call>' + J_PARIS + "</tool_call>"),
    ("llama3_json", f'{{"name": "nobody", "parameters": {{}}}}; {J_PARIS}'),
    ("llama3_json", f'{{"name": "now", "parameters": {{oops}}}}; {J_PARIS}'),
    ("json", f'[{{"name": "nobody", "arguments": {{"x": [1]}}}}, {J_PARIS}]'),
    ("json", f'[{{"name": "now", "arguments": {{oops}}}}, {J_PARIS}]'),
    ("json", f'[{{"name": "now", "arguments": "text"}}, {J_PARIS}]'),
    ("mistral", f'[TOOL_CALLS][{{"name": "nobody", "arguments": {{}}}}, {J_PARIS}]'),
    ("mistral", f'[TOOL_CALLS][{{"name": "now", "arguments": {{oops}}}}, {J_PARIS}]'),
    ("mistral", '[TOOL_CALLS]nobody[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'),
    ("granite", f'<|tool_call|>[{{"name": "now", "arguments": {{oops}}}}, {J_PARIS}]'),
    ("phi4_mini_json", f'functools[{{"name": "now", "arguments": [1]}}, {J_PARIS}]'),
    ("nemotron_json", f'<TOOLCALL>[{{"name": "now", "x": 1}}, {J_PARIS}]</TOOLCALL>'),
    ("pythonic", '[nobody(a=1), get_weather(city="Paris")]'),
    ("pythonic", '[now(open("x), (")), get_weather(city="Paris")]'),
    ("llama4_pythonic", '<|python_start|>[now(1), get_weather(city="Paris")]<|python_end|>'),
    ("qwen3_coder", XML_PLAN.replace("plan>", "nobody>") + XML_PARIS),
    ("glm45", GLM_47_ROME.replace("get_weather", "nobody") + GLM_PARIS),
    ("deepseek_v3", deepseek_v3("nobody {}", W_PARIS)),
    ("deepseek_v31", deepseek_v31("now {oops}", W_PARIS)),
    ("kimi_k2", kimi("nobody {}", W_PARIS)),
    ("openai", f'{TO}nobody<|message|>{{}}<|end|>{TO}get_weather<|message|>{{"city": "Paris"}}'),
    ("llama3_function", '<function=now>{1}</function><function=get_weather>{"city": "Paris"}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1<tool_call>' + J_PARIS),
]  # fmt: skip


@pytest.mark.parametrize(("syntax", "text"), BAD_AND_GOOD)
def test_a_bad_sibling_does_not_lose_the_good_call_behind_it(syntax: str, text: str) -> None:
    result = read(parser(syntax), text)
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == [PARIS]
    assert "nobody" in result.content or "now" in result.content or "oops" in result.content
    assert read_in_pieces(parser(syntax), text) == result


def test_a_call_keeps_the_id_that_the_model_gave_it_unless_it_is_taken() -> None:
    text = kimi(W_PARIS, "now {}", W_ROME).replace("get_weather:2", "get_weather:0")
    ids = [one.id for one in whole_answer(parser("kimi_k2"), text).tool_calls]
    assert ids[:2] == ["functions.get_weather:0", "functions.now:1"]
    assert ids[2] not in ids[:2]


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("mistral", "[TOOL_CALLS]now[ARGS]"),
        ("mistral", "[TOOL_CALLS]now"),
        ("openai", f"{TO}now <|constrain|>json<|message|>"),
        ("qwen3_coder", "<tool_call>\n<function=now>\n"),
        ("glm45", "<tool_call>now"),
    ],
)
def test_what_is_cut_short_before_its_arguments_is_no_call_without_any(
    syntax: str, text: str
) -> None:
    cut_short = whole_answer(parser(syntax), text, cut_short=True)
    assert cut_short == Answer(content=text)
    by_itself = whole_answer(parser(syntax), text)
    assert [(one.name, one.arguments) for one in by_itself.tool_calls] == [("now", "{}")]


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), CASES)
def test_a_forced_call_that_is_cut_short_shows_no_scaffold(
    syntax: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    text = text.removeprefix(content)
    for place in range(len(text)):
        forced = parser(syntax, eager=True, certain=True, alone=True)
        answer = whole_answer(forced, text[:place], cut_short=True)
        assert answer.content == ""
        # In an answer that may be text too, what has only begun to be a tag is text.
        sure = whole_answer(parser(syntax, eager=True, certain=True), text[:place], cut_short=True)
        assert any(tag.startswith(sure.content) for tag in SYNTAXES[syntax].tags)
