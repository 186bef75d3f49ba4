"""All that the device half is told of one step: its plan, who is new in it, and who has ended.

Messages are plain data. Written down in the order of their launch, they have a fresh worker with
the same weights compute the same tokens; sent to a peer, they have it write the same rows.

They are no log for strangers: installs hold the tokens of prompts, parameters what was asked.
"""

from __future__ import annotations

import msgspec

from src.core.plan import StepPlan
from src.core.request import Request
from src.core.sampling_params import SamplingParams


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the device half has to know of a request for as long as it may have a row.

    Its tokens come with :class:`~src.core.plan.RowInstall`, every time that it is given a row.

    Attributes
    ----------
    key
        The engine's own name for the request.
    prompt_len
        Tokens of its prompt.
    params
        Validated already. They say as well whether log-probabilities of the prompt are wanted.
    seed
        Resolved int64 seed, drawn already if the client gave none.
    end_token_ids
        Token ids that end the output.
    bad_words_token_ids
        Token sequences that must not be completed.
    grammar
        Handle of what ``params.structured_output`` was compiled to, ``None`` without it. Compiled
        grammars do not travel: whoever samples holds them by their handles.
    thinking
        Handle of what ends its thinking, which does not travel either; ``None`` without a bound.
    """

    key: int
    prompt_len: int
    params: SamplingParams
    seed: int = 0
    end_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: int | None = None
    thinking: int | None = None

    @classmethod
    def of(cls, request: Request) -> DeviceRequest:
        """What the device half has to know of ``request``; its key is the handle of what it has."""
        return cls(
            key=request.key,
            prompt_len=len(request.prompt_token_ids),
            params=request.params,
            seed=request.seed,
            end_token_ids=request.end_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            grammar=None if request.grammar is None else request.key,
            thinking=None if request.thinking is None else request.key,
        )


class StepMessage(msgspec.Struct, frozen=True):
    """One step for the device half.

    Attributes
    ----------
    plan
        Applied once those who are admitted are known, and those who ended are not any more.
    admitted
        Requests that ``plan`` installs for the first time.
    ended
        Keys of requests that neither ``plan`` nor any later one installs again.
    """

    plan: StepPlan
    admitted: list[DeviceRequest]
    ended: list[int]
