"""The page's files: which there are, and which of them a request without a key may read.

No file holds a secret or a figure: what the page shows it asks the API for, with the reader's key.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
from starlette.types import Scope

from src.core.sampler_parameters import SAMPLER_PARAMETERS

ROOT: Final = "/"
FOLDER: Final = "/playground/"
INDEX: Final = "index.html"

_WEB: Final = Path(__file__).with_name("web")
_KINDS: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_SCRIPTS: Final = (
    *("api", "chat", "conversation", "elements", "fields", "main", "markdown", "metrics"),
    *("notice", "panel", "ranks", "sheets", "sse", "store", "tasks", "timeline", "tokens", "trace"),
    *("turn", "vectors", "watch"),
)
# Made of the table of sampler parameters; the others are files.
PARAMETERS: Final = "parameters.js"
# Names under FOLDER. A request names one of these; no path is ever built from anything else.
NAMES: Final = frozenset(
    {"style.css", "icon.svg", PARAMETERS, *(f"{name}.js" for name in _SCRIPTS)}
)


class File(msgspec.Struct, frozen=True):
    """One file as it is sent."""

    content: bytes
    kind: bytes
    etag: bytes


@cache
def load(name: str) -> File:
    """The file of this name, one of `NAMES` or `INDEX`; read when first asked for."""
    content = _parameters() if name == PARAMETERS else (_WEB / name).read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:32]
    return File(content, _KINDS[Path(name).suffix], f'"{digest}"'.encode())


def _parameters() -> bytes:
    """A module with the fields of the form that are sampler parameters."""
    fields = [
        {
            "name": each.name,
            "label": each.label,
            "least": each.low if each.shown_low is None else each.shown_low,
            "most": each.high if each.shown_high is None else each.shown_high,
            "step": each.step,
            "hint": each.hint,
        }
        for each in SAMPLER_PARAMETERS
    ]
    return b"export const PARAMETERS = " + msgspec.json.encode(fields) + b";\n"


def is_page_request(scope: Scope, path: str) -> bool:
    """Whether a request reads the page or one of its files.

    ``path`` is the path as the router sees it. A browser that opens an address can send no key, so
    these are read without one. Other programs get no page at ``/``.
    """
    if scope["method"] not in ("GET", "HEAD"):
        return False
    if path == ROOT:
        return wants_html(scope)
    return path.startswith(FOLDER) and path[len(FOLDER) :] in NAMES


def wants_html(scope: Scope) -> bool:
    """Whether the client names HTML as something it takes, as browsers do."""
    for name, value in scope["headers"]:
        if name == b"accept" and any(map(_is_html, value.lower().split(b","))):
            return True
    return False


def _is_html(media: bytes) -> bool:
    kind, *parameters = (part.strip() for part in media.split(b";"))
    if kind != b"text/html":
        return False
    # A weight of 0 means "not this one" (RFC 9110, section 12.4.2).
    weights = [part[2:] for part in parameters if part.startswith(b"q=")]
    return not any(weight.strip(b"0.") == b"" for weight in weights)
