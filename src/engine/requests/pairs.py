"""From two texts to the token ids by which a model scores how well they match."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from src.core.errors import InvalidRequestError, PromptTooLongError, RequestError
from src.core.sampling_params import shown
from src.core.scoring import ScoringRecipe
from src.engine.requests.prompts import ChatOptions, RequestBuilder, TextTokens
from src.text import Tokenizer


class PairTokens(NamedTuple):
    """The tokens of a text that was made of two.

    Attributes
    ----------
    ids
        Token ids.
    types
        For each of them, which of the two texts it belongs to, as the tokenizer says; empty where
        the two are joined by a template.
    """

    ids: list[int]
    types: bytes = b""


class LastQuery:
    """The query of the pair before: one that has many documents is tokenized once."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.tokens = TextTokens([], 0)


class _Part(NamedTuple):
    """A part of what the tokenizer makes of two texts.

    Attributes
    ----------
    number
        Which of the two texts stands here: 0 or 1; ``None``: special tokens do.
    ids
        The special tokens.
    kind
        The kind of each token of this part.
    """

    number: int | None
    ids: list[int]
    kind: int


class PairBuilder:
    """Makes one text of two, as the model's recipe says, and cuts it where that is asked for."""

    def __init__(
        self, recipe: ScoringRecipe, tokenizer: Tokenizer, builder: RequestBuilder
    ) -> None:
        self.recipe = recipe
        self._tokenizer = tokenizer
        self._builder = builder
        # With special tokens or without -> how the tokenizer joins two texts.
        self._frames: dict[bool, list[_Part]] = {}

    def check(self, truncate: int | None, max_tokens_per_doc: int | None) -> None:
        """Refuse options that hold for all pairs of a request.

        Raises
        ------
        InvalidRequestError
            One is out of range; names the field.
        """
        most = self.recipe.max_tokens
        if truncate is not None and truncate != -1 and not 1 <= truncate <= most:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or from 1 to {most}, got {shown(truncate)}",
                param="truncate_prompt_tokens",
            )
        check_doc_tokens(max_tokens_per_doc, most)

    @property
    def is_templated(self) -> bool:
        """Whether a template joins the texts, so that `templated` makes their tokens."""
        return self.recipe.joins != "tokenizer"

    def tokens(
        self,
        query: str,
        document: str,
        *,
        adds_special_tokens: bool = True,
        truncate: int | None = None,
        max_tokens_per_doc: int | None = None,
        last: LastQuery | None = None,
    ) -> PairTokens:
        """The token ids of a pair that the tokenizer joins. Any thread may call it.

        Parameters
        ----------
        truncate
            Keep so many tokens: of a longer pair those of the longer text are cut first, from its
            end. -1: as many as the model takes. ``None``: a longer pair is refused.
        max_tokens_per_doc
            Of the document's tokens, at most so many are kept.
        last
            The query of the pair before, asked for with the same ``truncate``; it is replaced.

        Raises
        ------
        InvalidRequestError
            A text is empty, or has tokens that the model does not have.
        PromptTooLongError
            The pair is longer than the model takes.
        """
        _check_texts(query, document)
        keeps = self.recipe.max_tokens if truncate == -1 else truncate
        last = LastQuery() if last is None else last
        if last.text != query:
            with _named("query"):
                last.tokens = self._text(query, keeps)
            last.text = query
        bound = keeps if max_tokens_per_doc is None else max_tokens_per_doc
        with _named("document"):
            found = self._text(document, bound)
        return self._joined(last.tokens, found, adds_special_tokens, keeps, max_tokens_per_doc)

    async def templated(
        self,
        query: str,
        document: str,
        *,
        truncate: int | None = None,
        max_tokens_per_doc: int | None = None,
        tenant: str = "",
    ) -> PairTokens:
        """The same of a pair that a template joins; ``truncate`` cuts the document alone."""
        _check_texts(query, document)
        most = self.recipe.max_tokens
        keeps = most if truncate == -1 else truncate
        if keeps is not None:
            query, document = (self._begin(text, keeps) for text in (query, document))
        if max_tokens_per_doc is not None:
            document = self._begin(document, max_tokens_per_doc)
        # What is far longer than what may be kept is cut before it is searched and rendered.
        bounds = [most if keeps is None else keeps] * 2
        if max_tokens_per_doc is not None:
            bounds[1] = min(bounds[1], max_tokens_per_doc)
        with _named("query"):
            asked = await self._builder.begins(query, bounds[0], tenant)
        with _named("document"):
            begun = await self._builder.begins(document, bounds[1], tenant)
        is_whole = (asked, begun) == (query, document)
        made = await self._templated(asked, begun, keeps, max_tokens_per_doc, tenant)
        if len(made.ids) > most:
            raise self._too_long(len(made.ids), is_whole=is_whole)
        return made

    def _too_long(self, count: int, *, is_whole: bool = True) -> PromptTooLongError:
        most = self.recipe.max_tokens
        return PromptTooLongError(
            f"both texts together have {'' if is_whole else 'at least '}{count} tokens, and this "
            f"model takes up to {most}: shorten them, or ask for truncate_prompt_tokens",
            param="document",
            lengths=(count, 0, most),
        )

    def _text(self, text: str, keeps: int | None) -> TextTokens:
        """The tokens of one of two texts that the tokenizer joins, as many as may be kept."""
        if keeps is not None:
            text = self._begin(text, keeps)
        most = keeps or self.recipe.max_tokens
        found = self._builder.text_tokens(text, most)
        # What is left out may be millions of tokens.
        return TextTokens(found.ids[:most], found.total, found.is_whole)

    def _joined(
        self,
        query: TextTokens,
        document: TextTokens,
        adds: bool,
        keeps: int | None,
        limit: int | None,
    ) -> PairTokens:
        """Both as the tokenizer joins them, and as much of each as is kept.

        The tokens of a text do not depend on the other one, nor do the special ones on either.
        """
        frame = self._frame(adds)
        special = sum(len(part.ids) for part in frame)
        own = [query.total, document.total]
        if keeps is not None:
            own = [each.total if each.is_whole else _FAR_LONGER for each in (query, document)]
        if limit is not None:
            own[1] = min(own[1], limit)
        if keeps is not None:
            whole = own
            own = list(_longest_first(own[0], own[1], max(keeps - special, 0)))
            if any(before and not left for before, left in zip(whole, own, strict=True)):
                raise InvalidRequestError(
                    f"truncate_prompt_tokens = {keeps} leaves no token of one of both texts: "
                    f"{special} are special ones",
                    param="truncate_prompt_tokens",
                )
        if sum(own) + special > self.recipe.max_tokens and keeps is None:
            raise self._too_long(sum(own) + special, is_whole=query.is_whole and document.is_whole)
        ids: list[int] = []
        types = bytearray()
        for part in frame:
            more = part.ids
            if part.number is not None:
                more = (query, document)[part.number].ids[: own[part.number]]
            ids += more
            types += bytes([part.kind]) * len(more)
        return PairTokens(ids, bytes(types))

    def _frame(self, adds: bool) -> list[_Part]:
        """What stands around two texts that the tokenizer joins, read off two short ones."""
        frame = self._frames.get(adds)
        if frame is None:
            found = self._builder.encode_pair(_SHORT, _SHORT, adds)
            frame = []
            for token_id, kind, number in zip(found.ids, found.types, found.sequences, strict=True):
                if not frame or (frame[-1].number, frame[-1].kind) != (number, kind):
                    frame.append(_Part(number, [], kind))
                if number is None:
                    frame[-1].ids.append(token_id)
            self._frames[adds] = frame
        return frame

    async def _templated(
        self, query: str, document: str, keeps: int | None, limit: int | None, tenant: str
    ) -> PairTokens:
        if limit is not None:
            document = await self._cut(document, limit, tenant)
        ids = await self._rendered(query, document, tenant)
        while keeps is not None and len(ids) > keeps:
            own = await self._own_ids(document, tenant)
            left = len(own) - (len(ids) - keeps)
            shorter = self._spelled(own[:left]) if left > 0 else ""
            if not shorter or len(shorter) >= len(document):
                raise PromptTooLongError(
                    f"truncate_prompt_tokens = {keeps} leaves no token of the document: the query "
                    f"and the template have {len(ids) - len(own)}",
                    param="truncate_prompt_tokens",
                    lengths=(len(ids), 0, keeps),
                )
            document = shorter
            ids = await self._rendered(query, document, tenant)
        return PairTokens(ids)

    async def _rendered(self, query: str, document: str, tenant: str) -> list[int]:
        """Both in the template; the special tokens in it are the template's alone."""
        recipe, builder = self.recipe, self._builder
        quoted = [await builder.quoted(text, tenant) for text in (query, document)]
        is_quoted = quoted != [None, None]
        query, document = (
            own if text is None else text
            for own, text in zip((query, document), quoted, strict=True)
        )
        if recipe.built_in is not None:
            before, between, behind = recipe.built_in
            whole = f"{before}{query}{between}{document}{behind}"
            if is_quoted:
                return await builder.tokenize_quoted(whole, tenant)
            return await builder.tokenize(whole, _PLAIN, tenant)
        messages = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        if recipe.instruction is not None:
            messages.insert(0, {"role": "system", "content": recipe.instruction})
        if is_quoted:
            return await builder.tokenize_quoted(messages, tenant)
        return await builder.tokenize(messages, ChatOptions(), tenant)

    async def _own_ids(self, text: str, tenant: str) -> list[int]:
        """The tokens of a text alone, as far as they are those that it has in the template."""
        quoted = await self._builder.quoted(text, tenant)
        if quoted is None:
            return await self._builder.tokenize(text, _PLAIN, tenant)
        return await self._builder.tokenize_quoted(quoted, tenant)

    async def _cut(self, text: str, most: int, tenant: str) -> str:
        ids = await self._own_ids(text, tenant)
        if len(ids) <= most:
            return text
        if shorter := self._spelled(ids[:most]):
            return shorter
        raise PromptTooLongError(
            f"max_tokens_per_doc = {most} leaves no whole character of the document",
            param="max_tokens_per_doc",
            lengths=(len(ids), 0, most),
        )

    def _spelled(self, ids: list[int]) -> str:
        """The text of the first tokens of a text, without a character that they only begin."""
        spelled = self._tokenizer.decode(ids)
        if not spelled.endswith(_REPLACEMENT):
            return spelled
        # Those of the text itself have their bytes in whole.
        special = self._tokenizer.special_ids
        spellings = [b"" if i in special else self._tokenizer.token_bytes(i) for i in ids]
        spelling = b"".join(spellings)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(spelling)
        missing = len(decoder.getstate()[0])
        spelling = spelling[: len(spelling) - missing]
        # A decoder of single bytes would spell none of the characters before either.
        count = len(ids)
        while count and 0 < len(spellings[count - 1]) <= missing:
            count -= 1
            missing -= len(spellings[count])
        spelled = self._tokenizer.decode(ids[:count])
        own = _REPLACEMENT.encode()
        text = spelling
        while text.endswith(own):
            text = text.removesuffix(own)
        kept = (len(spelling) - len(text)) // len(own)
        return spelled.rstrip(_REPLACEMENT) + _REPLACEMENT * kept

    def _begin(self, text: str, tokens: int) -> str:
        """As much of a text as so many tokens, and one more, can spell."""
        longest = self._builder.max_text_chars
        return text[: min((tokens + 1) * self._tokenizer.max_token_chars, longest)]


