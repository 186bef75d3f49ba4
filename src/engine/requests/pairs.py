"""From two texts to the token ids by which a model scores how well they match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from src.core.errors import InvalidRequestError, PromptTooLongError
from src.core.sampling_params import shown
from src.core.scoring import ScoringRecipe
from src.engine.requests.prompts import ChatOptions, RequestBuilder
from src.text import Tokenizer
from src.text.tokenizer import PairEncoding


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


class PairBuilder:
    """Makes one text of two, as the model's recipe says, and cuts it where that is asked for."""

    def __init__(
        self, recipe: ScoringRecipe, tokenizer: Tokenizer, builder: RequestBuilder
    ) -> None:
        self.recipe = recipe
        self._tokenizer = tokenizer
        self._builder = builder

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

    async def tokens(
        self,
        query: str,
        document: str,
        *,
        adds_special_tokens: bool = True,
        truncate: int | None = None,
        max_tokens_per_doc: int | None = None,
        tenant: str = "",
    ) -> PairTokens:
        """The token ids of a pair.

        Parameters
        ----------
        truncate
            Keep so many tokens: of a longer pair those of the longer text are cut first, from its
            end; where a template joins both, those of the document. -1: as many as the model takes.
            ``None``: a longer pair is refused.
        max_tokens_per_doc
            Of the document's tokens, at most so many are kept.

        Raises
        ------
        InvalidRequestError
            A text is empty, or has tokens that the model does not have.
        PromptTooLongError
            The pair is longer than the model takes.
        """
        for name, text in (("query", query), ("document", document)):
            if not isinstance(text, str):
                raise InvalidRequestError(
                    f"the {name} must be text, got {type(text).__name__}", param=name
                )
            if not text:
                raise InvalidRequestError(f"the {name} must not be empty", param=name)
        keeps = self.recipe.max_tokens if truncate == -1 else truncate
        limit = max_tokens_per_doc
        if keeps is not None:
            # Text of which nothing can be among the tokens that are kept is not tokenized.
            query, document = (self._begin(text, keeps) for text in (query, document))
        if limit is not None:
            document = self._begin(document, limit)
        if self.recipe.joins == "tokenizer":
            made = await self._joined(query, document, adds_special_tokens, keeps, limit, tenant)
        else:
            made = await self._templated(query, document, keeps, limit, tenant)
        most = self.recipe.max_tokens
        if len(made.ids) > most:
            raise PromptTooLongError(
                f"both texts together have {len(made.ids)} tokens, and this model takes up to "
                f"{most}: shorten them, or ask for truncate_prompt_tokens",
                param="document",
                lengths=(len(made.ids), 0, most),
            )
        return made

    async def _joined(
        self,
        query: str,
        document: str,
        adds: bool,
        keeps: int | None,
        limit: int | None,
        tenant: str,
    ) -> PairTokens:
        found = await self._builder.encode_pair(query, document, adds, tenant)
        own = [found.sequences.count(number) for number in (0, 1)]
        special = len(found.ids) - sum(own)
        if limit is not None:
            own[1] = min(own[1], limit)
        if keeps is not None:
            own = list(_longest_first(own[0], own[1], max(keeps - special, 0)))
        ids, types = _kept(found, own)
        # Special tokens alone are cut like any other.
        return PairTokens(ids[:keeps], types[:keeps])

    async def _templated(
        self, query: str, document: str, keeps: int | None, limit: int | None, tenant: str
    ) -> PairTokens:
        if limit is not None:
            document = await self._cut(document, limit, tenant)
        ids = await self._rendered(query, document, tenant)
        while keeps is not None and len(ids) > keeps:
            own = await self._builder.tokenize(document, _PLAIN, tenant)
            left = len(own) - (len(ids) - keeps)
            shorter = self._tokenizer.decode(own[:left]) if left > 0 else ""
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
        recipe = self.recipe
        if recipe.built_in is not None:
            before, between, behind = recipe.built_in
            whole = f"{before}{query}{between}{document}{behind}"
            return await self._builder.tokenize(whole, _PLAIN, tenant)
        messages = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        if recipe.instruction is not None:
            messages.insert(0, {"role": "system", "content": recipe.instruction})
        return await self._builder.tokenize(messages, ChatOptions(), tenant)

    async def _cut(self, text: str, most: int, tenant: str) -> str:
        ids = await self._builder.tokenize(text, _PLAIN, tenant)
        return text if len(ids) <= most else self._tokenizer.decode(ids[:most])

    def _begin(self, text: str, tokens: int) -> str:
        """As much of a text as so many tokens, and one more, can spell."""
        longest = self._builder.max_text_chars
        return text[: min((tokens + 1) * self._tokenizer.max_token_chars, longest)]


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


_PLAIN = ChatOptions(add_special_tokens=False)


def _longest_first(first: int, second: int, most: int) -> tuple[int, int]:
    """How many tokens of two texts are kept, ``most`` in all: the longer one is cut first."""
    if first + second <= most:
        return first, second
    shorter = min(first, second)
    if 2 * shorter <= most:
        return (shorter, most - shorter) if first <= second else (most - shorter, shorter)
    half = most // 2
    return (half, most - half) if first <= second else (most - half, half)


def _kept(found: PairEncoding, own: Sequence[int]) -> tuple[list[int], bytes]:
    """The first tokens of each text, and all special ones."""
    ids, types, seen = [], bytearray(), [0, 0]
    for token_id, kind, number in zip(found.ids, found.types, found.sequences, strict=True):
        if number is not None:
            seen[number] += 1
            if seen[number] > own[number]:
                continue
        ids.append(token_id)
        types.append(kind)
    return ids, bytes(types)
