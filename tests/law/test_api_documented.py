"""Every endpoint, field and error code stands in docs/api.md, metrics in observability.md."""

import re

import msgspec
import pytest

from src.cli.batch_file import URLS
from src.core.settings import CHECKOUT
from src.http.endpoints import ENDPOINTS
from src.http.openapi.bounds import accepted_fields, refused_fields
from src.http.protocol import chat
from src.http.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from src.http.protocol.chat import ChatRequest
from src.http.protocol.cohere import CohereEmbedRequest
from src.http.protocol.completions import CompletionRequest
from src.http.protocol.embeddings import EmbeddingRequest
from src.http.protocol.generation import GenerationRequest
from src.http.protocol.inference import EmbedRequest
from src.http.protocol.messages import CountTokensRequest, MessageRequest
from src.http.protocol.ranks import (
    ClassifyRequest,
    PoolingRequest,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
)
from src.http.protocol.responses import ResponseRequest
from src.http.protocol.tokens import DetokenizeRequest, TokenizeRequest
from src.http.server.body import MAX_DEPTH
from src.http.server.errors import _FAULTS, _KINDS
from src.observability.metrics import EngineMetrics

PAGE = (CHECKOUT / "docs" / "api.md").read_text()


@pytest.mark.parametrize(("path", "method"), [(entry.path, entry.method) for entry in ENDPOINTS])
def test_every_endpoint_has_a_row(path: str, method: str) -> None:
    name = re.escape(path.replace(":path", ""))
    rows = re.findall(rf"^\| `{name}` \| ([A-Z, ]+) \|", PAGE, re.MULTILINE)
    assert method in ", ".join(rows).split(", ")


# Heading -> the request that it describes, and the one whose fields stand elsewhere
TABLES: dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct] | None]] = {
    "Fields of completions and chats": (GenerationRequest, None),
    "`/v1/completions`": (CompletionRequest, GenerationRequest),
    "`/v1/chat/completions`": (ChatRequest, GenerationRequest),
    "`/v1/responses`": (ResponseRequest, None),
    "`/v1/messages`, `/v1/messages/count_tokens`": (MessageRequest, None),
    "`/tokenize`": (TokenizeRequest, None),
    "`/detokenize`": (DetokenizeRequest, None),
    "`/v1/embeddings`": (EmbeddingRequest, None),
    "`/v2/embed`": (CohereEmbedRequest, None),
    "`/embed`": (EmbedRequest, None),
    "`/score`, `/v1/score`": (ScoreRequest, None),
    "`/rerank`, `/v1/rerank`, `/v2/rerank`": (RerankRequest, None),
    "`/classify`": (ClassifyRequest, None),
    "`/predict`": (PredictRequest, None),
    "`/pooling`": (PoolingRequest, None),
    "`/v1/load_lora_adapter`": (LoadAdapterRequest, None),
    "`/v1/unload_lora_adapter`": (UnloadAdapterRequest, None),
}
ROW = re.compile(r"^\| (`[^|]*`) \| (honoured|partly|accepted|refused) \|", re.MULTILINE)


def statuses(heading: str) -> dict[str, str]:
    """Field to status, in the section of this heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    described: dict[str, str] = {}
    for names, status in ROW.findall(section):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in described, f"{name} is described twice"
            described[name] = status
    return described


@pytest.mark.parametrize("heading", TABLES)
def test_every_field_has_its_status(heading: str) -> None:
    kind, elsewhere = TABLES[heading]
    fields = set(kind.__struct_fields__)
    if elsewhere is not None:
        fields -= set(elsewhere.__struct_fields__)
    described = statuses(heading)
    assert set(described) == fields
    refused, accepted = refused_fields(kind), accepted_fields(kind)
    for name, status in described.items():
        if heading == "`/tokenize`" and name == "chat_template":
            assert status == "refused"
        elif name in refused:
            assert status == "refused", name
        elif name in accepted:
            assert status == "accepted", name
        else:
            assert status in ("honoured", "partly"), name


def test_every_request_has_a_table() -> None:
    described = {kind for kind, _ in TABLES.values()} | {CountTokensRequest}
    assert {op.request for op in ENDPOINTS if op.request is not None} <= described


def test_the_bounds_of_lists_are_those_that_hold() -> None:
    bounds = (
        f"At most {chat.MAX_MESSAGES} messages, {chat.MAX_CONTENT_PARTS} content parts and "
        f"{chat.MAX_TOOL_CALLS} tool calls in a message, {chat.MAX_MESSAGES} of both in "
        f"all, {chat.MAX_TOOLS} tools and {chat.MAX_DOCUMENTS} documents"
    )
    assert bounds in PAGE.replace("\n", " ")
    assert f"nested {MAX_DEPTH} levels deep" in PAGE.replace("\n", " ")


def test_every_error_code_is_listed() -> None:
    codes = {code for _, _, _, code in _KINDS if code} | {code for _, code, _ in _FAULTS}
    for path in (CHECKOUT / "src").rglob("*.py"):
        codes.update(re.findall(r'[ (]code="(\w+)"', path.read_text()))
    assert len(codes) > 25
    # `unavailable` stands for kinds that are to come.
    assert not [code for code in codes - {"unavailable"} if f"`{code}`" not in PAGE]


def test_every_url_of_a_batch_is_listed() -> None:
    section = PAGE[PAGE.index("OpenAI's batches") :]
    listed = re.findall(r"`(/[\w/]+)`", section[: section.index("An answer's line")])
    assert listed == list(URLS)


TASKS = (CHECKOUT / "docs" / "tasks.md").read_text()


def test_every_endpoint_of_a_task_beside_text_is_on_its_page() -> None:
    packages = ("src.http.embeddings", "src.http.ranks")
    paths = {op.path for op in ENDPOINTS if op.handler.__module__.startswith(packages)}
    assert len(paths) > 10
    assert not [path for path in paths if f"`{path}`" not in TASKS]


@pytest.mark.parametrize("code", ["answers_full", "invalid_vector", "too_many_values"])
def test_codes_of_tasks_beside_text_are_on_their_page(code: str) -> None:
    assert f"`{code}`" in TASKS


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
