"""The page's forms for vectors, ranks and labels in a real Chromium; `nox -s page` runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.http.playground.browsing import demo_server, open_browser
from tests.http.processes import ServerProcess
from tests.support.classifiers import make_classifier
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules

pytestmark = pytest.mark.timeout(240)

TEXTS = ["a happy dog", "a glad puppy", "the market fell"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = make_encoder(tmp_path_factory.mktemp("encoder") / "tiny", "bert")
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling={"pooling_mode": "mean"})
    yield from serving(directory)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("classifier") / "tiny"
    yield from serving(make_classifier(directory, "bert"))


def serving(directory: Path) -> Iterator[ServerProcess]:
    with demo_server(SLIPSTREAM_MODEL=str(directory)) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1360, "height": 860})
    context.set_default_timeout(30_000)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    # Chromium says of every answer over 399 that a resource failed to load.
    page.on(
        "console",
        lambda said: None if "Failed to load" in said.text else faults.append(said.text),
    )
    yield page
    context.close()
    assert not faults


def open_view(page: Page, server: ServerProcess, name: str) -> None:
    page.goto(server.url)
    page.click(f"#tab-{name}")
    expect(page.locator(f"#tab-{name}")).to_have_attribute("aria-selected", "true")


def fill(page: Page, **texts: str) -> None:
    for name, text in texts.items():
        page.fill(f".task [name={name}]", text)
    page.click(".task-foot .primary")


def shown(page: Page) -> list[list[str]]:
    """The cells of the table that is shown, row by row."""
    expect(page.locator(".task tbody tr").first).to_be_visible()
    rows = page.locator(".task tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


def asked(server: ServerProcess, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}/{path}", json=body, timeout=60).raise_for_status().json()


def number(text: str) -> float:
    return float(text.replace("\u2212", "-"))


def test_a_model_that_only_reads_has_no_chat(page: Page, encoder: ServerProcess) -> None:
    page.goto(encoder.url)
    tabs = page.locator("#views [role=tab]")
    expect(tabs).to_have_text(["Embed", "Compare", "Rerank"])
    expect(page.locator("#tasks h2")).to_have_text("A text as a vector")
    for name in ("#question", "#new", "#settings-button", "#turns"):
        expect(page.locator(name)).to_be_hidden()
    assert page.locator("#skip").get_attribute("href") == "#embed-text"
    tabs.first.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tab-rerank")).to_be_focused()
    expect(page.locator("#tasks")).to_have_attribute("aria-label", "Rerank")
    expect(page.locator("#panel")).to_contain_text("Tokens per second")


def test_a_text_is_shown_as_its_vector(page: Page, encoder: ServerProcess) -> None:
    open_view(page, encoder, "embed")
    fill(page, text=TEXTS[0])
    vector = asked(encoder, "v1/embeddings", input=TEXTS[0])["data"][0]["embedding"]
    expect(page.locator(".facts dd").first).to_have_text(str(len(vector)))
    numbers = [number(text) for text in page.locator(".numbers-text").inner_text().split()]
    np.testing.assert_allclose(numbers, vector[:12], atol=6e-5)
    expect(page.locator(".task [role=status]")).to_contain_text(" tokens, ")
    page.click(".code-head button")
    expect(page.locator(".code-head button")).to_have_text("Copied")
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    np.testing.assert_allclose(copied, vector, rtol=1e-6)


def test_texts_are_compared(page: Page, encoder: ServerProcess) -> None:
    open_view(page, encoder, "compare")
    fill(page, texts="\n".join(["", *TEXTS, "  "]))
    data = asked(encoder, "v1/embeddings", input=TEXTS)["data"]
    vectors = np.array([item["embedding"] for item in data])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = shown(page)
    assert [name.split("  ")[-1].strip() for name, *_ in rows] == [
        f"{i} {text}" for i, text in enumerate(TEXTS, 1)
    ]
    cosines = [[number(cell) for cell in cells] for _, *cells in rows]
    np.testing.assert_allclose(cosines, vectors @ vectors.T, atol=0.0051)


def test_documents_are_ranked(page: Page, encoder: ServerProcess) -> None:
    open_view(page, encoder, "rerank")
    fill(page, query="dogs", documents="\n".join(TEXTS))
    results = asked(encoder, "rerank", query="dogs", documents=TEXTS)["results"]
    rows = shown(page)
    assert [row[-1] for row in rows] == [one["document"]["text"] for one in results]
    scores = [number(row[0]) for row in rows]
    np.testing.assert_allclose(scores, [one["relevance_score"] for one in results], atol=6e-5)
    # Kept over a reload, as the settings are.
    page.reload()
    page.click("#tab-rerank")
    expect(page.locator("#rerank-query")).to_have_value("dogs")


def test_labels_are_shown_with_their_names(page: Page, classifier: ServerProcess) -> None:
    page.goto(classifier.url)
    # One view needs no tabs.
    expect(page.locator("#tasks h2")).to_have_text("Labels of a text")
    expect(page.locator("#views")).to_be_hidden()
    fill(page, text=TEXTS[0])
    labels = asked(classifier, "predict", inputs=TEXTS[0])
    assert [(row[-1], number(row[0])) for row in shown(page)] == [
        (one["label"], pytest.approx(one["score"], abs=6e-5)) for one in labels
    ]
    assert {one["label"] for one in labels} == {"kind 0", "kind 1", "kind 2"}


def test_what_is_wrong_is_said_where_it_is(page: Page, encoder: ServerProcess) -> None:
    open_view(page, encoder, "compare")
    fill(page, texts="one alone")
    expect(page.locator("#compare-texts-problem")).to_contain_text("there are 1")
    expect(page.locator("#compare-texts")).to_have_attribute("aria-invalid", "true")
    page.click("#tab-embed")
    fill(page, text="x" * 2000)
    expect(page.locator(".task > .problem")).to_contain_text("tokens")
    expect(page.locator(".task-result")).to_be_empty()
    # And the next one is answered.
    fill(page, text="x")
    expect(page.locator(".facts")).to_be_visible()
    expect(page.locator(".task > .problem")).to_be_hidden()


def test_a_chat_goes_on_beside_the_other_views(page: Page) -> None:
    with demo_server() as server:
        server.wait_ready()
        page.goto(server.url)
        expect(page.locator("#views [role=tab]")).to_have_text(["Chat", "Embed", "Compare"])
        page.fill("#question", "Tell me a story about a fox.")
        page.press("#question", "Enter")
        page.click("#tab-embed")
        expect(page.locator("#question")).to_be_hidden()
        fill(page, text=TEXTS[0])
        expect(page.locator(".facts")).to_be_visible()
        page.click("#tab-chat")
        expect(page.locator(".assistant:not(.busy) .text")).not_to_be_empty()
        expect(page.locator("#settings-button")).to_be_visible()
        assert page.locator("#skip").get_attribute("href") == "#question"


def test_a_model_without_a_form_is_told_of(page: Page, encoder: ServerProcess) -> None:
    def only_tokens(route: Any) -> None:
        body = route.fetch().json()
        body["data"][0]["tasks"] = ["token_classify"]
        route.fulfill(json=body)

    page.route("**/v1/models", only_tokens)
    page.goto(encoder.url)
    expect(page.locator("#tasks")).to_contain_text("no form for what this model does")
    expect(page.locator("#tasks")).to_contain_text("token_classify")
    expect(page.locator("#question")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_and_operated(
    page: Page, encoder: ServerProcess, scheme: str
) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    for name in ("embed", "rerank", "compare"):
        open_view(page, encoder, name)
        page.evaluate("scheme => document.documentElement.dataset.theme = scheme", scheme)
        page.click(".task-foot .quiet")
        page.click(".task-foot .primary")
        expect(page.locator(".task-result")).not_to_be_empty()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, textarea, a')]
              .filter(node => !(node.ariaLabel || node.textContent.trim() || node.labels?.length))
              .map(node => node.outerHTML)"""
        )
        assert not nameless
    # WCAG 2.2, 1.4.3: a contrast of 4.5 to 1 at least, whatever the cosine.
    for heat in range(6):
        ink, back = page.evaluate(
            """heat => {
              const cell = document.querySelector('.matrix td:not(:first-child)');
              cell.className = `heat${heat}`;
              const canvas = new OffscreenCanvas(1, 1)
                .getContext('2d', { willReadFrequently: true });
              const drawn = colour => {
                canvas.fillStyle = getComputedStyle(document.body).backgroundColor;
                canvas.fillRect(0, 0, 1, 1);
                canvas.fillStyle = colour;
                canvas.fillRect(0, 0, 1, 1);
                return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
              };
              const { color, backgroundColor } = getComputedStyle(cell);
              return [drawn(color), drawn(backgroundColor)];
            }""",
            heat,
        )
        dark, light = sorted((luminance(ink), luminance(back)))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (heat, ink, back)


def luminance(colour: list[int]) -> float:
    shares = [part / 255 for part in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
