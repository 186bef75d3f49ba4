"""The page at ``/`` in a real Chromium, against servers of the demo model.

Not collected with the other tests: `nox -s page` runs it where Chromium is on PATH.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.http.playground.browsing import answered, ask, demo_server, open_browser
from tests.http.processes import ServerProcess

pytestmark = pytest.mark.timeout(240)

STORY = "Tell me a story about a fox."
LONG = {"min_tokens": 900, "ignore_eos": True}
KEY, ADMIN = "sk-reader-0123456789", "sk-admin-0123456789"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with demo_server() as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def locked() -> Iterator[ServerProcess]:
    keys = {"SLIPSTREAM_HTTP__API_KEYS": KEY, "SLIPSTREAM_HTTP__ADMIN_KEY": ADMIN}
    with demo_server(**keys) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def faults() -> list[str]:
    """What the browser complained of: errors of scripts, and what the policy refused."""
    return []


@pytest.fixture
def page(browser: Browser, faults: list[str]) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1360, "height": 860})
    context.set_default_timeout(30_000)
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if is_fault(said.text) else None)
    yield page
    context.close()
    assert not faults


def is_fault(text: str) -> bool:
    # Chromium says of every answer over 399 that a resource failed to load.
    return "Failed to load resource" not in text


def open_page(page: Page, server: ServerProcess, settings: dict[str, str] | None = None) -> None:
    """Open it with these fields filled in; temperature 0 unless they say otherwise."""
    kept = json.dumps({"temperature": "0", **(settings or {})})
    page.add_init_script(f"localStorage['slipstream.settings'] ??= {json.dumps(kept)}")
    page.goto(server.url)
    expect(page.locator("#model")).to_have_value("demo")


def value_of(server: ServerProcess, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)}\S* (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert found is not None, sample
    return float(found[1])


def said_by_api(server: ServerProcess, content: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    text: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return text


def test_it_loads_and_shows_the_engine(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#panel")).to_contain_text("Prefix hits")
    expect(page.locator("#panel")).to_contain_text("Weights")
    # This server was started without an admin key.
    expect(page.locator("#panel")).to_contain_text("was started without one")
    page.goto(f"{server.url}/docs")
    expect(page.locator("h1")).to_contain_text("Slipstream")


def test_an_answer_is_streamed_and_traced(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    page.evaluate(
        """() => {
          window.lengths = new Set();
          const text = () => document.querySelector('.assistant .text')?.innerText ?? '';
          const observer = new MutationObserver(() => window.lengths.add(text().length));
          observer.observe(document.querySelector('#turns'), { childList: true, subtree: true });
        }"""
    )
    ask(page, STORY)
    assert answered(page) == said_by_api(server, STORY)
    assert page.evaluate("window.lengths.size") > 5
    trace = page.locator(".trace")
    expect(trace).to_contain_text("tokens/s")
    trace.locator("summary").click()
    # Nobody else asked, so the growth of the metrics is this request's.
    expect(trace).to_contain_text("from its metrics")
    expect(trace).to_contain_text("Prefill")
    assert page.locator(".trace-bar rect").count() == 3


def test_the_button_stops_the_request(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    sample = 'vllm:request_success_total{engine="0",finished_reason="abort"'
    before = value_of(server, sample)
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=longer(route)))
    ask(page, STORY)
    expect(page.locator(".assistant.busy .text")).to_contain_text("fox")
    page.click("#stop")
    text = answered(page)
    expect(page.locator(".note")).to_have_text("Stopped.")
    expect(page.locator("#send")).to_be_visible()
    page.wait_for_timeout(300)
    assert page.locator(".assistant .text").inner_text() == text
    assert value_of(server, sample) == before + 1
    assert value_of(server, "vllm:num_requests_running") == 0


def longer(route: Any) -> str:
    return json.dumps({**json.loads(route.request.post_data), **LONG})


def test_an_error_is_said_and_the_page_goes_on(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    ask(page, "fox " * 3000)
    answered(page)
    said = page.locator(".note.bad")
    expect(said).to_contain_text("maximum context length is 1024 tokens")
    page.locator(".user .actions button").click()
    page.locator(".user textarea").fill("What is 17 + 25?")
    page.locator(".user textarea").press("Enter")
    assert answered(page) == "17 + 25 = 42."
    expect(said).to_have_count(0)


def test_a_restart_is_survived(page: Page) -> None:
    with demo_server() as first:
        first.wait_ready()
        open_page(page, first)
        ask(page, "What is 17 + 25?")
        answered(page)
        page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=longer(route)))
        ask(page, STORY)
        expect(page.locator(".assistant.busy .text").last).to_contain_text("fox")
        port = first.port
    expect(page.locator(".note.bad")).to_have_text("The connection ended before the answer did.")
    expect(page.locator("#notice")).to_contain_text("does not answer")
    expect(page.locator("#status")).to_have_text("no answer")
    page.unroute("**/v1/chat/completions")
    with demo_server(port) as second:
        expect(page.locator("#notice")).to_contain_text("is back", timeout=90_000)
        expect(page.locator("#status")).to_have_text("ready", timeout=90_000)
        page.get_by_role("button", name="Try again").click()
        answered(page, 2)
        assert page.locator(".note.bad").count() == 0
        expect(page.locator(".user")).to_have_count(2)
        page.reload()
        expect(page.locator(".assistant")).to_have_count(2)
        assert value_of(second, "vllm:prompt_tokens_total") > 0


def test_a_schema_forms_the_answer(page: Page, server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["fox", "bear"]}, "legs": {"type": "integer"}},
        "required": ["kind", "legs"],
        "additionalProperties": False,
    }
    open_page(page, server)
    page.click("#settings-button")
    page.fill("#field-schema", "{")
    ask(page, STORY)
    expect(page.locator("#field-schema-problem")).to_contain_text("no JSON")
    expect(page.locator("#field-schema")).to_be_focused()
    assert page.locator(".turn").count() == 0
    assert page.input_value("#question") == STORY
    page.fill("#field-schema", json.dumps(schema))
    ask(page, STORY)
    found = json.loads(answered(page))
    assert found["kind"] in ("fox", "bear")
    assert isinstance(found["legs"], int)


def test_a_tool_is_called_and_answered(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    page.click("#settings-button")
    page.locator(".field", has=page.locator("#field-tools")).get_by_role("button").click()
    ask(page, "How is the weather in Chicago today?")
    expect(page.locator(".call-head")).to_have_text("Calls get_weather")
    expect(page.locator(".call pre")).to_contain_text('"city": "Chicago"')
    page.get_by_label("Result of get_weather").fill("sunny, 21 degrees")
    page.get_by_role("button", name="Send the result").click()
    assert answered(page, 2) == "It is sunny in Chicago with 21 degrees."
    expect(page.locator(".turn.result pre")).to_have_text("sunny, 21 degrees")


def test_reasoning_is_folded_and_an_error_in_a_stream_is_said(
    page: Page, server: ServerProcess
) -> None:
    open_page(page, server)
    pieces = [{"role": "assistant", "content": ""}, {"reasoning": "I think <b>"}]
    pieces += [{"reasoning": " hard."}, {"content": "It is **so**"}]
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": d}]} for d in pieces]
    events.append({"error": {"message": "the engine died", "code": "engine_dead"}})
    body = "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in events)
    kind = "text/event-stream; charset=utf-8"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type=kind))
    ask(page, STORY)
    assert answered(page) == "It is so"
    expect(page.locator(".note.bad")).to_have_text("the engine died")
    thought = page.locator(".thought")
    expect(thought).to_be_hidden()
    page.get_by_text("Reasoning").click()
    expect(thought).to_have_text("I think <b> hard.")
    # What was cut off is sent as it stands, without the reasoning.
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Go on.")
    assert json.loads(asked.value.post_data or "")["messages"][1:] == [
        {"role": "assistant", "content": "It is **so**"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_however_they_are_cut(page: Page, server: ServerProcess, size: int) -> None:
    open_page(page, server)
    text = "data: ä\n\n: a comment\n\ndata: b\r\ndata:c\r\n\r\nevent: x\ndata: [DONE]\n\ndata: cut"
    read = page.evaluate(
        """async ([text, size]) => {
          const { events } = await import('./playground/sse.js');
          const bytes = new TextEncoder().encode(text);
          const parts = [];
          for (let i = 0; i < bytes.length; i += size) parts.push(bytes.slice(i, i + size));
          const found = [];
          for await (const data of events(ReadableStream.from?.(parts) ?? new Blob(parts).stream()))
            found.push(data);
          return found;
        }""",
        [text, size],
    )
    assert read == ["ä", "b\nc", "[DONE]"]


def test_sampling_fields_are_sent_as_typed(page: Page, server: ServerProcess) -> None:
    typed = {"temperature": "0.5", "top_p": "0.9", "top_k": "5", "min_p": "0.1", "max_tokens": "7"}
    typed |= {"seed": "3", "stop": "owl\n\\n", "presence_penalty": "0.1", "system": "Be short."}
    typed |= {"frequency_penalty": "-0.1", "repetition_penalty": "1.1"}
    open_page(page, server, typed)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, STORY)
    answered(page)
    body = json.loads(asked.value.post_data or "")
    assert body["stop"] == ["owl", "\n"]
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    for name in set(typed) - {"stop", "system"}:
        assert body[name] == float(typed[name])
    assert "logprobs" not in body
    page.click("#settings-button")
    page.fill("#field-top_k", "1.5")
    ask(page, STORY)
    expect(page.locator("#field-top_k-problem")).to_contain_text("whole number")


def test_tokens_are_coloured_by_their_probability(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    page.check("#colours")
    ask(page, STORY)
    answered(page)
    logprobs = said_with_logprobs(server)
    tokens = page.locator(".tokens .token")
    assert tokens.all_inner_texts() == [entry["token"] for entry in logprobs]
    expect(tokens.last).to_have_class(re.compile("^token p4 (together )?after$"))
    classes = [
        str(one).split()[1] for one in tokens.evaluate_all("all => all.map(t => t.className)")
    ]
    least = [{"p4": 0.95, "p3": 0.7, "p2": 0.4, "p1": 0.15, "p0": 0.0}[name] for name in classes]
    for entry, bound in zip(logprobs, least, strict=True):
        assert 2.718281828459045 ** entry["logprob"] > bound - 0.01
    assert len(set(classes)) > 1
    tokens.nth(3).hover()
    card = page.locator(".alternatives")
    expect(card).to_be_visible()
    assert card.locator(".row").count() == 5
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(4)).to_have_class(re.compile("active"))
    page.uncheck("#colours")
    assert page.locator(".assistant .text > p").inner_text() == said_by_api(server, STORY)


def scored_chunk(text: str, **fields: Any) -> dict[str, Any]:
    """A chunk of one token for each character, each sure."""
    entries = [
        {"token": each, "bytes": list(each.encode()), "logprob": 0.0, "top_logprobs": []}
        for each in text
    ]
    delta = {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "logprobs": {"content": entries}, **fields}]}


def test_tokens_of_one_step_are_marked_however_they_come(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    page.check("#colours")
    usage = {"prompt_tokens": 3, "completion_tokens": 9}
    events = [
        # Three steps in one chunk, the last of which goes on in the next one.
        scored_chunk("abcde", step_starts=[0, 1, 4]),
        scored_chunk("fg", step_starts=[1]),
        # Of a server that says nothing.
        scored_chunk("hi"),
        {"choices": [], "usage": usage},
    ]
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    body = "".join([*lines, "data: [DONE]\n\n"])
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, STORY)
    assert json.loads(asked.value.post_data or "")["stream_options"]["include_steps"] is True
    answered(page)
    marks = page.locator(".tokens .token").evaluate_all(
        "all => all.map(t => ['together', 'first'].map(c => +t.classList.contains(c)).join(''))"
    )
    assert marks == ["00", "11", "10", "10", "11", "10", "00", "00", "00"]
    page.locator(".trace summary").click()
    expect(page.locator(".trace-table")).to_contain_text("4, 2.3 tokens in each")


def test_answers_that_were_guessed_take_fewer_steps(page: Page) -> None:
    # What was said before is guessed.
    kept = {"SLIPSTREAM_SPECULATION__SHARED_HISTORY_BYTES": "1048576"}
    with demo_server(**kept) as server:
        server.wait_ready()
        open_page(page, server)
        page.check("#colours")
        for count in range(1, 4):
            ask(page, STORY)
            answered(page, 1)
            if count < 3:
                page.click("#new")
        assert page.locator(".tokens .together").count() > 3
        page.locator(".trace summary").click()
        row = page.locator(".trace-table tr", has_text="Steps").inner_text()
        found = re.search(r"([0-9.]+) tokens in each", row)
        assert found is not None, row
        assert float(found[1]) > 1


def test_the_panel_says_how_many_guesses_are_accepted(page: Page, server: ServerProcess) -> None:
    looks = 0

    def grown(route: Any) -> None:
        nonlocal looks
        looks += 1
        text = re.sub(r"(?m)^vllm:spec_decode.*\n", "", route.fetch().text())
        for name, each in (("draft_tokens", 10), ("accepted_tokens", 6), ("drafts", 4)):
            text += f"vllm:spec_decode_num_{name}_total {looks * each}\n"
        route.fulfill(body=text, content_type="text/plain")

    page.route("**/metrics", grown)
    open_page(page, server)
    expect(page.locator("#panel")).to_contain_text(
        "60 % of them right: 1.5 accepted in each step of a row that had some"
    )


def said_with_logprobs(server: ServerProcess) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": STORY}], "temperature": 0, "logprobs": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    entries: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
    # The token that ends the answer has no text.
    return entries


def test_a_key_is_asked_for_and_kept_in_this_tab(page: Page, locked: ServerProcess) -> None:
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(locked.url)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    dialog.get_by_label("API key").fill("sk-wrong")
    dialog.get_by_role("button", name="Use").click()
    expect(page.locator("#keys-problem")).to_contain_text("this is no API key")
    dialog.get_by_label("API key").fill(KEY)
    dialog.get_by_role("button", name="Use").click()
    expect(page.locator("#model")).to_have_value("demo")
    expect(page.locator("#panel")).to_contain_text("needs the admin key")
    ask(page, "What is 17 + 25?")
    answered(page)
    page.get_by_role("button", name="Enter the admin key").click()
    dialog.get_by_label("Admin key").fill(ADMIN)
    dialog.get_by_role("button", name="Use").click()
    expect(page.locator(".timeline")).to_be_visible()
    ask(page, STORY)
    answered(page, 2)
    page.locator(".trace summary").last.click()
    expect(page.locator(".trace").last).to_contain_text("from its record")
    kept = page.evaluate("JSON.stringify([localStorage, document.cookie])")
    for key in (KEY, ADMIN):
        assert key not in kept
        assert not [address for address in addresses if key in address]
    page.reload()
    expect(page.locator("#model")).to_have_value("demo")
    other = page.context.new_page()
    other.goto(locked.url)
    expect(other.get_by_role("dialog")).to_be_visible()


MARKDOWN = [
    ("<img src=x onerror=alert(1)> &", "<p>&lt;img src=x onerror=alert(1)&gt; &amp;</p>"),
    ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
    # Nor is it a link where an address stands further on.
    (
        "[a](javascript:alert(1)//https://e.org)",
        "<p>[a](javascript:alert(1)//https://e.org)</p>",
    ),
    ("**bold** *soft*", "<p><strong>bold</strong> <em>soft</em></p>"),
    ("`x<y` ~~no~~", "<p><code>x&lt;y</code> <del>no</del></p>"),
    ("a * b * c and snake_case_name", "<p>a * b * c and snake_case_name</p>"),
    ("**a** b **c**", "<p><strong>a</strong> b <strong>c</strong></p>"),
    ("***d***", "<p><strong><em>d</em></strong></p>"),
    ("**no end *e* ** ~~ `x", "<p>**no end <em>e</em> ** ~~ `x</p>"),
    ("``a`b`` [a] (b) [c](d)", "<p><code>a`b</code> [a] (b) [c](d)</p>"),
    (
        "see https://e.org/a.b?c=d.",
        '<p>see <a href="https://e.org/a.b?c=d" target="_blank" rel="noopener noreferrer">'
        "https://e.org/a.b?c=d</a>.</p>",
    ),
    (
        "|a|b|\n|:-|-:|\n|c|*d*|",
        '<div class="wide" tabindex="0" role="region" aria-label="Table"><table><thead><tr>'
        '<th scope="col">a</th><th scope="col">b</th></tr></thead><tbody><tr><td>c</td>'
        "<td><em>d</em></td></tr></tbody></table></div>",
    ),
    ("## Head ##", "<h4>Head</h4>"),
    ("## Head", "<h4>Head</h4>"),
    ("- one\n- two\n  - deep", "<ul><li>one</li><li>two<ul><li>deep</li></ul></li></ul>"),
    ("3. three\n4. four", '<ol start="3"><li>three</li><li>four</li></ol>'),
    ("> said\n> twice", "<blockquote><p>said\ntwice</p></blockquote>"),
    ("---", "<hr>"),
    (
        "[a](https://e.org/(x))",
        '<p><a href="https://e.org/(x)" target="_blank" rel="noopener noreferrer">a</a></p>',
    ),
]  # fmt: skip


def test_markdown_becomes_elements_and_html_stays_text(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    made = page.evaluate(
        """async texts => {
          const { blocks, render } = await import('./playground/markdown.js');
          return texts.map(text => blocks(text).map(block => render(block).outerHTML).join(''));
        }""",
        [text for text, _ in MARKDOWN],
    )
    assert made == [html for _, html in MARKDOWN]
    code = page.evaluate(
        """async text => {
          const { blocks, render } = await import('./playground/markdown.js');
          return blocks(text).map(block => render(block).querySelector('pre')?.textContent ?? null);
        }""",
        "say\n```py\nif a < b:\n\n    <script>\n```\nand\n~~~\nopen",
    )
    assert code == [None, "if a < b:\n\n    <script>", None, "open"]


# What could be looked for again from every place of a text, or nested without end.
HOSTILE_LENGTH = 60_000
HOSTILE = {
    "ticks": "`" * (HOSTILE_LENGTH // 2) + "a" * (HOSTILE_LENGTH // 2),
    "ticks of all lengths": " ".join("`" * i for i in range(1, 340)),
    "brackets": "[" * HOSTILE_LENGTH,
    "brackets and a target": "[" * (HOSTILE_LENGTH // 2) + "](" + "a" * (HOSTILE_LENGTH // 2),
    "targets": "[](a" * (HOSTILE_LENGTH // 4),
    "strong": "**a " * (HOSTILE_LENGTH // 4),
    "strong and underlined": "**__" * (HOSTILE_LENGTH // 8) + "x" + "__**" * (HOSTILE_LENGTH // 8),
    "stars": "*" * HOSTILE_LENGTH,
    "lines": "_" * HOSTILE_LENGTH + "a",
    "struck": "~~a" + " ~~" * (HOSTILE_LENGTH // 3),
    "emphasis": "*a _b " * (HOSTILE_LENGTH // 6),
    "addresses": "http://" * (HOSTILE_LENGTH // 7) + "." * 1000,
    "dots": ("http://" + "." * 60 + " ") * (HOSTILE_LENGTH // 70),
    "a heading with spaces": "# a" + " " * HOSTILE_LENGTH + "b",
    "a heading with signs": "# a" + "#" * HOSTILE_LENGTH + "b",
    "spaces before a table": " " * HOSTILE_LENGTH + "a\n---",
    "under a head": "a|b\n" + "---" + " " * HOSTILE_LENGTH + "x",
    "quotes": ">" * HOSTILE_LENGTH + " a",
    "items": "- " + "a" * (HOSTILE_LENGTH // 2) + "\n- b" * (HOSTILE_LENGTH // 8),
    "an item with another end": "- " + " " * HOSTILE_LENGTH + "a\u2028",
    "deep items": "\n".join(" " * 2 * i + "- a" for i in range(240)),
    "a rule": "-" + "   -" * (HOSTILE_LENGTH // 4) + "x",
    "fences": "```\n~~~\n" * (HOSTILE_LENGTH // 8),
}


def test_no_answer_keeps_the_page_busy(page: Page, server: ServerProcess) -> None:
    """Milliseconds, in which a quadratic search of such texts takes minutes."""
    open_page(page, server)
    taken = page.evaluate(
        """async texts => {
          const { blocks, render } = await import('./playground/markdown.js');
          return texts.map(text => {
            const begun = performance.now();
            blocks(text).map(block => render(block));
            return performance.now() - begun;
          });
        }""",
        list(HOSTILE.values()),
    )
    slow = {name: one for name, one in zip(HOSTILE, taken, strict=True) if one > 1000}
    assert not slow


def test_a_conversation_is_kept_cleared_and_brought_back(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    ask(page, "What is 17 + 25?")
    answered(page)
    page.get_by_role("button", name="Regenerate").click()
    answered(page)
    page.reload()
    expect(page.locator(".assistant .text")).to_have_text("17 + 25 = 42.")
    page.get_by_role("button", name="New").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".assistant .text")).to_have_text("17 + 25 = 42.")


def test_nothing_is_asked_while_the_page_is_hidden(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    expect(page.locator("#panel")).to_contain_text("Running")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert 2 <= len(asked) <= 8
    page.evaluate(
        """() => {
          Object.defineProperty(document, 'hidden', { get: () => window.away, configurable: true });
          window.away = true;
          document.dispatchEvent(new Event('visibilitychange'));
        }"""
    )
    page.wait_for_timeout(500)
    asked.clear()
    page.wait_for_timeout(2500)
    assert not asked
    page.evaluate(
        "() => { window.away = false; document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.wait_for_timeout(1000)
    assert asked


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_phone_has_room_for_it(page: Page, server: ServerProcess, path: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    open_page(page, server)
    ask(page, STORY)
    answered(page)
    if path == "/":
        for name in ("settings", "engine"):
            page.click(f"#{name}-button")
            expect(page.locator(f"#{name}")).to_be_visible()
            page.keyboard.press("Escape")
            expect(page.locator(f"#{name}")).to_be_hidden()
            expect(page.locator(f"#{name}-button")).to_be_focused()
    else:
        page.goto(server.url + path)
        for summary in page.locator("details > summary").all():
            summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_everything_that_is_operated_has_a_name(page: Page, server: ServerProcess) -> None:
    open_page(page, server)
    page.click("#settings-button")
    ask(page, "What is 17 + 25?")
    answered(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, a')]
          .filter(node => !(node.ariaLabel || node.textContent.trim() || node.labels?.length))
          .map(node => node.outerHTML)"""
    )
    assert not nameless


