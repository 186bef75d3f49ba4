"""Calls that a grammar forces are written as the family writes them, and are read again."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from src.core.config import ChatSection
from src.core.errors import InvalidRequestError
from src.core.settings import CHECKOUT
from src.core.structured_output import StructuredOutput
from src.text.answer import ToolOffer, whole_answer
from src.text.answer_plan import AnswerPlan, plan_answer
from src.text.chat_template import ChatTemplate
from src.text.tokenizer import Tokenizer
from src.text.tool_calls.syntaxes import SYNTAXES
from tests.support.slowness import own_time, slowness
from tests.text.answers import read
from tests.text.test_answer_plan import conforms, tool

ADD = tool("add", a={"type": "integer"}, b={"type": "array", "items": {"type": "integer"}})
SAY = tool("say", text={"type": "string"}, tone={"enum": ["low", "high"]})
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [ADD, SAY, NOW]

A = '{"a": 1, "b": [2]}'
T = '{"text": "a \\"b\\"\\nc", "tone": "low"}'
TWO = [("add", json.loads(A)), ("say", json.loads(T))]


@functools.cache
def tokenizer(syntax: str, *, special: bool) -> Tokenizer:
    """The demo's, where tags are text, or one that has the family's tags as special tokens."""
    backend = Backend.from_file(str(CHECKOUT / "configs" / "demo" / "tokenizer.json"))
    if special:
        backend.add_special_tokens([tag for tag in SYNTAXES[syntax].tags if tag[0] == "<"])
    # Not the demo's, which is a tag of gpt-oss.
    backend.add_special_tokens(["<|return|>"])
    return Tokenizer(
        backend, special_tokens={"eos_token": "<|return|>"}, chat_template=ChatTemplate("{{ x }}")
    )


def plan(
    syntax: str,
    *,
    tools: list[dict[str, Any]] = TOOLS,
    choice: str = "required",
    special: bool = False,
    prompt: str = "",
    wanted: StructuredOutput | None = None,
    parallel: bool = True,
    reasoning: str = "none",
    max_bytes: int | None = None,
) -> AnswerPlan:
    its = tokenizer(syntax, special=special)
    settings = ChatSection(tool_call_parser=syntax, reasoning_parser=reasoning)  # type: ignore[arg-type]
    offer = ToolOffer(tools=tools, choice=choice, parallel=parallel)  # type: ignore[arg-type]
    ids = its.encode(prompt)
    return plan_answer(its, settings, ids, offer, structured_output=wanted, max_bytes=max_bytes)


def listed(before: str, after: str) -> tuple[str, str]:
    add = f'{{"name": "add", "arguments": {A}}}'
    say = f'{{"name": "say", "arguments": {T}}}'
    return f"{before}[{add}]{after}", f"{before}[{add}, {say}]{after}"


XML_ADD = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2]\n</parameter>\n"
    "</function>\n</tool_call>"
)
XML_SAY = (
    '<tool_call>\n<function=say>\n<parameter=text>\na "b"\nc\n</parameter>\n<parameter=tone>\nlow\n'
    "</parameter>\n</function>\n</tool_call>"
)
GLM_ADD = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>[2]</arg_value>\n</tool_call>"
)
GLM_SAY = (
    '<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>a "b"\nc</arg_value>\n'
    "<arg_key>tone</arg_key>\n<arg_value>low</arg_value>\n</tool_call>"
)
DS_OPEN, DS_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
DS31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
K_OPEN, K_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
HARMONY = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
FORCED: dict[str, tuple[str, str | None]] = {
    "qwen3_coder": (XML_ADD, f"{XML_ADD}\n{XML_SAY}"),
    "glm45": (GLM_ADD, f"{GLM_ADD}\n{GLM_SAY}"),
    "deepseek_v3": (
        DS_OPEN + DS3.format("add", A) + DS_CLOSE,
        DS_OPEN + DS3.format("add", A) + "\n" + DS3.format("say", T) + DS_CLOSE,
    ),
    "deepseek_v31": (
        DS_OPEN + DS31.format("add", A) + DS_CLOSE,
        DS_OPEN + DS31.format("add", A) + DS31.format("say", T) + DS_CLOSE,
    ),
    "kimi_k2": (
        K_OPEN + KIMI.format("add", 0, A) + K_CLOSE,
        K_OPEN + KIMI.format("add", 7, A) + KIMI.format("say", 8, T) + K_CLOSE,
    ),
    # The answer ends with the call.
    "openai": (HARMONY + A, None),
    "granite": listed("<|tool_call|>", ""),
    "phi4_mini_json": listed("functools", ""),
    "nemotron_json": listed("<TOOLCALL>", "</TOOLCALL>"),
    "llama3_function": (f"<function=add>{A}</function>", None),
    # There is no grammar of Python's calls: they are forced as JSON.
    "llama4_pythonic": listed("", ""),
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("syntax", FORCED)
def test_a_forced_call_is_written_as_the_family_does_and_read_again(
    syntax: str, special: bool
) -> None:
    its = tokenizer(syntax, special=special)
    forced = plan(syntax, special=special)
    alone = plan(syntax, special=special, parallel=False)
    one, two = FORCED[syntax]
    for text, number in ((one, 1), (two, 2)):
        if text is None:
            continue
        assert conforms(its, forced.structured_output, text)
        assert conforms(its, alone.structured_output, text) == (number == 1)
        result = read(forced.parser(), text)
        assert result.content == ""
        calls = [(name, json.loads(arguments)) for name, arguments in result.calls]
        assert calls == TWO[:number]
        for place in range(len(text)):
            assert whole_answer(forced.parser(), text[:place], cut_short=True).content == ""
    wrong = [one.replace("[2]", "[true]"), one.replace("add", "sub"), f"So {one}"]
    wrong += [one.replace('"b"', '"c"').replace("=b", "=c").replace(">b<", ">c<"), one[:-1]]
    if two is not None:
        wrong += [two.replace("low", "loud"), two + one]
    for text in wrong:
        assert not conforms(its, forced.structured_output, text), text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>now\n</tool_call>"),
    ],
)
def test_a_function_without_parameters_is_forced_without_any(
    syntax: str, text: str, special: bool
) -> None:
    forced = plan(syntax, special=special)
    assert conforms(tokenizer(syntax, special=special), forced.structured_output, text)
    assert read(forced.parser(), text).calls == [("now", "{}")]


def function(parameters: dict[str, Any], name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object"},
        {"properties": {"x": {"type": "string", "pattern": "^a+$"}}, "required": ["x"]},
        {"properties": {"x": {"type": "string", "minLength": 2}}, "required": ["x"]},
        {"properties": {"x": {"type": ["string", "integer"]}}, "required": ["x"]},
        {"properties": {"x": {"$ref": "#/properties/y"}, "y": {"type": "integer"}}},
        {"properties": {"x": {"enum": ["a</parameter></arg_value>b"]}}, "required": ["x"]},
        {"properties": {"x": {"type": "integer"}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"x": {}}, "anyOf": [{"required": ["x"]}]},
        {"properties": {"a b>": {"type": "integer"}}},
    ],
)
@pytest.mark.parametrize("syntax", ["qwen3_coder", "glm45"])
def test_arguments_that_cannot_stand_one_by_one_are_forced_as_json(
    syntax: str, parameters: dict[str, Any]
) -> None:
    """What a schema asks for is kept, though the model is used to another form."""
    forced = plan(syntax, tools=[function(parameters)])
    wrong = '{"x": "b"}' if "pattern" in str(parameters) else '{"x": '
    its = tokenizer(syntax, special=False)
    for own in (
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "<tool_call>f\n</tool_call>",
    ):
        assert not conforms(its, forced.structured_output, own)
    text = f'<tool_call>\n{{"name": "f", "arguments": {wrong}}}\n</tool_call>'
    assert not conforms(its, forced.structured_output, text)
    right = {"pattern": '{"x": "aa"}', "minLength": '{"x": "aa"}', "string": '{"x": "aa"}'}
    arguments = next((text for key, text in right.items() if key in str(parameters)), '{"x": 1}')
    if "</parameter>" in str(parameters):
        arguments = '{"x": "a</parameter></arg_value>b"}'
    if "a b>" in str(parameters):
        arguments = '{"a b>": 1}'
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert conforms(its, forced.structured_output, text)
    assert read(forced.parser(), text).calls == [("f", arguments)]


@pytest.mark.parametrize(
    "parameters",
    [
        # A reference that would mean something else in the schema of one argument.
        {"properties": {"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"items": {"$ref": "#"}}}},
        {"properties": {"x": {"$ref": "#y"}, "y": {"$anchor": "y", "type": "integer"}}},
        {"properties": {"x": {"type": "array", "items": {"$dynamicRef": "#y"}}}},
        # Schemas that are none.
        {"properties": {"x": {"type": "integer"}}, "required": True},
        {"properties": {"x": {"type": "integer"}}, "required": [{}]},
        {"properties": {"x": {"type": "string", "enum": ["a", 1]}}},
        {"properties": {"x": {"type": "string", "enum": 1}}},
        {"properties": {"x": {"type": "string", "const": "a", "enum": 1}}},
        {"properties": {"x": {"type": [{}, "string"]}}},
        {"properties": {"x": 1}},
        {"properties": [1]},
    ],
)
def test_what_a_schema_means_is_left_to_what_compiles_it(parameters: dict[str, Any]) -> None:
    forced = plan("qwen3_coder", tools=[function(parameters)])
    assert forced.structured_output is not None
    assert "<parameter=" not in str(forced.structured_output.value)
    read(plan("qwen3_coder", tools=[function(parameters)], choice="auto").parser(), XML_ADD)


def test_definitions_go_with_the_arguments_that_refer_to_them() -> None:
    parameters = {
        "properties": {"x": {"$ref": "#/$defs/X", "$defs": {"X": {"type": "string"}}}},
        "required": ["x"],
        "$defs": {"X": {"type": "array", "items": {"$ref": "#/$defs/Y"}}, "Y": {"enum": [1, 2]}},
    }
    forced = plan("glm45", tools=[function(parameters)])
    text = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>"
    its = tokenizer("glm45", special=False)
    assert conforms(its, forced.structured_output, text)
    assert not conforms(its, forced.structured_output, text.replace("2]", "3]"))


def many_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """A function of 2,000 such arguments, with 40 kB of definitions."""
    definitions = {"X": {"type": "integer"}, "Y": {"enum": list(range(8000))}}
    return function({"properties": {f"x{i}": schema for i in range(2000)}, "$defs": definitions})


@pytest.mark.parametrize("syntax", ["qwen3_coder", "glm45"])
def test_definitions_are_spelt_only_where_they_are_referred_to_and_within_the_bound(
    syntax: str,
) -> None:
    plain, referring = many_arguments({"type": "integer"}), many_arguments({"$ref": "#/$defs/X"})
    forced = plan(syntax, tools=[plain])
    assert forced.structured_output is not None
    assert len(forced.structured_output.value) < 5 * len(json.dumps(plain))
    # What is refused is what would be spelt, and before it is.
    with own_time() as spent:
        with pytest.raises(InvalidRequestError, match="may have at most 1000000 bytes, got "):
            plan(syntax, tools=[referring], max_bytes=1_000_000)
        assert spent() < 1 * slowness()
    plan(syntax, tools=[plain], max_bytes=1_000_000)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("syntax", ["qwen3_coder", "kimi_k2", "granite", "deepseek_v31"])
def test_a_strict_function_is_called_by_its_schema_where_the_model_decides(
    syntax: str, special: bool
) -> None:
    strict = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]
    offered = plan(syntax, tools=strict, choice="auto", special=special)
    its = tokenizer(syntax, special=special)
    one, two = FORCED[syntax]
    assert two is not None
    texts = ("", "Well, <so", one, f"So.\n{one}", f"So. {one} Done.", f"So. {one} and {two}")
    for text in texts:
        assert conforms(its, offered.structured_output, text), text
    calls = read(offered.parser(), f"So. {one} and {two}")
    assert [name for name, _ in calls.calls] == ["add", "add", "say"]
    wrong = [f"So {one.replace('[2]', '[true]')}", f"So {one[: len(one) // 2]} Done."]
    if syntax == "qwen3_coder":
        # Nor does the parser find a call where the grammar lets anything stand.
        wrong.append("So <function=add>\n</function>")
    for text in wrong:
        assert not conforms(its, offered.structured_output, text), text


REASONED = "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant"


@pytest.mark.parametrize("special", [False, True])
def test_gpt_oss_thinks_and_calls_or_answers_in_its_channels(special: bool) -> None:
    its = tokenizer("openai", special=special)
    forced = plan("openai", special=special, reasoning="openai_gptoss", prompt="<|start|>assistant")
    for thinking in ("", REASONED):
        assert conforms(its, forced.structured_output, thinking + HARMONY + A)
        result = read(forced.parser(), thinking + HARMONY + A)
        assert result == ("", [("add", A)], "hm" if thinking else "")
        assert not conforms(its, forced.structured_output, thinking + "<|channel|>final<|message|>")
    wanted = StructuredOutput.json({"type": "integer"})
    either = plan(
        "openai", special=special, reasoning="openai_gptoss", wanted=wanted, choice="auto"
    )
    for thinking in ("", REASONED):
        final = f"{thinking}<|channel|>final<|message|>12"
        assert conforms(its, either.structured_output, final)
        assert read(either.parser(), final) == ("12", [], "hm" if thinking else "")
        assert conforms(its, either.structured_output, thinking + HARMONY + A)
        assert not conforms(its, either.structured_output, final.replace("12", "x"))
    # Where the answer may be any text, its channels are the model's.
    strict = [{**ADD, "function": {**ADD["function"], "strict": True}}]
    free = plan("openai", tools=strict, special=special, choice="auto")
    assert free.structured_output is None
