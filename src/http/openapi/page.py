"""The OpenAPI document as one page of plain HTML, without a script."""

from __future__ import annotations

from html import escape
from typing import Any, Final

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: black; background: white }
summary { cursor: pointer; padding: .3rem 0 }
details { border-bottom: 1px solid #ddd }
code { font-size: 13px }
.method { display: inline-block; width: 3.5rem; font-weight: 600; color: royalblue }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem }
td, th { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0;
  border-top: 1px solid #eee }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: black }
  details, td, th { border-color: dimgray } a, .method { color: lightskyblue } }
"""

# Constraints in the order in which they are shown, and how.
_SHOWN: Final = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} entries"),
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
        f"<h2>{escape(tag)}</h2>{''.join(operations)}" for tag, operations in tags.items()
    )
    schemas = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"{_schema_body(schema)}</details>"
        for name, schema in document["components"]["schemas"].items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f"<p>{escape(info['description'])} "
        f'<a href="openapi.json">openapi.json</a></p>{groups}<h2>Types</h2>{schemas}</body></html>'
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(p['name'])}</code></td><td>in the {p['in']}</td>"
        f"<td>{_type(p['schema'])}</td></tr>"
        for p in operation.get("parameters", ())
    ]
    parts = [f"<table>{''.join(rows)}</table>"] if rows else []
    if "requestBody" in operation:
        parts.append(f"<p>Body: {_content(operation['requestBody']['content'])}</p>")
    answers = "".join(
        f"<tr><td>{status}</td><td>{_response(answer)}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    return (
        f'<details><summary><span class="method">{method.upper()}</span> '
        f"<code>{escape(path)}</code> {escape(operation['summary'])}</summary>"
        f"{''.join(parts)}<table>{answers}</table></details>"
    )


def _response(answer: dict[str, Any]) -> str:
    if "$ref" in answer:
        name = "AnthropicErrorBody" if "Anthropic" in answer["$ref"] else "ErrorBody"
        return _type({"$ref": name})
    return f"{escape(answer['description'])}: {_content(answer['content'])}"


def _content(content: dict[str, Any]) -> str:
    return ", ".join(f"{escape(kind)} {_type(media['schema'])}" for kind, media in content.items())


def _schema_body(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}</td>"
        f"<td>{_type(field)}</td><td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<p>{escape(schema.get('description', ''))}</p><table>{rows}</table>"


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
