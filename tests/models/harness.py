"""Two ways to run a `Model` without the engine: dense attention, and the paged op by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from src.models import Mixer, Model
from src.ops import paged_attention


def dense_attention(
    mixer: Mixer, given: Sequence[torch.Tensor], sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention over one sequence that is given whole, written as plainly as can be."""
    (query, key, value), spec = given, mixer.spec
    tokens, heads, _ = query.shape
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    value = value.repeat_interleave(heads // value.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
    if spec.cap is not None:
        scores = torch.tanh(scores / spec.cap) * spec.cap
    position = torch.arange(tokens)
    visible = position[None, :] <= position[:, None]
    if spec.window is not None:
        visible &= position[None, :] > position[:, None] - spec.window
    if spec.chunk is not None:
        visible &= position[None, :] // spec.chunk == position[:, None] // spec.chunk
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        of_heads = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, tokens, 1)
        scores = torch.cat([scores, of_heads], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)[..., :tokens]
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


@torch.inference_mode()
def dense_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """Logits of every position, float32 [T, V]."""
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))

    def mix(mixer: Mixer, given: Sequence[torch.Tensor]) -> torch.Tensor:
        return dense_attention(mixer, given, model.mixer_weights[mixer.layer].sinks)

    hidden = model.forward(model.functions, ids, positions, mix)
    return model.logits(model.functions, hidden)


class PagedSequence:
    """One sequence over the paged op: scattered blocks, any chunking of its tokens."""

    def __init__(self, model: Model, *, block_size: int = 4, capacity: int = 160) -> None:
        self.model, self.block_size, self.length, self.capacity = model, block_size, 0, capacity
        num_blocks = -(-capacity // block_size)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        self.block_table = order.to(torch.int32)[None]  # [1, num_blocks] int32, index -> block
        # NaN, so that a slot that is read before it is written shows.
        self.caches = [
            tuple(
                torch.full(
                    (num_blocks, block_size, kv.num_kv_heads, kv.head_dim),
                    torch.nan,
                    dtype=kv.dtype,
                )
                for _ in "kv"
            )
            for kv in model.kv_cache_spec()
        ]

    @torch.inference_mode()
    def append(self, tokens: list[int]) -> torch.Tensor:
        """Run the next tokens; their logits, float32 [T, V]."""
        begin, end = self.length, self.length + len(tokens)
        positions = torch.arange(begin, end)
        blocks = self.block_table[0][positions // self.block_size].long()
        slots = blocks * self.block_size + positions % self.block_size

        def mix(mixer: Mixer, given: Sequence[torch.Tensor]) -> torch.Tensor:
            query, key, value = given
            out = torch.empty_like(query)
            paged_attention(
                query,
                key,
                value,
                *self.caches[mixer.layer],
                self.block_table,
                torch.tensor([0, len(tokens)], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32),
                slots,
                out,
                mixer.spec.attention(self.model.mixer_weights[mixer.layer]),
                len(tokens),
                end,
            )
            return out.flatten(1)

        model = self.model
        hidden = model.forward(model.functions, torch.tensor(tokens), positions, mix)
        self.length = end
        return model.logits(model.functions, hidden)

    def greedy(self, prompt: list[int], count: int, *, chunk: int) -> list[int]:
        """Prefill `prompt` in chunks, then decode `count` tokens one by one."""
        logits = torch.empty(0)
        for start in range(0, len(prompt), chunk):
            logits = self.append(prompt[start : start + chunk])
        generated = [int(logits[-1].argmax())]
        while len(generated) < count:
            generated.append(int(self.append(generated[-1:])[-1].argmax()))
        return generated
