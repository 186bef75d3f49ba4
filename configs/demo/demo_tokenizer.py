"""The tokenizer of the demo model, its chat template, and the same rendering in plain Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_tools import signature, tool_call_text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIALS = (BOS, END, PAD, *(f"<|{role}|>" for role in ROLES))
CALLS = ("<tool_call>", "</tool_call>")  # tokens of their own, but text: they must not be skipped
VOCAB_SIZE = 2048
MAX_LENGTH = 1024

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}
            {%- if part is string -%}{{- part -}}
            {%- elif part.text is defined -%}{{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set leads = messages and messages[0].role in ['system', 'developer'] -%}
{%- if tools -%}
    {{- '<|system|>' -}}
    {%- if leads -%}{{- text(messages[0].content) + '\\n' -}}{%- endif -%}
    {{- 'Tools:' -}}
    {%- for tool in tools -%}
        {%- set function = tool.function if tool.function is defined else tool -%}
        {{- '\\n' + function.name + '(' -}}
        {%- if function.parameters and function.parameters.properties -%}
            {%- for name, spec in function.parameters.properties.items() -%}
                {{- name + ': ' -}}
                {{- spec.type if spec.type is string else 'any' -}}
                {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
            {%- endfor -%}
        {%- endif -%}
        {{- ')' -}}
        {%- if function.description -%}{{- ' - ' + function.description -}}{%- endif -%}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role in ['system', 'developer'] -%}
        {%- if not (tools and loop.first) -%}
            {{- '<|system|>' + text(message.content) + '<|end|>' -}}
        {%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {{- '<|assistant|>' + text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function is defined else call -%}
            {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
            {%- if function.arguments is string -%}{{- function.arguments -}}
            {%- else -%}{{- function.arguments | tojson -}}
            {%- endif -%}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|end|>' -}}
    {%- elif message.role in ['user', 'tool'] -%}
        {{- '<|' + message.role + '|>' + text(message.content) + '<|end|>' -}}
    {%- else -%}
        {{- raise_exception('Unknown role: ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """What the chat template makes of a plain conversation, only faster: for training."""
    out, messages = [BOS], list(messages)
    if tools:
        lead = (
            messages.pop(0)["content"] + "\n"
            if messages and messages[0]["role"] == "system"
            else ""
        )
        out.append(f"<|system|>{lead}Tools:\n" + "\n".join(map(signature, tools)) + END)
    for message in messages:
        text = message.get("content") or ""
        for call in message.get("tool_calls") or ():
            function = call["function"]
            text += ("\n" if text else "") + tool_call_text(function["name"], function["arguments"])
        out.append(f"<|{message['role']}|>{text}{END}")
    return "".join(out)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE with one token per digit, so that numbers are read and written by place."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CALLS),
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(call, special=False, normalized=False) for call in CALLS])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that holds the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