@contextlib.contextmanager
def _named(text: str) -> Iterator[None]:
    """Say in errors which of both texts is at fault."""
    try:
        yield
    except RequestError as error:
        error.rename("prompt", text)
        raise


def _check_texts(query: object, document: object) -> None:
    """Refuse what is no text, or an empty one; names it."""
    for name, text in (("query", query), ("document", document)):
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"the {name} must be text, got {type(text).__name__}", param=name
            )
        if not text:
            raise InvalidRequestError(f"the {name} must not be empty", param=name)


def check_doc_tokens(given: int | None, most: int) -> None:
    """Refuse a number of a document's tokens that is out of range.

    Raises
    ------
    InvalidRequestError
        Names the field.
    """
    if given is not None and not 1 <= given <= most:
        raise InvalidRequestError(
            f"max_tokens_per_doc must be from 1 to {most}, got {shown(given)}",
            param="max_tokens_per_doc",
        )


# A text of which every tokenizer makes at least one token.
_SHORT = "a"
# What stands for a character of which some bytes are missing, and may stand in a text as well.
_REPLACEMENT = "\ufffd"
_PLAIN = ChatOptions(add_special_tokens=False)
# Tokens of a text of which only the beginning was tokenized.
_FAR_LONGER = 2**40


def _longest_first(first: int, second: int, most: int) -> tuple[int, int]:
    """How many tokens of two texts are kept, ``most`` in all: the longer one is cut first."""
    if first + second <= most:
        return first, second
    shorter = min(first, second)
    if 2 * shorter <= most:
        return (shorter, most - shorter) if first <= second else (most - shorter, shorter)
    half = most // 2
    return (half, most - half) if first <= second else (most - half, half)
