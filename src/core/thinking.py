"""What a model's thinking is told from its answer by, and how long it may be."""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The thinking at the beginning of an output. Stop strings do not count before it has ended.

    Attributes
    ----------
    openings, closings
        The tags around it, of which the first ones are the usual ones. White space may stand before
        an opening one. An output that begins with something else has no thinking.
    ends_before
        What ends it too, without being a tag: it is part of the answer.
    is_open
        Whether the prompt has opened it.
    budget
        Tokens of thinking at most; ``None`` for any number. When they are spent, the first closing
        tag is written, whatever the model would have: the tags are none of these tokens. Where the
        model has just begun to write that tag by itself, it is completed.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    ends_before: tuple[str, ...] = ()
    is_open: bool = False
    budget: int | None = None
