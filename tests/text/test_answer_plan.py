"""Which parser and which grammar follow from a model, its settings and a request."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from src.core.config import ChatSection
from src.core.errors import InvalidRequestError
from src.core.settings import CHECKOUT
from src.core.structured_output import StructuredOutput
from src.engine.grammar.compiled import compile_matcher
from src.engine.grammar.vocabulary import Vocabulary
from src.engine.plugins import check_syntaxes
from src.text.answer import ToolOffer
from src.text.answer_plan import AnswerPlan, plan_answer
from src.text.chat_template import ChatTemplate
from src.text.reasoning import REASONING_SYNTAXES
from src.text.tokenizer import Tokenizer
from src.text.tool_calls.detection import reasoning_syntax, tool_call_syntax
from src.text.tool_calls.syntaxes import SYNTAXES
from tests.text.answers import Read, read
from tests.text.chat_templates import LLAMA3, MISTRAL, QWEN3

DEMO = CHECKOUT / "configs" / "demo"
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]
DEMO_TEMPLATE = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
WEATHER = tool("get_weather", city={"type": "string"})
TOOLS = [ADD, WEATHER]
REQUIRED = ToolOffer(tools=TOOLS, choice="required")


@functools.cache
def tokenizer(template: str, *, special: bool) -> Tokenizer:
    """The bundled model's, where tags are text, or with the tags as special tokens."""
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    if special:
        backend.add_special_tokens(TAGS)
    return Tokenizer(
        backend, special_tokens={"eos_token": "<|end|>"}, chat_template=ChatTemplate(template)
    )


def plan(
    template: str,
    offer: ToolOffer = REQUIRED,
    *,
    special: bool = False,
    prompt: str = "",
    wanted: StructuredOutput | None = None,
    **settings: Any,
) -> AnswerPlan:
    its = tokenizer(template, special=special)
    return plan_answer(
        its, ChatSection(**settings), its.encode(prompt), offer, structured_output=wanted
    )


@functools.cache
def vocabulary(its: Tokenizer) -> Any:
    assert its.eos_token_id is not None
    return Vocabulary.of(its, its.vocab_size, [its.eos_token_id]).build()


def conforms(its: Tokenizer, output: StructuredOutput | None, text: str) -> bool:
    """Whether a whole answer may be this text."""
    assert output is not None
    assert output.kind == "grammar"
    assert "::=" not in output.value
    matcher = compile_matcher(vocabulary(its), str(output.value))
    token_ids = its.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        (LLAMA3, "llama3_json", None),
        (QWEN3, "hermes", "think"),
        (MISTRAL, "mistral", None),
        (DEMO_TEMPLATE, "hermes", None),
        ("{{ tools }} <|python_start|>", "llama4_pythonic", None),
        ("{{ tools }} [func_name1(a=1)]", "pythonic", None),
        ("{{ messages }}", "json", None),
        ("[TOOL_CALLS] [THINK] [/THINK]", "mistral", "mistral"),
        ("<tool_call>\n<function=example>\n<parameter=one>\n", "qwen3_coder", None),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key> </think>", "glm45", "think"),
        ("'<｜tool▁calls▁begin｜>' + name + '\\n```json\\n'", "deepseek_v3", None),
        ("'<｜tool▁calls▁begin｜>' + name </think>", "deepseek_v31", "think"),
        ("<|tool_calls_section_begin|>{{ id }} <think></think>", "kimi_k2", "kimi_k2"),
        ("<|tool_calls_section_begin|>{{ id }}", "kimi_k2", None),
        ("<|start|>assistant<|channel|>final<|message|>", "openai", "openai_gptoss"),
        ("respond only with <|tool_call|> followed by", "granite", None),
        ("between <think></think> and <response></response>", "json", "granite"),
        ("after 'Here is my thought process:' and", "json", "granite"),
        ("<|tool|>' + tools + '<|/tool|>", "phi4_mini_json", None),
        ("formatted as functools[{", "phi4_mini_json", None),
        ("<TOOLCALL>[{", "nemotron_json", None),
        ("<function=example_name>{{ x }}</function>", "llama3_function", None),
        ("◁think▷◁/think▷", "json", "kimi"),
    ],
)
def test_the_chat_template_shows_how_a_model_writes(
    template: str, calls: str, reasoning: str | None
) -> None:
    found = tool_call_syntax("auto", template), reasoning_syntax("auto", template)
    assert (found[0] and found[0].name, found[1] and found[1].name) == (calls, reasoning)
    assert tool_call_syntax("none", template) is None
    assert reasoning_syntax("none", template) is None
    assert tool_call_syntax("mistral", template) is not None


