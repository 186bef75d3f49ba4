"""Two ways to run a `Model` without the engine: dense attention, and the paged op by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from src.core.plan import RowInstall, StepPlan
from src.engine.execution.inputs import StepInputs
from src.engine.execution.kv_cache import KVCachePlan, allocate_kv_cache
from src.engine.execution.kv_groups import lay_out
from src.engine.execution.mixers import MIXERS
from src.engine.sampling import SampleBatch
from src.models import Mixer, Model
from src.models.layers.latent_attention import LatentMixerWeights
from src.models.program import Mix

CPU = torch.device("cpu")


def dense_mix(model: Model) -> Mix:
    """What computes a model's mixers over one sequence that is given whole."""

    def mix(mixer: Mixer, given: Sequence[torch.Tensor]) -> torch.Tensor:
        if mixer.kind == "latent_attention":
            return _dense_latent_attention(mixer, given, model.mixer_weights[mixer.layer])
        if mixer.kind == "recurrence":
            return dense_recurrence(mixer, model.mixer_weights[mixer.layer], given)
        if mixer.kind == "short_convolution":
            return dense_convolution(model.mixer_weights[mixer.layer], given[0])
        return dense_attention(mixer, given, model.mixer_weights[mixer.layer].sinks)

    return mix


def dense_attention(
    mixer: Mixer, given: Sequence[torch.Tensor], sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention over one sequence that is given whole, written as plainly as can be."""
    (query, key, value), spec = given, mixer.spec
    tokens, heads, _ = query.shape
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    value = value.repeat_interleave(heads // value.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * spec.scale
    if spec.cap is not None:
        scores = torch.tanh(scores / spec.cap) * spec.cap
    position = torch.arange(tokens)
    visible = position[None, :] <= position[:, None] + (spec.ahead or 0)
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


def _dense_latent_attention(
    mixer: Mixer, given: Sequence[torch.Tensor], weights: LatentMixerWeights
) -> torch.Tensor:
    (query, latent), spec = given, mixer.spec
    tokens, rank = len(query), spec.rank
    made = torch.einsum("kr,hdr->khd", latent[:, :rank], weights.up)
    key, value = made.split((made.shape[-1] - spec.value_dim, spec.value_dim), dim=-1)
    shared = latent[:, None, rank:].expand(-1, spec.num_heads, -1)
    scores = torch.einsum("qhd,khd->hqk", query, torch.cat((key, shared), dim=-1)) * spec.scale
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    probabilities = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("hqk,khd->qhd", probabilities, value).flatten(1)


def dense_convolution(weights: Any, channels: torch.Tensor) -> torch.Tensor:
    """The causal convolution [T, C] of one sequence that is given whole, channel by channel."""
    taps = weights.weight.T[:, None]
    padded = functional.pad(channels.T, (taps.shape[-1] - 1, 0))[None]
    convolved = functional.conv1d(padded, taps, weights.bias, groups=channels.shape[1])[0].T
    # The strides of one token, too, are those that an op's output has.
    return convolved.clone(memory_format=torch.contiguous_format)


def dense_recurrence(mixer: Mixer, weights: Any, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """The convolution and the state of one sequence that is given whole, token by token."""
    (channels, decay, factor), spec = given, mixer.spec
    convolved = dense_convolution(weights, channels)
    query, key, value = (part.float() for part in spec.parts(functional.silu(convolved)))
    if spec.normalizes:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        query = query / query.shape[-1] ** 0.5
    shared = spec.heads // spec.key_heads
    query, key = (x.repeat_interleave(shared, dim=1) for x in (query, key))
    state, read = torch.zeros(spec.heads, spec.key_dim, spec.dim), []
    for t in range(len(channels)):
        state = state * decay[t].exp()[:, None, None]
        held = torch.einsum("hnp,hn->hp", state, key[t]) if spec.delta else 0.0
        written = factor[t][:, None] * (value[t] - held)
        state = state + torch.einsum("hn,hp->hnp", key[t], written)
        read.append(torch.einsum("hnp,hn->hp", state, query[t]))
    out = torch.stack(read)
    if weights.skip is not None:
        out = out + weights.skip[:, None] * value
    return out.to(channels.dtype).flatten(1)


@torch.inference_mode()
def dense_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """Logits of every position, float32 [T, V]."""
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    hidden = model.forward(model.functions, ids, positions, dense_mix(model))
    return model.logits(model.functions, hidden)


class PagedSequence:
    """One sequence over the engine's mixers: scattered blocks, any chunking of its tokens."""

    def __init__(self, model: Model, *, block_size: int = 4, capacity: int = 160) -> None:
        self.model, self.block_size, self.length, self.capacity = model, block_size, 0, capacity
        layers = model.kv_cache_spec()
        per_group = -(-capacity // block_size)
        groups = lay_out(layers, block_size).groups
        plan = KVCachePlan(block_size, per_group * len(groups), bytes_per_block=0)
        # NaN, so that a slot that is read before it is written shows.
        cache = allocate_kv_cache(layers, plan, CPU, poison=True)
        if cache.states is not None:
            cache.states.begin(StepPlan(1, [RowInstall(0, 1, 0, [0], 1, [])], [], []))
        order = torch.randperm(plan.num_blocks, generator=torch.Generator().manual_seed(1))
        # Per group [1, per_group] int32, index -> block
        self.block_tables = tuple(
            (blocks * group.page_blocks).to(torch.int32)[None]
            for blocks, group in zip(order.split(per_group), groups, strict=True)
        )
        self.mixers = [
            MIXERS[mixer.kind](mixer, weights, cache, None)
            for mixer, weights in zip(model.mixers, model.mixer_weights, strict=True)
        ]

    @torch.inference_mode()
    def append(
        self, tokens: list[int], outputs: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run the next tokens; their logits, float32 [T, V]. `outputs` gets the program's."""
        begin, end = self.length, self.length + len(tokens)
        ids, positions = torch.tensor(tokens), torch.arange(begin, end)
        slots = [
            table[0][positions // self.block_size].long() * self.block_size
            + positions % self.block_size
            for table in self.block_tables
        ]
        none = ids[:0]
        inputs = StepInputs(
            slot_mappings_t=tuple(slots),
            query_start_loc=torch.tensor([0, len(tokens)], dtype=torch.int32),
            seq_lens_b=torch.tensor([end], dtype=torch.int32),
            block_tables_b=self.block_tables,
            max_query_len=len(tokens),
            max_seq_len=end,
            input_ids_t=ids,
            positions_t=positions,
            sample_index_s=none,
            samplers=SampleBatch([], [], none),
            sampled_rows_s=none,
            sampled_positions_s=none,
            rows_b=torch.zeros(1, dtype=torch.int64),
        )

        def mix(mixer: Mixer, given: Sequence[torch.Tensor]) -> torch.Tensor:
            out = given[0].new_empty(len(tokens), *mixer.writes.shape)
            computes = self.mixers[mixer.layer]
            metadata = computes.prepare(inputs, None)
            computes.mix(inputs, metadata, given, computes.view_of(out, given))
            return out

        model = self.model
        hidden = model.forward(model.functions, ids, positions, mix, outputs=outputs)
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
