"""What a model's thinking is told from its answer by, and how long it may be."""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The thinking at the beginning of an output. Stop strings do not count before it has ended.

    Attributes
    ----------
    opening, closing
        The tags around it. White space may stand before the opening one. An output that begins
        with something else has no thinking.
    is_open
        Whether the prompt has opened it.
    budget
        Tokens of thinking at most; ``None`` for any number. When they are spent, the closing tag is
        written, whatever the model would have: the tags are none of these tokens. Where the model
        has just begun to write the closing tag by itself, that is completed.
    """

    opening: str
    closing: str
    is_open: bool = False
    budget: int | None = None
