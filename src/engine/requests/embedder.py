"""From texts to requests for their vectors, and from a step's numbers to a vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from src.core.embedding import EmbeddingRecipe
from src.core.errors import InvalidRequestError, PromptTooLongError
from src.core.sampling_params import SamplingParams, shown
from src.engine.requests.prompts import ChatOptions, RequestBuilder, RequestOptions
from src.text import Tokenizer

Text = str | Sequence[int]


class TextIds(list[int]):
    """The token ids of a text, and how many of the first are left out of what is pooled."""

    num_unpooled: int = 0


class Embedder:
    """Tokenizes texts as the checkpoint's recipe says, and finishes their vectors."""

    def __init__(
        self, recipe: EmbeddingRecipe, tokenizer: Tokenizer, builder: RequestBuilder
    ) -> None:
        self.recipe = recipe
        self._tokenizer = tokenizer
        self._builder = builder
        # Characters: a longer text is refused without tokenizing it.
        self._longest = builder.max_text_chars
        self.beside = builder.beside
        """How `tokens` of long texts are called, see `RequestBuilder.beside`."""
        # Prompt of the checkpoint or "", whether special tokens are added -> its tokens.
        self._alone: dict[tuple[str, bool], list[int]] = {}

    def check(self, dimensions: int | None, truncate: int | None, prompt_name: str | None) -> None:
        """Refuse options that hold for all texts of a request.

        Raises
        ------
        InvalidRequestError
            One is out of range, or the model does not do it; names the field.
        """
        recipe = self.recipe
        if dimensions is not None and dimensions != recipe.size:
            if recipe.sizes is None:
                raise InvalidRequestError(
                    f"dimensions must be {recipe.size}: this model does not say that its vectors "
                    f"may be cut (is_matryoshka or matryoshka_dimensions in its config.json; "
                    f"model.cut_vectors allows it all the same), got {shown(dimensions)}",
                    param="dimensions",
                )
            known = ", ".join(map(str, recipe.sizes))
            if not 1 <= dimensions <= recipe.size or (known and dimensions not in recipe.sizes):
                raise InvalidRequestError(
                    f"dimensions must be {f'one of {known}' if known else 'at least 1'}, up to "
                    f"{recipe.size}, got {shown(dimensions)}",
                    param="dimensions",
                )
        if truncate is not None and truncate != -1 and not 1 <= truncate <= recipe.max_tokens:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or from 1 to {recipe.max_tokens}, got "
                f"{shown(truncate)}",
                param="truncate_prompt_tokens",
            )
        if prompt_name is not None and prompt_name not in recipe.prompts:
            known = ", ".join(sorted(recipe.prompts)) or "none"
            raise InvalidRequestError(
                f"prompt_name must be one that the model has ({known}), got {prompt_name[:100]!r}",
                param="prompt_name",
            )

    def check_options(self, params: SamplingParams, options: RequestOptions) -> None:
        """Refuse options that are out of range for any request."""
        self._builder.check(params, options)

    def prompt(self, name: str | None = None) -> str:
        """What the checkpoint's prompt of a name puts before texts; ``None``: its default."""
        name = self.recipe.default_prompt if name is None else name
        return "" if name is None else self.recipe.prompts[name]

    def tokens(
        self,
        text: Text,
        *,
        adds_special_tokens: bool = True,
        truncate: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> TextIds:
        """The token ids of a text, or of token ids that stand for one. Any thread may call it.

        Parameters
        ----------
        truncate
            Keep so many tokens: the first ones, and special ones behind them; -1: as many as the
            model takes. ``None``: a longer text is refused.
        prompt_name
            Name of what is put before it; ``None``: the default. Token ids get nothing.
        prompt
            What is put before it, whatever the name; the same.

        Raises
        ------
        InvalidRequestError
            It is empty, or has token ids that the model does not have; token ids have a prompt's
            name; or nothing of the text is among the tokens that are kept, or that are pooled.
        PromptTooLongError
            It is longer than the model takes.
        """
        if not isinstance(text, str | list | tuple):
            raise InvalidRequestError(
                f"input must be text or a list of token ids, got {type(text).__name__}",
                param="input",
            )
        most = self.recipe.max_tokens
        keeps = most if truncate == -1 else truncate
        if not text:
            raise InvalidRequestError("input must not be empty", param="input")
        if not isinstance(text, str):
            if prompt_name is not None:
                raise InvalidRequestError(
                    "prompt_name may only be given with texts, not with token ids",
                    param="prompt_name",
                )
            ids = list(text) if keeps is None else list(text[:keeps])
            self._check_length(len(ids))
            return TextIds(self._builder.checked_ids(ids, "input"))
        if prompt is None:
            prompt = self.prompt(prompt_name)
        unpooled = self._num_unpooled(prompt, adds_special_tokens)
        text = prompt + text
        if keeps is not None:
            # Text of which nothing can be among the tokens that are kept is not tokenized.
            text = text[: min((keeps + 1) * self._tokenizer.max_token_chars, self._longest)]
        found = self._builder.text_tokens(
            text, most if keeps is None else keeps, adds_special_tokens
        )
        ids = found.ids
        if keeps is not None and len(ids) > keeps:
            before, behind = self._added(ids) if adds_special_tokens else ([], [])
            others = len(before) + self._num_of_prompt(prompt, ids[len(before) :])
            others = max(others, unpooled) + len(behind)
            if keeps <= others:
                raise InvalidRequestError(
                    f"truncate_prompt_tokens = {keeps} leaves no token of the text: {others} are "
                    "special ones or of the prompt",
                    param="truncate_prompt_tokens",
                )
            ids = ids[: keeps - len(behind)] + behind
        self._check_length(len(ids), is_whole=found.is_whole)
        if unpooled >= len(ids):
            raise InvalidRequestError(
                f"input has {len(ids)} tokens with the prompt before it, of which this model "
                f"leaves the first {unpooled} out of the vector, as those of the prompt",
                param="input",
            )
        made = TextIds(ids)
        made.num_unpooled = unpooled
        return made

    async def tokens_of_chat(
        self, messages: Sequence[Any], *, truncate: int | None = None, tenant: str = ""
    ) -> list[int]:
        """The same of chat messages, which are rendered as they are.

        As of token ids, ``truncate`` keeps the first ones. Errors are those of `tokens`.
        """
        most = self.recipe.max_tokens
        keeps = most if truncate == -1 else truncate
        chat = ChatOptions(add_generation_prompt=False)
        ids = (await self._builder.tokenize(messages, chat, tenant))[:keeps]
        self._check_length(len(ids))
        return ids

    def vector(
        self, raw: bytes, dimensions: int | None = None, normalizes: bool | None = None
    ) -> bytes:
        """A vector from the numbers that a step has given, shortened before it is normalized.

        Both are float32 in this machine's byte order. ``normalizes``: whether it is scaled to
        length 1; ``None``: as the checkpoint does.
        """
        values = np.frombuffer(raw, np.float32)[:dimensions]
        if self.recipe.normalizes if normalizes is None else normalizes:
            wide = values.astype(np.float64)
            values = (wide / max(math.sqrt(wide.dot(wide)), 1e-12)).astype(np.float32)
        return values.tobytes()

    def _added(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer has put before a text's own, and behind them."""
        added = self._tokens_alone("", adds_special_tokens=True)
        for count in range(len(added) + 1):
            before, behind = added[:count], added[count:]
            if ids[:count] == before and ids[len(ids) - len(behind) :] == behind:
                return before, behind
        return [], []

    def _num_of_prompt(self, prompt: str, ids: list[int]) -> int:
        """How many of the first tokens are those of what was put before a text."""
        if not prompt:
            return 0
        own = self._tokens_alone(prompt, adds_special_tokens=False)
        pairs = enumerate(zip(own, ids, strict=False))
        return next((number for number, (one, other) in pairs if one != other), len(own))

    def _num_unpooled(self, prompt: str, adds_special_tokens: bool) -> int:
        """How many of the first tokens are left out of what is pooled, since they are a prompt's.

        As sentence-transformers counts them: the tokens of the prompt alone, with special ones
        before it, and without a special one at the end. Where the prompt's end and the text's
        beginning become one token, that is not known to it either.
        """
        if self.recipe.pools_prompt or not prompt:
            return 0
        ids = self._tokens_alone(prompt, adds_special_tokens=adds_special_tokens)
        return len(ids) - (bool(ids) and ids[-1] in self._tokenizer.special_ids)

    def _tokens_alone(self, prompt: str, *, adds_special_tokens: bool) -> list[int]:
        """The tokens of a prompt of the checkpoint, which are the same for each text behind it."""
        ids = self._alone.get((prompt, adds_special_tokens))
        if ids is None:
            ids = self._tokenizer.encode(prompt, add_special_tokens=adds_special_tokens)
            self._alone[prompt, adds_special_tokens] = ids
        return ids

    def _check_length(self, count: int, *, is_whole: bool = True) -> None:
        most = self.recipe.max_tokens
        if count < 1:
            raise InvalidRequestError("input must have at least one token", param="input")
        if count > most:
            raise PromptTooLongError(
                f"input has {'' if is_whole else 'at least '}{count} tokens, and this model takes "
                f"up to {most}: shorten it, or ask for truncate_prompt_tokens",
                param="input",
                lengths=(count, 0, most),
            )
