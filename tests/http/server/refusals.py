"""A table of requests that must be refused, field by field, as the bytes that a client may send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"

# A good request of each endpoint, to which one bad field is added.
GOOD: Final[dict[str, dict[str, Any]]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    RESPONSES: {"input": "hello", "max_output_tokens": 16},
    TOKENIZE: {"prompt": "hello"},
    DETOKENIZE: {"tokens": [40]},
}
# Written out as they are: the first three are no JSON, whatever Python's own writer says.
NO_JSON: Final = ("NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "0x10", "1_000", "nul")
HUGE: Final = str(10**30)
ENDLESS: Final = "9" * 5000
TOO_LARGE_FLOAT: Final = "1e999"

WRONG_NUMBERS: Final = ('"1"', "[]", "{}", "[1]", "true", '""')
WRONG_TEXTS: Final = ("1", "[]", "{}", "true", "1.5")
WRONG_TRUTHS: Final = ("0", "1", '"true"', "[]", "{}", "1.5")
WRONG_LISTS: Final = ("1", "true", '{"a": 1}')

INTEGERS: Final = (
    *("n", "max_tokens", "max_completion_tokens", "seed", "top_k", "min_tokens", "priority"),
    *("best_of", "prompt_logprobs", "truncate_prompt_tokens"),
)
NUMBERS: Final = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "timeout", "top_n_sigma", "typical_p"),
)
TRUTHS: Final = (
    *("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    *("spaces_between_special_tokens", "add_special_tokens", "return_tokens_as_token_ids", "echo"),
)
LISTS: Final = ("stop_token_ids", "allowed_token_ids", "bad_words")
BOUNDS: Final[dict[str, tuple[str, ...]]] = {
    "n": ("0", "-1", "129"),
    "max_tokens": ("-1", "100000"),
    "temperature": ("-0.1", "2.1"),
    "top_p": ("-0.1", "-1", "1.1"),
    "min_p": ("-0.1", "1.1"),
    "top_n_sigma": ("-0.1", "-1", "100.1"),
    "typical_p": ("-0.1", "1.1"),
    "top_k": ("-2",),
    "presence_penalty": ("-2.1", "2.1"),
    "frequency_penalty": ("-2.1", "2.1"),
    "repetition_penalty": ("0", "-1"),
    "min_tokens": ("-1", "100000"),
    "prompt_logprobs": ("-1", "21"),
    "timeout": ("0", "-1"),
    "best_of": ("2", "0"),
    "stop": ('""', '["a", ""]', '["a", 1]', '[["a"]]'),
    "stop_token_ids": ("[-1]", "[1.5]", '["a"]', "[true]", "[null]", f"[{HUGE}]"),
    "allowed_token_ids": ("[]", "[-1]", "[1.5]", '["a"]', "[100000]"),
    "bad_words": ('[""]', "[1]", "[null]"),
    "logit_bias": (
        '{"a": 1}',
        '{"1": "x"}',
        '{"1": 101}',
        '{"-1": 1}',
        '{"1": null}',
        '{"1.5": 1}',
    ),
    "stream_options": ('{"include_usage": 1}', '"x"', "[]"),
}


class Refusal(NamedTuple):
    """A request that is 400; ``param`` is the field, or ``None`` where none is to blame."""

    path: str
    body: bytes
    param: str | None


def with_field(path: str, field: str, value: str) -> bytes:
    """A good request with one more field, whose value is written as it is."""
    rest = {name: given for name, given in GOOD[path].items() if name != field}
    return f'{json.dumps(rest)[:-1]}, "{field}": {value}}}'.encode()


def _wrong_kinds() -> Iterator[tuple[str, str]]:
    for fields, values in (
        (INTEGERS, (*WRONG_NUMBERS, "1.5", HUGE, f"-{HUGE}", ENDLESS)),
        (NUMBERS, (*WRONG_NUMBERS, f"-{HUGE}", f"-{ENDLESS}")),
        (TRUTHS, WRONG_TRUTHS),
        (LISTS, (*WRONG_LISTS, '"a"')),
        (("stop",), ("1", "true", '{"a": 1}')),
        (("logit_bias",), ("1", "[]", '"a"')),
        (("model", "cache_salt"), WRONG_TEXTS),
    ):
        for field in fields:
            for value in values:
                yield field, value


def _fields() -> Iterator[Refusal]:
    bounds = ((field, value) for field, values in BOUNDS.items() for value in values)
    for field, value in (*_wrong_kinds(), *bounds):
        for path in (COMPLETIONS, CHAT):
            if (path, field) != (COMPLETIONS, "max_completion_tokens"):
                yield Refusal(path, with_field(path, field, value), field)


def _no_json() -> Iterator[Refusal]:
    for path in GOOD:
        for value in NO_JSON:
            yield Refusal(path, with_field(path, "temperature", value), None)
        for body in (
            *(b"", b" ", b"{", b"[", b"{]", b"}", b"nonsense", b'"text', b"{'a': 1}", b"\x00"),
            *(b'{"a": 1,}', b'{"a" 1}', b'\xff\xfe{"a": 1}', b"\xef\xbb\xbf"),
            *(
                json.dumps(GOOD[path])[:-1].encode() + b', "\xff": 1}',
                b'{"prompt": "\\ud800"}',
                json.dumps(GOOD[path]).encode() + b" {}",
            ),
            *(b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "\\x00"}', b'{"prompt": "\n"}'),
            *(b'{"a": ' + bracket * 10_000 for bracket in (b"[", b'{"a":')),
            *(b"[]", b"1", b"null", b"true", b'"text"', b"[{}]"),
        ):
            yield Refusal(path, body, None)


def _chats() -> Iterator[Refusal]:
    """Messages, tools and the like: the first part of what is blamed, and the value."""
    user = '{"role":"user"}'
    for field, value in (
        *(
            ("messages", value)
            for value in ("null", "[]", "{}", "1", '"x"', "[1]", "[null]", "[[]]")
        ),
        *(
            ("messages", f"[{message}]")
            for message in (
                "{}",
                '{"role": "user"}',
                '{"content": "x"}',
                '{"role": null, "content": "x"}',
                '{"role": "wizard", "content": "x"}',
                '{"role": 1, "content": "x"}',
                '{"role": "User", "content": "x"}',
                '{"role": "user", "content": 1}',
                '{"role": "user", "content": {}}',
                '{"role": "user", "content": [1]}',
                '{"role": "user", "content": [{}]}',
                '{"role": "user", "content": [{"type": "text"}]}',
                '{"role": "user", "content": [{"type": "text", "text": 1}]}',
                '{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}',
                '{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}',
                '{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}',
                '{"role": "user", "content": [{"type": "file", "file": {"file_id": "../x"}}]}',
                '{"role": "user", "content": null}',
                '{"role": "tool", "tool_call_id": 1}',
                '{"role": "assistant", "tool_calls": {}}',
                '{"role": "assistant", "tool_calls": [1]}',
                '{"role": "assistant", "tool_calls": [{}]}',
                '{"role": "user", "content": "x", "name": 1}',
                '{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}',
                '{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}',
                '{"role": "assistant", "audio": {"id": "x"}}',
            )
        ),
        ("messages", f"[{','.join([user] * 4097)}]"),
        *(
            ("tools", value)
            for value in (
                "1",
                "{}",
                "[1]",
                "[{}]",
                '[{"type": "function"}]',
                '[{"function": {}}]',
                '[{"function": {"name": 1}}]',
                '[{"function": {"name": "f", "parameters": 1}}]',
                '[{"type": "code_interpreter"}]',
                '[{"function": {"name": "f", "description": 1}}]',
            )
        ),
        *(("tool_choice", value) for value in ('"sometimes"', "1", "[]", '{"type": "function"}')),
        *(("top_logprobs", value) for value in ("-1", "21", "5", '"1"', HUGE)),
        *(("logprobs", value) for value in ("1", '"true"', "[]")),
        *(
            ("chat_template_kwargs", value)
            for value in ("1", "[]", '{"messages": []}', '{"tools": []}')
        ),
        *(("documents", value) for value in ("1", "{}", "[1]")),
        *(("parallel_tool_calls", value) for value in ("1", '"no"')),
    ):
        yield Refusal(CHAT, with_field(CHAT, field, value), field)


def _prompts() -> Iterator[Refusal]:
    for value in (
        *("null", "1", "true", "{}", "[]", "[[]]", "[1.5]", "[true]", "[null]"),
        *('[1, "a"]', '["a", 1]', "[[1], 2]", '[[1], ["a"]]', "[[[1]]]", "[-1]", f"[{HUGE}]"),
        *("[1000000]", json.dumps(["a"] * 9), json.dumps([5] * 1024), json.dumps("word " * 4000)),
    ):
        yield Refusal(COMPLETIONS, with_field(COMPLETIONS, "prompt", value), "prompt")
    for value in ("-1", "21", '"1"', "true", "1.5", HUGE):
        yield Refusal(COMPLETIONS, with_field(COMPLETIONS, "logprobs", value), "logprobs")
    for value in ('"end"', "1", "[]"):
        yield Refusal(COMPLETIONS, with_field(COMPLETIONS, "suffix", value), "suffix")


REFUSALS: Final = (*_fields(), *_chats(), *_prompts(), *_no_json())
