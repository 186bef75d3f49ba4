"""The prompts of ``/v1/completions``, and how a prompt is cut to what is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import NamedTuple, TypeAlias, TypeVar, cast

import anyio

from src.core.errors import InvalidRequestError, PromptTooLongError
from src.core.sampling_params import shown
from src.engine.client import AsyncEngine
from src.engine.requests.prompts import ChatOptions
from src.http.protocol.generation import GenerationRequest
from src.http.server.body_work import in_turn
from src.text import Tokenizer
from src.text.detokenizer import IncrementalDetokenizer

Prompt: TypeAlias = str | list[int]

T = TypeVar("T")


class Echo(NamedTuple):
    """A prompt as choices repeat it.

    The text has nothing of the first ``num_added`` tokens, which the tokenizer put before it, nor
    of special tokens where it ``skips_special_tokens``. ``rest`` is U+FFFD if the prompt ends with
    an incomplete character. An output that continues the prompt shows that character instead.
    """

    text: str
    num_added: int
    skips_special_tokens: bool
    rest: str = ""


class Cut(NamedTuple):
    """How much of a prompt is kept: its last ``keep`` tokens, or its first."""

    keep: int
    from_end: bool = True

    def tokens(self, token_ids: list[T]) -> list[T]:
        """What is kept of these."""
        return token_ids[-self.keep :] if self.from_end else token_ids[: self.keep]

    def text(self, text: str, most: int) -> str:
        """At most so many characters of the side that is kept."""
        return text[-most:] if self.from_end else text[:most]


def given_prompts(
    given: str | list[int | str | list[int]], most: int, context: int, cut: Cut | None = None
) -> list[Prompt]:
    """The prompts of a request: a text and a list of token ids are one, other lists are several.

    The length of a list of ids is checked before anything walks it. With ``cut`` such a list is
    cut instead.

    Raises
    ------
    InvalidRequestError
        There is none, there are more than ``most``, or a list mixes kinds.
    PromptTooLongError
        A list of token ids does not leave room for one token in the ``context``.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("prompt must not be an empty list", param="prompt")
    kind = type(given[0])
    if kind is int:
        given = _fitted(given, context, cut)
    elif len(given) > most:
        raise InvalidRequestError(
            f"prompt may have at most {most} entries, got {len(given)}", param="prompt"
        )
    if set(map(type, given)) != {kind}:
        raise InvalidRequestError(
            "prompt must be a string, a list of token ids, a list of strings or a list of lists of "
            "token ids, got a mixed list",
            param="prompt",
        )
    if kind is int:
        return [cast(list[int], given)]
    return [
        _fitted(item, context, cut) if isinstance(item, list) else cast(str, item) for item in given
    ]


def cut_of(request: GenerationRequest, context: int, max_tokens: int) -> Cut | None:
    """What ``truncate_prompt_tokens`` keeps of a prompt; ``None`` keeps it all.

    Raises
    ------
    InvalidRequestError
        More than the context has room for, or none; or a side without a number of tokens.
    """
    asked, from_end = request.truncate_prompt_tokens, request.truncation_side != "right"
    if asked is None:
        if request.truncation_side is not None:
            raise InvalidRequestError(
                "truncation_side may only be given with truncate_prompt_tokens",
                param="truncation_side",
            )
        return None
    if asked == -1:
        return Cut(max(1, context - max_tokens), from_end)
    if not 1 <= asked < context:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to {context - 1}, got {shown(asked)}",
            param="truncate_prompt_tokens",
        )
    return Cut(asked, from_end)


async def token_ids_of(
    engine: AsyncEngine,
    prompts: Sequence[Prompt],
    add_special_tokens: bool | None,
    cut: Cut | None = None,
    tenant: str = "",
) -> list[list[int]]:
    """Token ids of each prompt of ``tenant``, as far as ``cut`` leaves them."""
    options = ChatOptions(add_special_tokens=add_special_tokens, tenant=tenant)
    token_ids = []
    for prompt in prompts:
        if cut is not None and isinstance(prompt, str):
            # Text of which nothing can be among the tokens that are kept is not tokenized.
            chars = engine.model_info.max_model_len * engine.tokenizer.max_token_chars
            prompt = cut.text(prompt, chars)
        ids = await engine.tokenize(prompt, chat=options)
        token_ids.append(ids if cut is None else cut.tokens(ids))
        # Others get the event loop between two prompts, which may be long.
        await anyio.lowlevel.checkpoint()
    return token_ids


async def echoes_of(
    engine: AsyncEngine,
    prompts: Sequence[Prompt],
    token_ids: Sequence[list[int]],
    *,
    adds_special_tokens: bool,
    skips_special_tokens: bool,
) -> list[Echo]:
    """Each prompt as choices repeat it: a text as it was given, token ids as text."""
    tokenizer = engine.tokenizer
    added = tokenizer.encode("", adds_special_tokens)
    echoes = []
    for prompt, ids in zip(prompts, token_ids, strict=True):
        if isinstance(prompt, str):
            num_added = len(commonprefix([added, ids]))  # noqa: RUF071
            echoes.append(Echo(prompt, num_added, skips_special_tokens=False))
        else:
            shown = await in_turn(_shown, tokenizer, ids, skips_special_tokens)
            echoes.append(Echo(shown[0], 0, skips_special_tokens, shown[1]))
    return echoes


def _shown(tokenizer: Tokenizer, ids: list[int], skips_special_tokens: bool) -> tuple[str, str]:
    """Return the text of token ids, and U+FFFD if they end with an incomplete character."""
    text = IncrementalDetokenizer(tokenizer, skip_special_tokens=skips_special_tokens)
    return text.push(ids) + text.hand_over(), text.flush()


def _fitted(token_ids: list[T], context: int, cut: Cut | None) -> list[T]:
    if cut is not None:
        return cut.tokens(token_ids)
    if len(token_ids) >= context:
        raise PromptTooLongError.of_prompt(len(token_ids), context, param="prompt")
    return token_ids
