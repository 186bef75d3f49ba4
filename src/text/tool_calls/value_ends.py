"""Where a value ends that stands between tags as bare text, and may hold such tags itself.

Nothing is escaped there, and models leave tags out. So one look ahead decides, of a bounded length,
which makes no difference between a text that comes in pieces and one that is there:

- At a closing tag of the value's own, if a tag follows that may follow it. With other text behind
  it, it is a part of the value.
- At the tag of the next argument, where that begins a line: the closing tag was left out.
- At a tag that closes the function or the call, where that begins a line and a call follows, or
  no more than `MAX_AHEAD` characters of text to the end of the answer without a closing tag that
  would end the value. With more text behind it such a call is lost: the value has no end.
- At any closing tag behind which nothing comes but closing tags and the end of the answer.

A call that is quoted in the value, as in a file about tools, keeps its own tags. Where what follows
shows that it cannot be told whose an argument is, the value has no end: no call is better than one
with wrong arguments. Under a grammar
nothing is left out or quoted: there a value ends at its closing tag with exactly what the grammar
writes behind it, and white space between (`GAP_PATTERN`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from src.text.source import SPACE, Source, Steps
from src.text.tool_calls.python_values import NAME_RUN

KEY_RUN: Final = re.compile(r"[^<>\r\n]*")
MAX_AHEAD: Final = 1024
"""How far behind a tag that closes the call the value's own closing tag is looked for."""
MAX_GAP: Final = 64
"""White space between two tags that are looked at together."""
GAP_PATTERN: Final = rf"[ \t\r\n]{{0,{MAX_GAP}}}"
"""That white space, as a regular expression of a grammar."""
_MAX_NAME: Final = 256


class ValueTags(NamedTuple):
    """The tags around the values of a syntax.

    Attributes
    ----------
    closers
        What closes a value, then what closes that which it stands in, up to the call.
    openers
        What opens each of these.
    argument, behind_key
        What stands before the name of the next argument and behind it.
    on_lines
        Whether a value has lines of its own: a line break at either end is not part of it. Else
        the next argument may follow without a line break too.
    """

    closers: tuple[str, ...]
    openers: tuple[str, ...]
    argument: str
    behind_key: str
    on_lines: bool

    @property
    def closer(self) -> str:
        """What closes a value."""
        return self.closers[0]

    @property
    def calls(self) -> tuple[str, ...]:
        """What begins a call."""
        return self.openers[1:]

    @property
    def all(self) -> tuple[str, ...]:
        """All tags that are looked at in a value."""
        return tuple(dict.fromkeys((*self.closers, *self.openers, self.argument)))