SUM = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("template", "one", "two"),
    [
        (DEMO_TEMPLATE, hermes(SUM), hermes(SUM, PARIS)),
        (LLAMA3, SUM.replace("arguments", "parameters"), None),
        (MISTRAL, f"[TOOL_CALLS][{SUM}]", f"[TOOL_CALLS][{SUM}, {PARIS}]"),
        ("{{ messages }}", f"[{SUM}]", f"[{SUM}, {PARIS}]"),
        ("{{ messages }} <|python_start|>", f"[{SUM}]", f"[{SUM}, {PARIS}]"),
    ],
)
def test_a_forced_call_is_one_that_the_parser_reads(
    template: str, one: str, two: str | None, special: bool
) -> None:
    its = tokenizer(template, special=special)
    forced = plan(template, special=special)
    assert forced.forces_calls
    for text, number in ((one, 1), (two, 2)):
        if text is None:
            continue
        assert conforms(its, forced.structured_output, text)
        result = read(forced.parser(), text)
        assert result == Read("", [("add", '{"a": 1, "b": 2}'), ("get_weather", '{"city": "Paris"}')][:number])  # fmt: skip  # noqa: E501
        broken = text.replace('"a": 1', '"a": "1"'), text.replace('"b"', '"c"'), f"So {text}"
        for other in (*broken, text + "!", text[:-1], text.replace("add", "sub")):
            assert not conforms(its, forced.structured_output, other)
    alone = plan(
        template, ToolOffer(tools=TOOLS, choice="required", parallel=False), special=special
    )
    assert conforms(its, alone.structured_output, one)
    assert two is None or not conforms(its, alone.structured_output, two)


def test_a_tokenizer_with_marks_has_calls_written_with_them() -> None:
    backend = Backend.from_file(str(DEMO / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    its = Tokenizer(
        backend, special_tokens={"eos_token": "<|end|>"}, chat_template=ChatTemplate(MISTRAL)
    )
    forced = plan_answer(its, ChatSection(), [], REQUIRED)
    one = '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'
    for text, number in ((one, 1), (one + one, 2)):
        assert conforms(its, forced.structured_output, text)
        assert read(forced.parser(), text) == Read("", [("add", '{"a": 1, "b": 2}')] * number)
    assert not conforms(its, forced.structured_output, one.replace("1", '"1"'))


def test_properties_that_a_schema_does_not_name_are_left_out_unless_it_provides_for_them() -> None:
    its = tokenizer(DEMO_TEMPLATE, special=False)
    free = {"name": "add", "parameters": {"properties": {}, "additionalProperties": True}}
    anything = {"name": "add", "parameters": {"type": "object"}}
    nothing = {"name": "add"}
    text = hermes('{"name": "add", "arguments": {"a": 1}}')
    for function, allowed in ((free, True), (anything, True), (nothing, False)):
        offer = ToolOffer(tools=[{"function": function}], choice="required")
        assert conforms(its, plan(DEMO_TEMPLATE, offer).structured_output, text) == allowed
        empty = hermes('{"name": "add", "arguments": {}}')
        assert conforms(its, plan(DEMO_TEMPLATE, offer).structured_output, empty)


def test_a_name_may_hold_what_json_and_grammars_escape() -> None:
    name = 'say "NAME" \\ {é} ::= '
    offer = ToolOffer(tools=[{"function": {"name": name}}], choice="required")
    text = hermes(json.dumps({"name": name, "arguments": {}}, ensure_ascii=False))
    forced = plan(DEMO_TEMPLATE, offer)
    assert conforms(tokenizer(DEMO_TEMPLATE, special=False), forced.structured_output, text)
    assert read(forced.parser(), text) == Read("", [(name, "{}")])


def test_parameters_that_are_no_object_are_refused_where_a_call_is_forced() -> None:
    bad = [{"function": {"name": "add", "parameters": {"type": "string"}}}]
    with pytest.raises(InvalidRequestError) as caught:
        plan(DEMO_TEMPLATE, ToolOffer(tools=bad, choice="required"))
    assert caught.value.param == "tools[0].function.parameters"
    assert plan(DEMO_TEMPLATE, ToolOffer(tools=bad)).structured_output is None


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<think>\n", "hm\n{}</think>\n\n"),
        ("", "<think>\nhm\n</think>\n\n"),
        ("", ""),
        ("<think>\n\n</think>\n\n", ""),
    ],
)
def test_a_forced_call_comes_after_the_reasoning(prompt: str, thinking: str, special: bool) -> None:
    its = tokenizer(QWEN3, special=special)
    forced = plan(QWEN3, special=special, prompt=prompt)
    assert conforms(its, forced.structured_output, thinking + hermes(SUM))
    assert not conforms(its, forced.structured_output, thinking + "Well. " + hermes(SUM))
    result = read(forced.parser(), thinking + hermes(SUM))
    assert result.calls == [("add", '{"a": 1, "b": 2}')]
    assert bool(result.reasoning) == bool(thinking)
    if prompt == "<think>\n":
        assert not conforms(its, forced.structured_output, "hm " + hermes(SUM))
    elif prompt:
        assert not conforms(its, forced.structured_output, f"<think>a</think>{hermes(SUM)}")


