"""What stands in a conversation where something was that the model cannot read.

A client that has shown a picture once sends it again with every turn: to refuse it would end the
conversation. So the model is told that something was left out, and what.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
}
_MAX_DETAIL_CHARS: Final = 100
# What names a file or its type; nothing in it ends the placeholder.
_UNFIT: Final = re.compile(r"[^\w ./+-]")


def placeholder(kind: str, details: Sequence[object] = ()) -> str | None:
    """The text that stands for a part of this type; ``None`` for one that nobody knows.

    ``details`` are what a client said of it: those that are texts are named.
    """
    what = _KINDS.get(kind)
    if what is None:
        return None
    named = [
        shown
        for detail in details
        if isinstance(detail, str) and (shown := _UNFIT.sub("", detail)[:_MAX_DETAIL_CHARS].strip())
    ]
    told = f" ({', '.join(named)})" if named else ""
    return f"[{what}{told} was left out here: this model reads text only.]"


def block_text(block: Mapping[str, Any]) -> str | None:
    """What stands for an image or a document of Anthropic's: its text, where it has one.

    ``None`` for a block of another type.
    """
    kind = block.get("type")
    if kind not in ("image", "document"):
        return None
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    title = block.get("title")
    data = source.get("data")
    if kind == "document" and source.get("type") == "text" and isinstance(data, str):
        return f"{title}\n\n{data}" if isinstance(title, str) and title else data
    return placeholder(kind, (title, source.get("media_type")))
