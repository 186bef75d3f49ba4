"""The message to the device half for one step: its plan, its new requests, and ended requests.

Messages are plain data. A fresh worker with the same weights that runs recorded messages in launch
order computes the same tokens. A peer that receives them writes the same rows.

They are confidential: installs contain the tokens of prompts, and parameters are the clients'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from src.core.adapter import NO_ADAPTER
from src.core.plan import StepPlan
from src.core.request import Pooling, Request, StepValues
from src.core.sampling_params import SamplingParams
from src.core.task import Task

Scope: TypeAlias = tuple[str, str, int]
"""Whose requests may see traces of each other: tenant, salt, and key of the adapter."""


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The data of a request that the device half needs until the request has ended.

    Its tokens come with `RowInstall`, each time that it gets a row.

    Attributes
    ----------
    key
        The engine's key of the request.
    prompt_len
        Tokens of its prompt.
    params
        Validated sampling parameters, including whether prompt log-probabilities are wanted.
    seed
        Resolved int64 seed; drawn if the client gave none.
    end_token_ids
        Token ids that end the output.
    bad_words_token_ids
        Token sequences that the output must not contain.
    grammar
        Handle of the compiled ``params.structured_output``, or ``None``. A compiled grammar cannot
        be serialized, so the worker that samples keeps it under this handle.
    thinking
        Handle of what ends its thinking, which does not travel either; ``None`` without a bound.
    step_inputs
        Values of the model's own step inputs for its first tokens, by name.
    task
        What it asks for.
    pooling
        Of which hidden states its result is made; ``None``: it gets tokens.
    num_unpooled
        How many of its first tokens are left out of what is pooled.
    prediction
        Token ids that its output is expected to have, int32 side by side; empty: nothing is known.
    scope
        Whose drafts may come from its output, and whose outputs its drafts may come from.
    """

    key: int
    prompt_len: int
    params: SamplingParams
    seed: int = 0
    end_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: int | None = None
    thinking: int | None = None
    step_inputs: Mapping[str, StepValues] = {}
    task: Task = "generate"
    pooling: Pooling | None = None
    num_unpooled: int = 0
    prediction: bytes = b""
    scope: Scope = ("", "", NO_ADAPTER)

    @classmethod
    def of(cls, request: Request) -> DeviceRequest:
        """The device half's data of ``request``; its key is also the handle of its grammar."""
        return cls(
            key=request.key,
            prompt_len=len(request.prompt_token_ids),
            params=request.params,
            seed=request.seed,
            end_token_ids=request.end_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            grammar=None if request.grammar is None else request.key,
            thinking=None if request.thinking is None else request.key,
            step_inputs=request.step_inputs,
            task=request.task,
            pooling=request.pooling,
            num_unpooled=request.num_unpooled,
            prediction=request.prediction or b"",
            scope=(
                request.tenant,
                request.cache_salt,
                NO_ADAPTER if request.adapter is None else request.adapter.key,
            ),
        )


class StepMessage(msgspec.Struct, frozen=True):
    """One step for the device half.

    Attributes
    ----------
    plan
        Applied after ``admitted`` and ``ended`` were processed.
    admitted
        Requests that ``plan`` installs for the first time.
    ended
        Keys of requests that neither ``plan`` nor any later one installs again.
    """

    plan: StepPlan
    admitted: list[DeviceRequest]
    ended: list[int]
