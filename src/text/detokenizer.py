"""Token ids to text, as they come.

Definition of the text of an output
-----------------------------------
The text of output ``O`` after prompt ``P`` is the decoding of ``P + O`` without the text that ``P``
alone had made certain. So a SentencePiece-style first token keeps the space that stands before it
in the whole text (prompt and text can be joined), and loses it only where nothing visible stands
before it. A character whose first bytes are the end of the prompt belongs to the output, unless
that stands alone: a text with a form of its own has the form that its own tokens spell.

For ByteLevel, Metaspace and WordPiece decoders that is exactly
``tokenizer.decode(P + O)[len(tokenizer.decode(P)):]`` (the prompt not ending within a character).
Byte fallback differs from it in one case: Hugging Face's decoder turns a *whole* run of byte tokens
into U+FFFD when any byte in it is invalid, so that a character that was shown long ago would
change. Here complete characters within a run stay, and each byte that belongs to none becomes one
U+FFFD; runs that are all valid, or have no valid character, give the same in both.
With ``clean_up_tokenization_spaces`` in effect (never for BPE) it is applied to the output alone.

Work for a token is constant: its bytes come from a table (`src.text.pieces`) and go through an
incremental UTF-8 decoder, which holds at most three bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from src.text.pieces import CLEAN_UPS

if TYPE_CHECKING:
    from src.text.tokenizer import Tokenizer


class AfterPrompt(NamedTuple):
    """What of a prompt has an influence on the text that follows it."""

    is_first: bool
    """Whether the next token is the first of the text."""
    strip_left: int
    """Characters that may still be stripped."""
    tail: bytes
    """Its last bytes, which may be the beginning of a character."""
    after_added: bool
    """Whether it ends with an added token."""


class IncrementalDetokenizer:
    """The text of one output, grown token by token.

    Parameters
    ----------
    tokenizer
        The tokenizer of the model.
    prompt_token_ids
        The prompt: a few ids at its beginning and end are read, once. Or what another detokenizer
        has read of the same prompt, its ``after_prompt``.
    skip_special_tokens
        Whether special tokens, in prompt and output, count as no text.
    spaces_between_special_tokens
        False leaves out the space that some decoders (WordPiece, none) put between two adjacent
        added tokens. Other decoders put none.
    kept_special_ids
        Special tokens that are text in the output even where they are skipped.
    stands_alone
        Whether what the prompt ends with is left out, if that is the beginning of a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] | AfterPrompt = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        kept_special_ids: Collection[int] = (),
        stands_alone: bool = False,
    ) -> None:
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if kept_special_ids:
            self._skipped -= frozenset(kept_special_ids)
        self._added = None if spaces_between_special_tokens else tokenizer.added_tokens
        self._after_added = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=self._pieces.errors)
        self._first = self._pieces.first_differs
        self._strip_character, self._strip_left = self._pieces.strip
        self._replacers = (
            [StreamingReplace(old, new) for old, new in CLEAN_UPS] if tokenizer.cleans_up else []
        )
        self._any_output = False
        if isinstance(prompt_token_ids, AfterPrompt):
            self.after_prompt = prompt_token_ids
        else:
            self.after_prompt = self._read_prompt(prompt_token_ids)
        self._first, self._strip_left, tail, self._after_added = self.after_prompt
        if not stands_alone:
            self._utf8.decode(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that has become certain by them."""
        self._any_output = self._any_output or len(token_ids) > 0
        if self._added is None and not self._first and not self._strip_left:
            later, skipped = self._pieces.later, self._skipped
            if len(token_ids) == 1:
                # Most pushes of most outputs.
                token_id = token_ids[0]
                data = b"" if token_id in skipped else later(token_id)
            else:
                data = b"".join([later(i) for i in token_ids if i not in skipped])
            # Nearly always: the decoder's own way is several times as long.
            if data.isascii() and not self._utf8.buffer:
                text = data.decode("ascii")
            else:
                text = self._utf8.decode(data)
        else:
            text = "".join([self._push_one(i) for i in token_ids if i not in self._skipped])
        for replacer in self._replacers:
            text = replacer.feed(text)
        return text

    def hand_over(self) -> str:
        """Return what is held back, except an incomplete character, which the output repeats."""
        text = ""
        for replacer in self._replacers:
            text = replacer.feed(text) + replacer.finish()
        return text

    def flush(self) -> str:
        """Return what is pending at the end of the output: U+FFFD for an incomplete character.

        An output without tokens has no text, whatever the prompt ends with.
        """
        text = self._stripped(self._utf8.decode(b"", final=True)) if self._any_output else ""
        for replacer in self._replacers:
            text = replacer.feed(text) + replacer.finish()
        return text

    def _push_one(self, token_id: int) -> str:
        if self._first:
            piece = self._pieces.first(token_id)
            # An id without a token is nowhere in the decoder's list, so the next one is the first.
            self._first = not piece and not self._pieces.exists(token_id)
        else:
            piece = self._pieces.later(token_id)
        if self._added is not None:
            content = self._added.get(token_id)
            if content is not None and self._after_added:
                piece = content.encode()
            self._after_added = content is not None
        return self._stripped(self._utf8.decode(piece))

    def _stripped(self, text: str) -> str:
        """Remove from ``text`` what is still to be stripped from the text's beginning."""
        while self._strip_left and text:
            if text[0] == self._strip_character:
                text = text[1:]
                self._strip_left -= 1
            else:
                self._strip_left = 0
        return text

    def _read_prompt(self, prompt_token_ids: Sequence[int]) -> AfterPrompt:
        """Read no more of the prompt than has an influence.

        The beginning matters until a visible token has come; of the end, only the last bytes can be
        the beginning of a character, since a lead byte always starts anew.
        """
        for token_id in prompt_token_ids:
            if not self._first and not self._strip_left:
                break
            if token_id not in self._skipped:
                self._push_one(token_id)
        self._utf8.reset()
        tail = b""
        for token_id in self._visible_backwards(prompt_token_ids):
            tail = self._pieces.later(token_id) + tail
            if len(tail) >= 4:
                break
        after_added = False
        if self._added is not None:
            last = next(self._visible_backwards(prompt_token_ids), None)
            after_added = last in self._added
        return AfterPrompt(self._first, self._strip_left, tail, after_added)

    def _visible_backwards(self, token_ids: Sequence[int]) -> Iterator[int]:
        return (i for i in reversed(token_ids) if i not in self._skipped)


class StreamingReplace:
    """``str.replace`` over a text that comes in pieces, holding back what may begin a match."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def feed(self, piece: str) -> str:
        """Take a piece; return the replaced text that is certain."""
        *before, rest = (self._held + piece).split(self._old)
        keep = next(
            n
            for n in range(min(len(self._old) - 1, len(rest)), -1, -1)
            if rest.endswith(self._old[:n])
        )
        self._held = rest[len(rest) - keep :]
        return self._new.join([*before, rest[: len(rest) - keep]])

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


def detokenize(
    tokenizer: Tokenizer,
    output_token_ids: Sequence[int],
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> str:
    """Return the whole text of an output: what the pieces of `IncrementalDetokenizer` join to."""
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        prompt_token_ids,
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
    )
    return detokenizer.push(output_token_ids) + detokenizer.flush()
