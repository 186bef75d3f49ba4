"""Every endpoint that computes has a span, of a name that docs/observability.md lists."""

from src.core.settings import CHECKOUT
from src.http.endpoints import ENDPOINTS
from src.http.server.tracing import OPERATIONS

PAGE = (CHECKOUT / "docs" / "observability.md").read_text()
# Groups of endpoints that ask the model, and those that do not.
COMPUTING = {"Generation", "Embeddings", "Ranks"}
OTHERS = {"Debug", "Description", "Health", "Load", "Models", "Page", "Responses", "Tokens"}


def test_every_group_of_endpoints_is_known() -> None:
    assert {entry.tag for entry in ENDPOINTS} == COMPUTING | OTHERS


def test_every_endpoint_that_computes_has_a_span() -> None:
    computing = [entry for entry in ENDPOINTS if entry.tag in COMPUTING]
    assert set(OPERATIONS) == {entry.path for entry in computing}
    assert {entry.method for entry in computing} == {"POST"}


def test_the_names_of_spans_are_documented() -> None:
    assert [name for name in OPERATIONS.values() if f"`{name} {{model}}`" not in PAGE] == []