# Text and what it stands on, by the names of custom properties of the style sheet.
PAIRS = [
    *(("ink", name) for name in ("paper", "card", "sunk", "tint")),
    *(("soft", name) for name in ("paper", "card", "sunk")),
    *(("accent", name) for name in ("paper", "card", "tint")),
    *(("bad", name) for name in ("card", "bad-tint")),
    ("on-accent", "accent"),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(page: Page, server: ServerProcess, scheme: str) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5 to 1 at least."""
    open_page(page, server)
    page.evaluate("scheme => document.documentElement.dataset.theme = scheme", scheme)
    colour = """([property, value]) => {
      const node = document.createElement('i');
      document.body.append(node);
      node.style.setProperty(property, value);
      return getComputedStyle(node)[property === 'color' ? 'color' : 'backgroundColor'];
    }"""
    for front, back in PAIRS:
        pair = [page.evaluate(colour, ["color", f"var(--{name})"]) for name in (front, back)]
        assert contrast(*pair) >= 4.5, (front, back, pair)
    page.check("#colours")
    ink = page.evaluate(colour, ["color", "var(--ink)"])
    for shade in page.locator("#legend .token").all()[1:]:
        back = shade.evaluate("node => getComputedStyle(node).backgroundColor")
        assert contrast(ink, back) >= 4.5, back


def contrast(*colours: str) -> float:
    dark, light = sorted(luminance(colour) for colour in colours)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