class ValueEnd:
    """Finds the end of one value.

    Parameters
    ----------
    source
        The answer's text, behind the tag before the value.
    tags
        The tags of the syntax.
    takes
        Whether an argument of this name may come next, by the name and whether it begins a line.
    is_wrapped
        Whether the outermost tag has opened the call, so that its end is expected too.
    is_made_up
        Whether the function has no such argument, and the value before it was not closed: then text
        behind a closing tag shows that it was no argument, and the value has no end.
    is_exact
        Whether a grammar writes the tags.
    """

    def __init__(
        self,
        source: Source,
        tags: ValueTags,
        takes: Callable[[str, bool], bool],
        *,
        is_wrapped: bool,
        is_made_up: bool = False,
        is_exact: bool = False,
    ) -> None:
        self._source = source
        self._tags = tags
        self._takes = takes
        self._is_wrapped = is_wrapped
        self._is_made_up = is_made_up
        self._is_exact = is_exact
        # How many of each kind are open within the value.
        self._quoted = [0] * len(tags.closers)
        # How many of these openings are seen to begin a call, and not only named in a text.
        self._open_calls = 0
        # Whether a tag of a quoted call would have been this call's, were that not open; or the
        # call seemed to be over, with more text behind it than is looked at.
        self._is_in_doubt = False

    def up_to(self) -> Steps[bool]:
        """Consume the value and not the tag behind it; say whether there is one."""
        source, tags = self._source, self._tags
        while tag := (yield from source.up_to((tags.closer,) if self._is_exact else tags.all)):
            if self._is_exact:
                if (yield from source.ahead(self._is_closed_by_grammar())):
                    return True
            elif (yield from self._ends_at(tag)):
                # A quoted call that is still open was none, or is not whole: then what looked like
                # its arguments may have been this call's.
                return not (self._is_in_doubt and self._open_calls)
            if tag == tags.closer and self._is_made_up and not self._quoted[0]:
                return False
            yield from source.expect(tag)
        return False

    def _ends_at(self, tag: str) -> Steps[bool]:
        tags, source, quoted = self._tags, self._source, self._quoted
        if tag in tags.closers:
            return (yield from self._ends_at_closer(tags.closers.index(tag)))
        is_in_call = self._open_calls > 0
        if tag == tags.openers[0] and is_in_call:
            quoted[0] = 1
        elif tag == tags.argument and not is_in_call:
            begins_line = source.begins_line
            if begins_line or not tags.on_lines:
                return (yield from source.ahead(self._is_argument(begins_line=begins_line)))
        elif tag in tags.calls:
            level = tags.openers.index(tag)
            is_call = yield from source.ahead(self._is_call(level))
            if is_call or level + 1 == len(tags.openers):
                quoted[level] += 1
            if is_call and level == 1:
                self._open_calls += 1
        return False

    def _ends_at_closer(self, level: int) -> Steps[bool]:
        source, quoted = self._source, self._quoted
        if level == 0 and not quoted[0]:
            return (yield from source.ahead(self._is_closed()))
        if (yield from source.ahead(self._is_closed_without(level))):
            return True
        if level == 0 and not self._is_in_doubt:
            self._is_in_doubt = yield from source.ahead(self._is_closed_before_argument())
        if quoted[level]:
            quoted[level] -= 1
            if level == 1:
                quoted[0] = 0
                self._open_calls = max(self._open_calls - 1, 0)
        return False

    def _is_closed_by_grammar(self) -> Steps[bool]:
        source, tags = self._source, self._tags
        yield from source.expect(tags.closer)
        yield from source.run(SPACE, MAX_GAP)
        expected: tuple[str, ...] = (tags.argument, tags.closers[1])
        found = yield from source.starts_with_any(expected)
        for closer in tags.closers[2:] if found == tags.closers[1] else ():
            yield from source.run(SPACE, MAX_GAP)
            expected = (closer,)
            found = yield from source.starts_with_any(expected)
            if not found:
                break
        # What is cut short there shows no tags either.
        return bool(found) or source.ends_within(expected)

    def _is_closed(self) -> Steps[bool]:
        """Whether what follows the value's closing tag may follow it."""
        source, tags = self._source, self._tags
        yield from source.expect(tags.closer)
        yield from source.run(SPACE, MAX_GAP)
        expected = (tags.argument, *tags.closers[1:], *tags.calls)
        found = yield from source.starts_with_any(expected)
        if found in tags.closers[1:-1] and self._is_wrapped:
            # XML has such elements too; the call is closed after its function, which some models
            # close twice.
            yield from source.run(SPACE, MAX_GAP)
            expected = (*tags.closers[tags.closers.index(found) :], *tags.calls)
            found = yield from source.starts_with_any(expected)
        return bool(found) or source.ends_within(expected)

    def _is_closed_before_argument(self) -> Steps[bool]:
        """Whether the value's closing tag has an argument behind it that may come next."""
        source, tags = self._source, self._tags
        yield from source.expect(tags.closer)
        yield from source.run(SPACE, MAX_GAP)
        if (yield from source.starts_with(tags.argument)):
            return (yield from self._takes_key(begins_line=False))
        return False

    def _is_closed_without(self, level: int) -> Steps[bool]:
        """Whether the closing tag of this level ends a value that is not closed itself."""
        source, tags = self._source, self._tags
        begins_line = source.begins_line
        yield from source.expect(tags.closers[level])
        left = tags.closers[level + 1 :]
        found = ""
        while True:
            yield from source.run(SPACE, MAX_GAP)
            closer = yield from source.starts_with_any(left)
            if not closer:
                break
            found, left = closer, left[left.index(closer) + 1 :]
        if not (yield from source.peek()):
            return not source.is_cut_short
        if self._quoted[level]:
            return False
        opener = yield from source.starts_with_any(tags.calls)
        if opener and (yield from self._has_call(tags.openers.index(opener))):
            return True
        is_whole = found or level + 1 == len(tags.closers) or not self._is_wrapped
        return bool(begins_line and is_whole) and not (yield from self._goes_on())

    def _goes_on(self) -> Steps[bool]:
        """Whether a value with text behind a tag that closes the call is not over.

        Its own closing tag says so, or it may still come.
        """
        source, tags = self._source, self._tags
        sought = (tags.closer, *tags.calls)
        while tag := (yield from source.up_to(sought, MAX_AHEAD - source.looked_ahead)):
            if tag == tags.closer:
                if (yield from self._is_closed()):
                    return True
            elif (yield from self._is_call(tags.openers.index(tag))):
                return False
        if source.looked_ahead >= MAX_AHEAD:
            # That it goes on is a guess: if a call is all that follows, no value is better.
            self._is_in_doubt = True
            return True
        return source.is_cut_short

    def _is_argument(self, *, begins_line: bool) -> Steps[bool]:
        """Whether the tag of an argument is that of the next one."""
        source, tags = self._source, self._tags
        yield from source.expect(tags.argument)
        if not (yield from self._takes_key(begins_line=begins_line)):
            return False
        if begins_line or tags.on_lines:
            return True
        # Within a line a name between tags is text, unless a value begins behind it.
        yield from source.run(SPACE, MAX_GAP)
        return (yield from source.starts_with(tags.openers[0]))

    def _takes_key(self, *, begins_line: bool) -> Steps[bool]:
        """Consume an argument's name and its tag; say whether it may come next."""
        source = self._source
        key = (yield from source.run(KEY_RUN, _MAX_NAME)).strip()
        is_tag = yield from source.starts_with(self._tags.behind_key)
        return is_tag and self._takes(key, begins_line)

    def _is_call(self, level: int) -> Steps[bool]:
        """Whether a tag that begins a call has a call behind it, as far as can be seen."""
        yield from self._source.expect(self._tags.openers[level])
        return (yield from self._has_call(level))

    def _has_call(self, level: int) -> Steps[bool]:
        """Whether the rest of a call comes behind the tag that begins it."""
        source, tags = self._source, self._tags
        yield from source.run(NAME_RUN, _MAX_NAME)
        yield from source.starts_with(">")
        yield from source.run(SPACE, MAX_GAP)
        expected = (tags.argument, tags.closers[level], *tags.openers[1:level], "{")
        return bool((yield from source.starts_with_any(expected)))
