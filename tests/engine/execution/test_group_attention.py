"""A backend that owns groups of layers: pages, prefill, decode, rotation and latents of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from src import AsyncEngine, SamplingParams
from src.engine.execution import group_attention
from src.engine.execution.group_attention import (
    AttentionCall,
    GroupAttention,
    Honours,
    LayerShape,
    Rotation,
)
from src.engine.execution.inputs import AttentionRows
from src.ops.attention.spec import FEATURES
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.families import SHORT_SIGHTED
from tests.support.probe import Probe
from tests.support.rotation import mixers_rotate

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=10)
LONGER = SamplingParams(temperature=0, max_tokens=24)
EVERYTHING = Honours(
    device_types=frozenset({"cpu"}),
    features=FEATURES,
    dtypes=frozenset({torch.float32}),
    cache_dtypes=frozenset({torch.float32}),
    latent=True,
    rotates=True,
    deterministic=True,
)
WAYS: dict[str, dict[str, Any]] = {
    "depth 1": {"scheduler__pipeline_depth": 1},
    "chunked": {"scheduler__max_num_batched_tokens": 8},
    "preempted": {"cache__num_blocks": 18, "model__max_model_len": 64},
}


class Pages(NamedTuple):
    """Heads before tokens: [blocks, kv_heads, block_size, D]."""

    keys: Tensor
    values: Tensor


class Row(NamedTuple):
    """Tokens begin to end of a step, which see the positions below `length`."""

    begin: int
    end: int
    length: int


class Own(GroupAttention):
    """Attention in plain torch, one token after the other."""

    name = "own"
    honours = EVERYTHING
    made: list[Own]
    prepared = attended = 0

    def __init__(self, number: int, group: Any) -> None:
        super().__init__(number, group)
        self.made.append(self)

    def pages(self, kept: Sequence[Tensor]) -> Any:
        if len(kept) == 1:
            return kept[0]
        blocks, size, heads, dim = kept[0].shape
        return Pages(*(each.view(blocks, heads, size, dim) for each in kept))

    def prepare(self, rows: AttentionRows, lengths_b: np.ndarray | None) -> list[Row]:
        self.prepared += 1
        starts = rows.query_start_loc.tolist()
        return [
            Row(*row) for row in zip(starts[:-1], starts[1:], rows.seq_lens_b.tolist(), strict=True)
        ]

    def attend(self, call: AttentionCall) -> None:
        self.attended += 1
        query, key = call.query, call.key
        if call.rotation is not None:
            query = rotated(query, call.rotation.q_norm, call.rotation)
            key = None if key is None else rotated(key, call.rotation.k_norm, call.rotation)
        if key is not None:
            assert call.value is not None
            for token, slot in enumerate(call.rows.slot_mappings_t[self.number].tolist()):
                if slot >= 0:
                    block, place = divmod(slot, self.group.block_size)
                    call.pages.keys[block, :, place] = key[token]
                    call.pages.values[block, :, place] = call.value[token]
        call.out.zero_()
        for row, position, token in self._tokens(call):
            seen = range(call.spec.first_visible(position), position + 1)
            blocks, places = self._where(call, row, seen)
            shared = query.shape[1] // call.pages.keys.shape[1]
            keys, values = (
                each[blocks, :, places].repeat_interleave(shared, dim=1) for each in call.pages
            )
            scores = torch.einsum("hd,khd->hk", query[token], keys) * call.spec.scale
            if call.spec.cap is not None:
                scores = call.spec.cap * torch.tanh(scores / call.spec.cap)
            if call.spec.sinks is not None:
                scores = torch.cat((scores, call.spec.sinks[:, None]), dim=1)
            weights = scores.softmax(dim=1)[:, : len(seen)]
            call.out[token] = torch.einsum("hk,khd->hd", weights, values)

    def attend_latent(self, call: AttentionCall) -> None:
        self.attended += 1
        assert call.key is not None
        assert call.up is not None
        for token, slot in enumerate(call.rows.slot_mappings_t[self.number].tolist()):
            if slot >= 0:
                call.pages[divmod(slot, self.group.block_size)] = call.key[token]
        rank, value_dim = call.up.shape[2], call.out.shape[2]
        call.out.zero_()
        for row, position, token in self._tokens(call):
            cached = call.pages[self._where(call, row, range(position + 1))]
            both = torch.einsum("hor,kr->kho", call.up, cached[:, :rank])
            nope, values = both.split((both.shape[2] - value_dim, value_dim), dim=2)
            turned = cached[:, None, rank:].expand(-1, len(call.up), -1)
            scores = torch.einsum("hd,khd->hk", call.query[token], torch.cat((nope, turned), 2))
            weights = (scores * call.spec.scale).softmax(dim=1)
            call.out[token] = torch.einsum("hk,khd->hd", weights, values)

    def _tokens(self, call: AttentionCall) -> list[tuple[int, int, int]]:
        """(row, position, token) of every token of a row."""
        return [
            (number, row.length - row.end + token, token)
            for number, row in enumerate(call.metadata)
            for token in range(row.begin, row.end)
        ]

    def _where(self, call: AttentionCall, row: int, seen: range) -> tuple[Tensor, Tensor]:
        positions = torch.tensor(seen)
        table = call.rows.block_tables_b[self.number][row].long()
        return table[positions // self.group.block_size], positions % self.group.block_size


def rotated(x: Tensor, norm: Tensor | None, rotation: Rotation) -> Tensor:
    if norm is not None:
        x = norm * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rotation.eps))
    cos, sin = rotation.table[rotation.positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def own(monkeypatch: pytest.MonkeyPatch, honours: Honours = EVERYTHING) -> type[Own]:
    """The backend, in the table."""
    kind = type("Own", (Own,), {"honours": honours, "made": []})
    monkeypatch.setitem(group_attention.BACKENDS, "own", kind)
    return kind


async def check(engine: AsyncEngine, model: Any, *, longer: bool = False) -> None:
    prompts = random_prompts(12, longest=40) if longer else random_prompts(5, longest=24, seed=3)
    params = LONGER if longer else GREEDY
    for _ in range(2):
        results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == greedy(model, prompt, params.max_tokens or 0)
    assert_idle(engine)


def serving(engine: AsyncEngine) -> dict[int, GroupAttention]:
    return Probe(engine).owners


# Plain; windows and caps in two groups; sinks; chunks; norms of heads; latents.
NAMES = ("llama", "gemma2", "gpt_oss", "llama4", "qwen3", "deepseekv3")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "depth 1") for name in NAMES),
        *((name, "chunked") for name in ("gemma2", "deepseekv3")),
        ("llama", "preempted"),
    ],
)
async def test_a_backend_owns_pages_prefill_and_decode(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = own(monkeypatch)
    directory = make_checkpoint(tmp_path, name, tokenizer=True, **SHORT_SIGHTED[name])
    rotates = mixers_rotate() if name in ("llama", "qwen3") else contextlib.nullcontext()
    with rotates:
        async with AsyncEngine.open(small_config(directory, **WAYS[way])) as engine:
            owners = serving(engine)
            assert len(owners) == len(Probe(engine).kv_cache.layout.groups)
            await check(engine, load_reference(directory), longer=way == "preempted")
            assert (engine.stats.preemptions > 0) == (way == "preempted")
    backends = [each for each in kind.made if each in owners.values()]
    assert all(each.attended > 0 for each in backends)
    # Layers that are alike share what is prepared; the last layer prepares for what is sampled.
    assert all(each.prepared <= each.attended for each in backends)


async def test_a_group_that_a_backend_does_not_honour_is_computed_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own(monkeypatch, replace(EVERYTHING, features=frozenset({"cap"})))
    directory = make_checkpoint(tmp_path, "gemma2", tokenizer=True, **SHORT_SIGHTED["gemma2"])
    with caplog.at_level(logging.INFO):
        async with AsyncEngine.open(small_config(directory)) as engine:
            groups = Probe(engine).kv_cache.layout.groups
            windows = [group.window for group in groups]
            assert set(windows) > {None}
            assert serving(engine).keys() == {windows.index(None)}
            await check(engine, load_reference(directory))
    assert "own has no window" in caplog.text
    assert "own computes group" in caplog.text


LAYER = LayerShape(
    is_latent=False,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    value_dim=16,
    block_size=16,
    dtype=torch.float32,
    cache_dtype=torch.float32,
    features=frozenset(),
    rotates=False,
    deterministic=False,
)


@pytest.mark.parametrize(
    ("changes", "layer", "reason"),
    [
        ({"device_types": frozenset({"cuda"})}, {}, "runs on cuda"),
        ({"features": frozenset()}, {"features": frozenset({"sinks", "cap"})}, "no cap, sinks"),
        ({}, {"dtype": torch.bfloat16}, "does not take queries in torch.bfloat16"),
        ({}, {"cache_dtype": torch.int8}, "does not read a cache in torch.int8"),
        ({"head_dims": frozenset({64})}, {}, "does not take heads of 16"),
        ({"head_dims": frozenset({16})}, {"value_dim": 8}, "does not take heads"),
        ({"latent": False}, {"is_latent": True}, "has no latent attention"),
        ({"rotates": False}, {"rotates": True}, "does not rotate"),
        ({"deterministic": False}, {"deterministic": True}, "is not deterministic"),
    ],
)
def test_a_backend_says_what_it_does_not_honour(
    changes: dict[str, Any], layer: dict[str, Any], reason: str
) -> None:
    shape = LAYER._replace(**layer)
    assert EVERYTHING.refusal(shape, "cpu") is None or "dtype" in str(layer)
    refusal = replace(EVERYTHING, **changes).refusal(shape, "cpu")
    assert refusal is not None
    assert reason in refusal