FORMS = [
    (StructuredOutput.json({"type": "integer"}), "12", "x"),
    (StructuredOutput.json(True), '{"a": [1]}', "x"),
    (StructuredOutput.json_object(), '{"a": 1}', "[]"),
    (StructuredOutput.regex("a/\\/[bc]\n::=+"), "a//b\n::=", "a/"),
    (StructuredOutput.choice(["yes", "no"]), "no", "maybe"),
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("wanted", "right", "wrong"), FORMS)
def test_a_form_begins_after_the_reasoning(
    wanted: StructuredOutput, right: str, wrong: str, special: bool
) -> None:
    its = tokenizer(QWEN3, special=special)
    none = ToolOffer()
    for prompt, thinking in (("<think>", "hm\n</think>\n"), ("", "<think>hm</think>"), ("", "")):
        composed = plan(QWEN3, none, special=special, prompt=prompt, wanted=wanted)
        assert conforms(its, composed.structured_output, thinking + right)
        assert not conforms(its, composed.structured_output, thinking + wrong)
        assert read(composed.parser(), thinking + right).content == right
    # Without reasoning it is what was asked for, untouched.
    assert plan(DEMO_TEMPLATE, none, wanted=wanted).structured_output is wanted


def test_an_answer_of_a_form_may_be_a_call_instead() -> None:
    wanted = StructuredOutput.json({"type": "object", "properties": {"n": {"type": "integer"}}})
    its = tokenizer(DEMO_TEMPLATE, special=False)
    either = plan(DEMO_TEMPLATE, ToolOffer(tools=TOOLS), wanted=wanted)
    assert not either.forces_calls
    for text in ('{"n": 1}', hermes(SUM), hermes(SUM, PARIS)):
        assert conforms(its, either.structured_output, text)
    assert not conforms(its, either.structured_output, "Well.")
    # Where no tag tells one from the other, there are no calls.
    assert plan(LLAMA3, ToolOffer(tools=TOOLS), wanted=wanted).structured_output is wanted


