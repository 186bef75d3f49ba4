"""What stands in a conversation where something was that the model cannot read.

A client that has shown a picture once sends it again with every turn: to refuse it would end the
conversation. So the model is told that something was left out, and what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

# Types of parts, as the protocols name them.
_KINDS: Final = {
    "image": "An image",
    "image_url": "An image",
    "input_image": "An image",
    "document": "A document",
    "file": "A file",
    "input_file": "A file",
    "input_audio": "A recording",
    "audio_url": "A recording",
    "video_url": "A video",
    "computer_screenshot": "A screenshot",
    "container_upload": "A file",
    "compaction": "A summary of earlier turns",
}
_MAX_DETAIL_CHARS: Final = 100
# What names a file or its type; nothing in it ends the placeholder.
_UNFIT: Final = re.compile(r"[^\w ./+-]")


def is_media(kind: str) -> bool:
    """Whether a part of this type is something that the model cannot read."""
    return kind in _KINDS


def placeholder(kind: str, details: Sequence[object] = ()) -> str | None:
    """The text that stands for a part of this type; ``None`` for one that nobody knows.

    ``details`` are what a client said of it: those that are texts are named.
    """
    what = _KINDS.get(kind)
    if what is None:
        return None
    named = [shown for detail in details if isinstance(detail, str) and (shown := _shown(detail))]
    told = f" ({', '.join(named)})" if named else ""
    return f"[{what}{told} was left out here: this model reads text only.]"


def _shown(detail: str) -> str:
    # Cut first: a client may send a name of megabytes.
    return _UNFIT.sub("", detail[: 4 * _MAX_DETAIL_CHARS])[:_MAX_DETAIL_CHARS].strip()


def block_text(block: Mapping[str, Any]) -> str | None:
    """What stands for a block of Anthropic's that is no text: its text, where it has one.

    ``None`` for a block of another type.
    """
    kind = block.get("type")
    if not isinstance(kind, str) or not is_media(kind):
        return None
    content = block.get("content")
    if kind == "compaction" and isinstance(content, str) and content:
        return content
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    title = block.get("title")
    data = source.get("data")
    if kind == "document" and source.get("type") == "text" and isinstance(data, str):
        return f"{title}\n\n{data}" if isinstance(title, str) and title else data
    if kind == "document" and source.get("type") == "content":
        texts = list(_texts_of(source.get("content")))
        return "\n\n".join([title, *texts] if isinstance(title, str) and title else texts)
    return placeholder(kind, (title, source.get("media_type")))


def _texts_of(content: object) -> Iterator[str]:
    """The texts of a document that is a text, or a list of texts and images."""
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        text = part.get("text") if part.get("type") == "text" else block_text(part)
        if isinstance(text, str):
            yield text
