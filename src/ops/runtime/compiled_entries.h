// Written by `python -m src.ops.runtime.compiled_entries` from the ops' records.
// Included by compiled.cpp alone.
#pragma once
#include "runtime/seen.h"

// `streamed_linear`. T: Tensor*, or torch's Handle.
template <class T>
int32_t call_streamed_linear(T x, T weight, T* scales, T* offsets, int64_t kind, T* bias, T* result) {
  const Seen seen_x(x);
  const Seen values_of_weight(weight);
  const SeenMatrix seen_weight(values_of_weight, scales, kind);
  const int64_t size_tokens = seen_x.sizes[0];
  const int64_t size_inputs = seen_x.sizes[1];
  const int64_t size_outputs = seen_weight.sizes[0];
  LinearArgs args{};
  args.x = seen_x.data;
  args.weight = values_of_weight.data;
  args.scales = address_of(scales);
  args.offsets = address_of(offsets);
  args.bias = address_of(bias);
  args.tokens = size_tokens;
  args.inputs = size_inputs;
  args.outputs = size_outputs;
  args.x_stride = seen_x.strides[0];
  args.kind = kind;
  args.group = seen_weight.group;
  args.group_dtype = seen_weight.group_dtype;
  args.dtype = seen_x.dtype();
  args.threads = slipstream_threads;
  const int64_t shape[] = {size_tokens, size_outputs};
  return run_into_new(args, slipstream_linear, shape,
                      seen_x.torch_dtype, result);
}
SLIPSTREAM_EXPORT int32_t aoti_torch_cpu_streamed_linear(Handle x, Handle weight, Handle* scales,
    Handle* offsets, int64_t kind, Handle* bias, Handle* result) {
  return call_streamed_linear<Handle>(x, weight, scales, offsets, kind, bias, result);
}
SLIPSTREAM_EXPORT int32_t slipstream_cpu_streamed_linear(Tensor* x, Tensor* weight, Tensor** scales,
    Tensor** offsets, int64_t kind, Tensor** bias, Tensor** result) {
  return call_streamed_linear<Tensor*>(x, weight, scales, offsets, kind, bias, result);
}

// `experts`. T: Tensor*, or torch's Handle.
template <class T>
int32_t call_experts(T x, T gate_up, T* gate_up_scales, T* gate_up_offsets, T* gate_up_order,
    int64_t gate_up_kind, T down, T* down_scales, T* down_offsets, T* down_order, int64_t down_kind,
    T weights, T ids, T* gate_up_bias, T* down_bias, int64_t activation, double alpha, double limit,
    int32_t weighs_inputs, int32_t, T* result) {
  const Seen seen_x(x);
  const Seen values_of_gate_up(gate_up);
  const SeenMatrix seen_gate_up(values_of_gate_up, gate_up_scales, gate_up_kind);
  const Seen values_of_down(down);
  const SeenMatrix seen_down(values_of_down, down_scales, down_kind);
  const Seen seen_weights(weights);
  const Seen seen_ids(ids);
  const int64_t size_tokens = seen_x.sizes[0];
  const int64_t size_hidden = seen_x.sizes[1];
  const int64_t size_chosen = seen_weights.sizes[1];
  const int64_t size_experts = seen_gate_up.sizes[0];
  const int64_t size_intermediate = seen_down.sizes[2];
  ExpertsArgs args{};
  args.x = seen_x.data;
  args.gate_up = values_of_gate_up.data;
  args.gate_up_scales = address_of(gate_up_scales);
  args.gate_up_offsets = address_of(gate_up_offsets);
  args.gate_up_order = static_cast<const int32_t*>(address_of(gate_up_order));
  args.down = values_of_down.data;
  args.down_scales = address_of(down_scales);
  args.down_offsets = address_of(down_offsets);
  args.down_order = static_cast<const int32_t*>(address_of(down_order));
  args.weights = static_cast<const float*>(seen_weights.data);
  args.ids = static_cast<const int64_t*>(seen_ids.data);
  args.gate_up_bias = address_of(gate_up_bias);
  args.down_bias = address_of(down_bias);
  args.tokens = size_tokens;
  args.hidden = size_hidden;
  args.experts = size_experts;
  args.intermediate = size_intermediate;
  args.chosen = size_chosen;
  args.x_stride = seen_x.strides[0];
  args.gate_up_kind = gate_up_kind;
  args.gate_up_group = seen_gate_up.group;
  args.gate_up_group_dtype = seen_gate_up.group_dtype;
  args.down_kind = down_kind;
  args.down_group = seen_down.group;
  args.down_group_dtype = seen_down.group_dtype;
  args.activation = activation;
  args.alpha = alpha;
  args.limit = limit;
  args.weighs_inputs = weighs_inputs;
  args.dtype = seen_x.dtype();
  args.threads = slipstream_threads;
  const int64_t shape[] = {size_tokens, size_hidden};
  return run_into_new(args, slipstream_experts, shape,
                      seen_x.torch_dtype, result);
}
SLIPSTREAM_EXPORT int32_t aoti_torch_cpu_experts(Handle x, Handle gate_up, Handle* gate_up_scales,
    Handle* gate_up_offsets, Handle* gate_up_order, int64_t gate_up_kind, Handle down, Handle*
    down_scales, Handle* down_offsets, Handle* down_order, int64_t down_kind, Handle weights, Handle
    ids, Handle* gate_up_bias, Handle* down_bias, int64_t activation, double alpha, double limit,
    int32_t weighs_inputs, int32_t deterministic, Handle* result) {
  return call_experts<Handle>(x, gate_up, gate_up_scales, gate_up_offsets, gate_up_order,
    gate_up_kind, down, down_scales, down_offsets, down_order, down_kind, weights, ids,
    gate_up_bias, down_bias, activation, alpha, limit, weighs_inputs, deterministic, result);
}
SLIPSTREAM_EXPORT int32_t slipstream_cpu_experts(Tensor* x, Tensor* gate_up, Tensor**
    gate_up_scales, Tensor** gate_up_offsets, Tensor** gate_up_order, int64_t gate_up_kind, Tensor*
    down, Tensor** down_scales, Tensor** down_offsets, Tensor** down_order, int64_t down_kind,
    Tensor* weights, Tensor* ids, Tensor** gate_up_bias, Tensor** down_bias, int64_t activation,
    double alpha, double limit, int32_t weighs_inputs, int32_t deterministic, Tensor** result) {
  return call_experts<Tensor*>(x, gate_up, gate_up_scales, gate_up_offsets, gate_up_order,
    gate_up_kind, down, down_scales, down_offsets, down_order, down_kind, weights, ids,
    gate_up_bias, down_bias, activation, alpha, limit, weighs_inputs, deterministic, result);
}

// `lora`. T: Tensor*, or torch's Handle.
template <class T>
int32_t call_lora(T base, T x, T down, T up, T ranks, T starts, T slots, T* result) {
  const Seen seen_base(base);
  const Seen seen_x(x);
  const Seen seen_down(down);
  const Seen seen_up(up);
  const Seen seen_ranks(ranks);
  const Seen seen_starts(starts);
  const Seen seen_slots(slots);
  const int64_t size_tokens = seen_base.sizes[0];
  const int64_t size_outputs = seen_base.sizes[1];
  const int64_t size_inputs = seen_x.sizes[1];
  const int64_t size_num_slots = seen_down.sizes[0];
  const int64_t size_room = seen_up.sizes[1];
  const int64_t size_parts = seen_ranks.sizes[1];
  LoraArgs args{};
  args.base = seen_base.data;
  args.x = seen_x.data;
  args.down = seen_down.data;
  args.up = seen_up.data;
  args.ranks = static_cast<const int32_t*>(seen_ranks.data);
  args.starts = static_cast<const int32_t*>(seen_starts.data);
  args.chosen = static_cast<const int64_t*>(seen_slots.data);
  args.tokens = size_tokens;
  args.outputs = size_outputs;
  args.inputs = size_inputs;
  args.slots = size_num_slots;
  args.parts = size_parts;
  args.room = size_room;
  args.x_stride = seen_x.strides[0];
  args.dtype = seen_base.dtype();
  args.threads = slipstream_threads;
  const int64_t shape[] = {size_tokens, size_outputs};
  return run_into_new(args, slipstream_lora, shape,
                      seen_base.torch_dtype, result);
}
SLIPSTREAM_EXPORT int32_t aoti_torch_cpu_lora(Handle base, Handle x, Handle down, Handle up, Handle
    ranks, Handle starts, Handle slots, Handle* result) {
  return call_lora<Handle>(base, x, down, up, ranks, starts, slots, result);
}
SLIPSTREAM_EXPORT int32_t slipstream_cpu_lora(Tensor* base, Tensor* x, Tensor* down, Tensor* up,
    Tensor* ranks, Tensor* starts, Tensor* slots, Tensor** result) {
  return call_lora<Tensor*>(base, x, down, up, ranks, starts, slots, result);
}