STRICT = {"function": {**ADD["function"], "strict": True}}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("template", "one"), [(DEMO_TEMPLATE, hermes), (MISTRAL, lambda call: f"[TOOL_CALLS][{call}]")]
)
def test_calls_of_strict_functions_conform_though_the_model_need_not_call(
    template: str, one: Callable[[str], str], special: bool
) -> None:
    its = tokenizer(template, special=special)
    offered = plan(template, ToolOffer(tools=[STRICT, WEATHER]), special=special)
    tag = "<tool_call>" if one is hermes else "[TOOL_CALLS]"
    good, wrong = one(SUM), one(SUM.replace('"b"', '"c"'))
    # Arguments of a function that is not strict are an object of whatever there is.
    lax = one(PARIS.replace('"city": "Paris"', '"town": [1]'))
    for text in ("", "Well.", "<tool", good, f"So.\n{good}", lax, f"{good} and {lax}. Done"):
        assert conforms(its, offered.structured_output, text), text
    for text in (wrong, f"{tag}x", f"So {good} and {wrong}", f"{good} {tag}"):
        assert not conforms(its, offered.structured_output, text), text
    result = read(offered.parser(), f"So. {good} {lax}")
    assert [name for name, _ in result.calls] == ["add", "get_weather"]
    alone = ToolOffer(tools=[STRICT, WEATHER], parallel=False)
    once = plan(template, alone, special=special)
    assert conforms(its, once.structured_output, f"So. {good} Done.")
    assert not conforms(its, once.structured_output, f"So. {good} {good}")


def test_no_grammar_is_made_of_functions_that_are_not_strict_or_have_no_tag() -> None:
    assert plan(DEMO_TEMPLATE, ToolOffer(tools=TOOLS)).structured_output is None
    for template in (LLAMA3, "{{ messages }}", "<|python_start|>"):
        offered = plan(template, ToolOffer(tools=[STRICT]))
        assert offered.structured_output is None
        assert not offered.eager


def test_a_grammar_of_the_clients_holds_from_the_first_character() -> None:
    wanted = StructuredOutput.grammar('start: "<think>" "x"')
    alone = plan(QWEN3, ToolOffer(tools=TOOLS), wanted=wanted, prompt="<think>")
    assert alone.structured_output is wanted
    assert read(alone.parser(), "x</think>") == Read("x</think>", [])
    # It may itself be one of reasoning and calls.
    text = f"<think>a</think>{hermes(SUM)}"
    found = read(plan(QWEN3, ToolOffer(tools=TOOLS), wanted=wanted).parser(), text)
    assert found == Read("", [("add", '{"a": 1, "b": 2}')], "a")


def ids_of(its: Tokenizer, tags: Sequence[str]) -> set[int | None]:
    return {its.token_to_id(tag) for tag in tags}


def test_tags_that_are_special_tokens_are_kept() -> None:
    its = tokenizer(QWEN3, special=True)
    kept = plan(QWEN3, ToolOffer(tools=TOOLS), special=True).kept_special_token_ids
    assert set(kept) == ids_of(its, ["<think>", "</think>", "<tool_call>", "</tool_call>"])
    kept = plan(QWEN3, ToolOffer(), special=True).kept_special_token_ids
    assert set(kept) == ids_of(its, ["<think>", "</think>"])
    assert plan(QWEN3, special=False).kept_special_token_ids == ()


def test_what_the_settings_switch_off_is_text() -> None:
    text = f"<think>a</think>{hermes(SUM)}"
    offer = ToolOffer(tools=TOOLS)
    assert read(plan(QWEN3, offer).parser(), text) == Read("", [("add", '{"a": 1, "b": 2}')], "a")
    off = plan(QWEN3, offer, tool_call_parser="none", reasoning_parser="none")
    assert off.is_plain
    assert read(off.parser(), text) == Read(text, [])
    none = plan(QWEN3, ToolOffer(tools=TOOLS, choice="none"))
    assert read(none.parser(), text) == Read(hermes(SUM), [], "a")


@pytest.mark.parametrize(
    ("key", "known"),
    [("tool_call_parser", SYNTAXES), ("reasoning_parser", REASONING_SYNTAXES)],
)
def test_every_syntax_can_be_set_and_is_described(key: str, known: Mapping[str, object]) -> None:
    for name in ("auto", "none", *known):
        check_syntaxes(ChatSection(**{key: name}))
    page = (CHECKOUT / "docs" / "tools.md").read_text()
    assert not [name for name in known if f"`{name}`" not in page]
