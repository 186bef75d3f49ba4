"""Every endpoint, field and error code stands in docs/api.md, metrics in observability.md."""

import re

import pytest

from src.core.settings import CHECKOUT
from src.http.application import ENDPOINTS
from src.http.errors import _FAULTS, _KINDS
from src.http.protocol import chat
from src.http.protocol.chat import ChatRequest
from src.http.protocol.completions import CompletionRequest
from src.http.protocol.generation import NEUTRAL
from src.observability.metrics import EngineMetrics

PAGE = (CHECKOUT / "docs" / "api.md").read_text()


@pytest.mark.parametrize(("path", "method"), [entry[:2] for entry in ENDPOINTS])
def test_every_endpoint_has_a_row(path: str, method: str) -> None:
    name = re.escape(path.replace(":path", ""))
    rows = re.findall(rf"^\| `{name}` \| ([A-Z, ]+) \|", PAGE, re.MULTILINE)
    assert method in ", ".join(rows).split(", ")


def test_every_field_of_a_request_is_described() -> None:
    fields = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    assert not [field for field in fields if f"`{field}`" not in PAGE]


def test_the_bounds_of_lists_are_those_that_hold() -> None:
    bounds = (
        f"At most {chat.MAX_MESSAGES} messages, {chat.MAX_CONTENT_PARTS} content parts and "
        f"{chat.MAX_TOOL_CALLS} tool calls in a message, {chat.MAX_MESSAGES} of both in "
        f"all, {chat.MAX_TOOLS} tools and {chat.MAX_DOCUMENTS} documents"
    )
    assert bounds in PAGE.replace("\n", " ")


def test_every_refused_field_is_listed() -> None:
    refused = PAGE.partition("## What is refused")[2].partition("## Errors")[0]
    assert not [field for field in NEUTRAL if f"`{field}`" not in refused]


def test_every_error_code_is_listed() -> None:
    codes = {code for _, _, _, code in _KINDS if code} | {code for _, code, _ in _FAULTS}
    # `unavailable` stands for kinds that are to come.
    assert not [code for code in codes - {"unavailable"} if f"`{code}`" not in PAGE]


def test_every_metric_has_a_row() -> None:
    page = (CHECKOUT / "docs" / "observability.md").read_text()
    text = EngineMetrics("demo", legacy_names=True).render()[0].decode()
    names = {
        name
        for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        if name.startswith(("vllm:", "slipstream_"))
    }
    assert len(names) > 50
    assert not [name for name in names if f"`{name}`" not in page]
    documented = set(re.findall(r"^\| `((?:vllm:|slipstream_)\w+)` \| \w+ \|", page, re.MULTILINE))
    assert documented <= names
