"""From token ids to hidden states: the model's regions, and attention over KV memory between."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from src.core.errors import SlipstreamError
from src.engine.execution.inputs import AttentionRows, StepInputs
from src.engine.execution.kv_cache import KVCache
from src.models.decoder import Attend, Decoder
from src.models.regions import Regions
from src.ops import paged_attention, rotate_and_cache, step_schedule
from src.ops.cpu.step import CompiledStep


class WorkerClosedError(SlipstreamError):
    """The worker was closed while it was in use."""


class Code(NamedTuple):
    """What a step runs."""

    regions: Regions
    # Everything from rows to tokens in one call; None: region by region.
    step: CompiledStep | None = None


class ForwardPass:
    """A model with its KV memory."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache) -> None:
        self.decoder = decoder
        self.kv_cache = kv_cache
        self._stopped = False

    def stop(self) -> None:
        """Let no pass go on behind the region that it is in, in whatever thread."""
        self._stopped = True

    def __call__(self, inputs: StepInputs, regions: Regions) -> Tensor:
        """Hidden states [T, hidden_size], or [S, hidden_size] with ``inputs.last``.

        Raises
        ------
        WorkerClosedError
            After :meth:`stop`.
        """
        last = self.decoder.spec.num_layers - 1

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if inputs.last is not None and layer == last:
                return self._attend_sampled(inputs, inputs.last, query, key, value).flatten(1)
            # Not empty_like: a slice of one token would hand its row stride on.
            out = query.new_empty(query.shape)  # [T, num_heads, head_dim]
            self.attend(inputs, layer, query, key, value, out)
            return out.flatten(1)

        kept = None if inputs.last is None else inputs.sample_index_s
        return self.regions(regions, inputs.input_ids_t, inputs.positions_t, attend, kept)

    def regions(
        self,
        regions: Regions,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        kept: Tensor | None = None,
    ) -> Tensor:
        """The same with another attention; arguments as of `Decoder.forward`."""
        return self.decoder.forward(regions, input_ids, positions, attend, kept)

    def attend(
        self,
        inputs: StepInputs,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
    ) -> None:
        """Write ``layer``'s keys and values, and attend into ``out`` [T, num_heads, head_dim].

        ``query`` is overwritten where the regions leave its rotation to an op.
        """
        if self._stopped:
            raise WorkerClosedError("the worker was closed")
        if self.decoder.region_spec.rotates_in_op:
            self._rotate_and_cache(inputs, layer, query, key, value, out)
            self._attend(inputs, layer, query, None, None, out)
        else:
            self._attend(inputs, layer, query, key, value, out)

    def _attend_sampled(
        self, inputs: StepInputs, rows: AttentionRows, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention of the last layer, [S, num_heads, head_dim], for what is sampled from.

        Keys and values of every token are written, for the steps to come.
        """
        if self._stopped:
            raise WorkerClosedError("the worker was closed")
        layer, kept = self.decoder.spec.num_layers - 1, inputs.sample_index_s
        written: tuple[Tensor | None, Tensor | None] = (None, None)
        out = query.new_empty(query.shape)
        if self.decoder.region_spec.rotates_in_op:
            self._rotate_and_cache(inputs, layer, query, key, value, out)
        else:
            self._attend(inputs.without_rows(), layer, query, key, value, out)
            written = (key[kept], value[kept])
        if len(kept):
            self._attend(rows, layer, query[kept], *written, out[: len(kept)])
        return out[: len(kept)]

    def _attend(
        self,
        rows: AttentionRows,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        out: Tensor,
    ) -> None:
        group = self.kv_cache.layout.group_of[layer]
        window = self.decoder.spec.sliding_windows[layer] or 0
        paged_attention(
            query,
            key,
            value,
            self.kv_cache.keys[layer],
            self.kv_cache.values[layer],
            rows.block_tables_b[group],
            rows.query_start_loc,
            rows.seq_lens_b,
            rows.slot_mappings_t[group],
            out,
            self.decoder.spec.attention_scale,
            window,
            rows.max_query_len,
            rows.max_seq_len,
            self.decoder.region_spec.deterministic,
            self._schedule(rows, layer, group, window),
        )

    def _rotate_and_cache(
        self,
        inputs: StepInputs,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
    ) -> None:
        pre = self.decoder.pre[layer]
        rotate_and_cache(
            query,
            key,
            value,
            pre.q_norm,
            pre.k_norm,
            self.decoder.spec.rms_norm_eps,
            self.decoder.rope_table,
            inputs.positions_t,
            inputs.slot_mappings_t[self.kv_cache.layout.group_of[layer]],
            self.kv_cache.keys[layer],
            self.kv_cache.values[layer],
            out,
        )

    def _schedule(self, rows: AttentionRows, layer: int, group: int, window: int) -> Tensor | None:
        """Which keys a GPU's programs read: laid out by the first layer of this group."""
        if group not in rows.decode_schedules:
            rows.decode_schedules[group] = step_schedule(
                self.kv_cache.keys[layer],
                self.decoder.region_spec.num_heads,
                rows.block_tables_b[group],
                rows.query_start_loc,
                rows.seq_lens_b,
                window,
            )
        return rows.decode_schedules[group]
