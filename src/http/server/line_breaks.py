"""Characters that some readers of server-sent events take for the end of a line.

The standard ends lines at CR and LF alone, which JSON escapes. But a reader that splits its text
as Python's ``str.splitlines`` does also ends them at these, and then has half of an event.
"""

from __future__ import annotations

from typing import Final

# U+2028 and U+2029, which begin with the same two bytes, and U+0085: their UTF-8, and as JSON
# escapes them. In JSON they stand within strings only, and no other character has these bytes.
_SEPARATORS: Final = b"\xe2\x80"
_NEXT_LINE: Final = b"\xc2\x85"
_ESCAPES: Final = (
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
    (_NEXT_LINE, rb"\u0085"),
)


def unbroken(events: bytes) -> bytes:
    """The same events, whose data is JSON, without such characters."""
    if _SEPARATORS in events or _NEXT_LINE in events:
        for character, escape in _ESCAPES:
            events = events.replace(character, escape)
    return events
