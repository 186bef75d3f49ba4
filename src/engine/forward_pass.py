"""From token ids to hidden states: the model's regions, and attention over KV memory between."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from src.core.errors import SlipstreamError
from src.engine.inputs import StepInputs
from src.engine.kv_cache import KVCache
from src.models.decoder import Attend, Decoder
from src.models.regions import Regions
from src.ops import paged_attention, rotate_and_cache, step_schedule
from src.ops.cpu.step import CompiledStep


class RunnerClosedError(SlipstreamError):
    """The runner was closed while it was in use."""


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
        """Hidden states [T, hidden_size].

        Raises
        ------
        RunnerClosedError
            After :meth:`stop`.
        """

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # Not empty_like: a slice of one token would hand its row stride on.
            out = query.new_empty(query.shape)  # [T, num_heads, head_dim]
            self.attend(inputs, layer, query, key, value, out)
            return out.flatten(1)

        return self.regions(regions, inputs.input_ids_t, inputs.positions_t, attend)

    def regions(
        self, regions: Regions, input_ids: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """The same with another attention; arguments as of `Decoder.forward`."""
        return self.decoder.forward(regions, input_ids, positions, attend)

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
            raise RunnerClosedError("the runner was closed")
        spec, region_spec = self.decoder.spec, self.decoder.region_spec
        window = spec.sliding_windows[layer] or 0
        cached = region_spec.rotates_in_op
        if cached:
            self._rotate_and_cache(inputs, layer, query, key, value, out)
        paged_attention(
            query,
            None if cached else key,
            None if cached else value,
            self.kv_cache.keys[layer],
            self.kv_cache.values[layer],
            inputs.block_tables_b,
            inputs.query_start_loc,
            inputs.seq_lens_b,
            inputs.slot_mapping_t,
            out,
            spec.attention_scale,
            window,
            inputs.max_query_len,
            inputs.max_seq_len,
            region_spec.deterministic,
            self._schedule(inputs, layer, window),
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
            inputs.slot_mapping_t,
            self.kv_cache.keys[layer],
            self.kv_cache.values[layer],
            out,
        )

    def _schedule(self, inputs: StepInputs, layer: int, window: int) -> Tensor | None:
        """Which keys a GPU's programs read: laid out by a step's first layer with this window."""
        if window not in inputs.decode_schedules:
            inputs.decode_schedules[window] = step_schedule(
                self.kv_cache.keys[layer],
                self.decoder.region_spec.num_heads,
                inputs.block_tables_b,
                inputs.query_start_loc,
                inputs.seq_lens_b,
                window,
            )
        return inputs.decode_schedules[window]
