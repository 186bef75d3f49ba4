"""The OpenAPI document as one page of plain HTML, without a script."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape
from typing import Any, Final

from src.http.openapi.wording import html

_STYLE: Final = """
:root { color-scheme: light dark;
  --paper: light-dark(#f7f7f5, #0f1215); --card: light-dark(#ffffff, #191c21);
  --sunk: light-dark(#efefec, #0b0d0f); --ink: light-dark(#1b1d22, #e8eaed);
  --soft: light-dark(#585d68, #a3a9b4); --line: light-dark(#dcdcd7, #2c3038);
  --accent: light-dark(#0f766e, #5fd3c4); --get: light-dark(#e2f1ee, #16302d);
  --post: light-dark(#ebe6f8, #2a2346); --delete: light-dark(#fbe9e7, #3a1c1a) }
* { box-sizing: border-box }
html { scroll-padding-top: 1rem }
body { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem 5rem; color: var(--ink);
  background: var(--paper); overflow-wrap: break-word; font: 16px/1.6 system-ui, -apple-system,
  "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", sans-serif }
h1 { margin: 0; font-size: 1.75rem; letter-spacing: -.02em }
h1 small { color: var(--soft); font-size: 1rem; font-weight: 400; letter-spacing: 0 }
h2 { margin: 2.25rem 0 .6rem; font-size: 1.0625rem }
a { color: var(--accent) }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
summary:focus-visible { outline-offset: -3px }
.lead { margin: .3rem 0 1rem; color: var(--soft) }
nav { display: flex; flex-wrap: wrap; gap: .4rem }
nav a { padding: .1rem .7rem; border: 1px solid var(--line); border-radius: 99px;
  background: var(--card); font-size: .875rem; text-decoration: none }
code { font: .875em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
p code, td code, .what code { padding: .1em .3em; border-radius: 5px; background: var(--sunk) }
.group { overflow: hidden; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card) }
details + details { border-top: 1px solid var(--line) }
summary { display: grid; grid-template-columns: 4.75rem minmax(0, 19rem) minmax(0, 1fr) auto;
  gap: .15rem .9rem; align-items: baseline; padding: .5rem .9rem; cursor: pointer;
  list-style: none }
summary::-webkit-details-marker { display: none }
summary:hover, details[open] > summary { background: var(--sunk) }
.types summary { grid-template-columns: minmax(0, 19rem) minmax(0, 1fr) }
.method { padding: .1rem 0; border-radius: 6px; font-size: .75rem; font-weight: 700;
  letter-spacing: .04em; text-align: center }
.get { background: var(--get) } .post { background: var(--post) }
.delete { background: var(--delete) }
.path { font-weight: 600 }
.what, .needs { color: var(--soft); font-size: .9375rem }
.needs { padding: 0 .5rem; border: 1px solid var(--line); border-radius: 99px; font-size: .75rem;
  white-space: nowrap }
.inside { padding: .25rem .9rem .9rem; overflow-x: auto }
.inside p { margin: .5rem 0 }
h3 { margin: .9rem 0 .2rem; color: var(--soft); font-size: .8125rem }
table { width: 100%; border-collapse: collapse; font-size: .9375rem }
td { padding: .3rem .9rem .3rem 0; border-top: 1px solid var(--line); text-align: left;
  vertical-align: top }
tr:first-child td { border-top: 0 }
td:first-child { width: 14rem; white-space: nowrap }
.status td:first-child { width: 14rem; white-space: normal; font-variant-numeric: tabular-nums }
@media (max-width: 760px) {
  body { padding: 1.25rem .75rem 3rem }
  summary { grid-template-columns: 4.75rem minmax(0, 1fr) auto }
  .types summary { grid-template-columns: minmax(0, 1fr) }
  .method { grid-row: 1 / span 2; align-self: start }
  .what { grid-column: 2 / -1; grid-row: 2 }
  .types .what { grid-column: 1 }
  tr { display: block; padding: .35rem 0; border-top: 1px solid var(--line) }
  tr:first-child { border-top: 0 }
  td, td:first-child, .status td:first-child { display: block; width: auto; padding: 0; border: 0;
    white-space: normal }
}
"""
# How the page's policy names this one style sheet.
STYLE_HASH: Final = "sha256-" + b64encode(sha256(_STYLE.encode()).digest()).decode()
_NEEDS: Final = {"admin": "admin key", "bearer": "key", "header": "key"}

# Constraints in the order in which they are shown, and how.
_SHOWN: Final = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("minLength", "{} or more characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "{} or more entries"),
    ("maxItems", "at most {} entries"),
    ("maxProperties", "at most {} entries"),
    ("pattern", "matches {}"),
)


def page(document: dict[str, Any]) -> str:
    """The whole page."""
    info = document["info"]
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            shown = _operation(path, method, operation)
            tags.setdefault(operation["tags"][0], []).append(shown)
    groups = "".join(
        f'<h2 id="of{escape(tag)}">{escape(tag)}</h2><div class="group">{"".join(shown)}</div>'
        for tag, shown in tags.items()
    )
    links = "".join(f'<a href="#of{escape(tag)}">{escape(tag)}</a>' for tag in (*tags, "Types"))
    chat = '<a href="./">Chat</a> · ' if "/" in document["paths"] else ""
    schemas = "".join(
        _named_schema(name, schema) for name, schema in document["components"]["schemas"].items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>"
        f'<p class="lead">{html(info["description"])} {chat}'
        f'<a href="openapi.json">openapi.json</a></p><nav aria-label="Groups">{links}</nav>'
        f'<main>{groups}<h2 id="ofTypes">Types</h2><div class="group types">{schemas}</div></main>'
        "</body></html>"
    )


def _named_schema(name: str, schema: dict[str, Any]) -> str:
    # The anchor is inside, so that browsers open what a link leads to.
    about, _, more = schema.get("description", "").partition("\n\n")
    return (
        f'<details><summary><code class="path">{escape(name)}</code> '
        f'<span class="what">{html(about)}</span></summary>'
        f'<div class="inside" id="{escape(name)}">{_schema_body(schema, more)}</div></details>'
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(p['name'])}</code></td><td>in the {p['in']}</td>"
        f"<td>{_type(p['schema'])}</td></tr>"
        for p in operation.get("parameters", ())
    ]
    parts = [f"<h3>Parameters</h3><table>{''.join(rows)}</table>"] if rows else []
    if "requestBody" in operation:
        parts.append(f"<h3>Body</h3><p>{_content(operation['requestBody']['content'])}</p>")
    # Statuses that are answered alike share a row.
    alike: dict[str, list[str]] = {}
    for status, answer in operation["responses"].items():
        alike.setdefault(_response(answer), []).append(status)
    answers = "".join(
        f"<tr><td>{', '.join(statuses)}</td><td>{answer}</td></tr>"
        for answer, statuses in alike.items()
    )
    parts.append(f'<h3>Answers</h3><table class="status">{answers}</table>')
    needed = {_NEEDS[name] for scheme in operation.get("security", ()) for name in scheme}
    needs = "".join(f'<span class="needs">{name}</span>' for name in needed)
    return (
        f'<details><summary><span class="method {method}">{method.upper()}</span> '
        f'<code class="path">{escape(path)}</code> '
        f'<span class="what">{html(operation["summary"])}</span> {needs}</summary>'
        f'<div class="inside">{"".join(parts)}</div></details>'
    )


def _response(answer: dict[str, Any]) -> str:
    if "$ref" in answer:
        name = "AnthropicErrorBody" if "Anthropic" in answer["$ref"] else "ErrorBody"
        return _type({"$ref": name})
    return f"{escape(answer['description'])}: {_content(answer['content'])}"


def _content(content: dict[str, Any]) -> str:
    return ", ".join(f"{escape(kind)} {_type(media['schema'])}" for kind, media in content.items())


def _schema_body(schema: dict[str, Any], more: str) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' required' if name in required else ''}</td>"
        f"<td>{_type(field)}</td><td>{html(field.get('description', ''))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"{f'<p>{html(more)}</p>' if more else ''}<table>{rows}</table>"


def _type(schema: dict[str, Any]) -> str:
    """One schema in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "anyOf" in schema:
        branches = [branch for branch in schema["anyOf"] if branch != {"type": "null"}]
        return " or ".join(map(_type, branches))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(str(schema['const']))}</code>"
    kind = escape(str(schema.get("type", "anything")))
    if "items" in schema and isinstance(schema["items"], dict):
        kind += f" of {_type(schema['items'])}"
    bounds = [text.format(escape(str(schema[key]))) for key, text in _SHOWN if key in schema]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind
