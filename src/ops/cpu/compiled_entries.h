// Written by `python -m src.ops.cpu.entries` from the ops' schemas.
// Included by compiled.cpp alone.
#pragma once

// Arguments of `streamed_linear`. T: Tensor*, or torch's Handle.
template <class T>
struct StreamedLinearGiven {
  T x;
  T weight;
  T* scales;
  T* bias;
  int64_t kind;
  T* offsets;
};
template <class T>
int32_t compute(const StreamedLinearGiven<T>& given, T* result);
SLIPSTREAM_EXPORT int32_t aoti_torch_cpu_streamed_linear(Handle x, Handle weight, Handle* scales,
    Handle* bias, int64_t kind, Handle* offsets, Handle* result) {
  return compute(StreamedLinearGiven<Handle>{x, weight, scales, bias, kind, offsets}, result);
}
SLIPSTREAM_EXPORT int32_t slipstream_cpu_streamed_linear(Tensor* x, Tensor* weight, Tensor** scales,
    Tensor** bias, int64_t kind, Tensor** offsets, Tensor** result) {
  return compute(StreamedLinearGiven<Tensor*>{x, weight, scales, bias, kind, offsets}, result);
}

// Arguments of `experts`. T: Tensor*, or torch's Handle.
template <class T>
struct ExpertsGiven {
  T hidden;
  T gate_up;
  T down;
  T weights;
  T ids;
  T* gate_up_scales;
  T* down_scales;
  T* gate_up_bias;
  T* down_bias;
  int64_t activation;
  double alpha;
  double limit;
  int32_t weighs_inputs;
  int32_t deterministic;
  int64_t gate_up_kind;
  int64_t down_kind;
  T* gate_up_offsets;
  T* down_offsets;
  T* gate_up_order;
  T* down_order;
};
template <class T>
int32_t compute(const ExpertsGiven<T>& given, T* result);
SLIPSTREAM_EXPORT int32_t aoti_torch_cpu_experts(Handle hidden, Handle gate_up, Handle down, Handle
    weights, Handle ids, Handle* gate_up_scales, Handle* down_scales, Handle* gate_up_bias, Handle*
    down_bias, int64_t activation, double alpha, double limit, int32_t weighs_inputs, int32_t
    deterministic, int64_t gate_up_kind, int64_t down_kind, Handle* gate_up_offsets, Handle*
    down_offsets, Handle* gate_up_order, Handle* down_order, Handle* result) {
  return compute(ExpertsGiven<Handle>{hidden, gate_up, down, weights, ids, gate_up_scales,
    down_scales, gate_up_bias, down_bias, activation, alpha, limit, weighs_inputs, deterministic,
    gate_up_kind, down_kind, gate_up_offsets, down_offsets, gate_up_order, down_order}, result);
}
SLIPSTREAM_EXPORT int32_t slipstream_cpu_experts(Tensor* hidden, Tensor* gate_up, Tensor* down,
    Tensor* weights, Tensor* ids, Tensor** gate_up_scales, Tensor** down_scales, Tensor**
    gate_up_bias, Tensor** down_bias, int64_t activation, double alpha, double limit, int32_t
    weighs_inputs, int32_t deterministic, int64_t gate_up_kind, int64_t down_kind, Tensor**
    gate_up_offsets, Tensor** down_offsets, Tensor** gate_up_order, Tensor** down_order, Tensor**
    result) {
  return compute(ExpertsGiven<Tensor*>{hidden, gate_up, down, weights, ids, gate_up_scales,
    down_scales, gate_up_bias, down_bias, activation, alpha, limit, weighs_inputs, deterministic,
    gate_up_kind, down_kind, gate_up_offsets, down_offsets, gate_up_order, down_order}, result);
}

// Arguments of `adapt`. T: Tensor*, or torch's Handle.
template <class T>
struct AdaptGiven {
  T base;
  T x;
  T down;
  T up;
  T ranks;
  T starts;
  T slots;
};
template <class T>
int32_t compute(const AdaptGiven<T>& given, T* result);
SLIPSTREAM_EXPORT int32_t aoti_torch_cpu_adapt(Handle base, Handle x, Handle down, Handle up, Handle
    ranks, Handle starts, Handle slots, Handle* result) {
  return compute(AdaptGiven<Handle>{base, x, down, up, ranks, starts, slots}, result);
}
SLIPSTREAM_EXPORT int32_t slipstream_cpu_adapt(Tensor* base, Tensor* x, Tensor* down, Tensor* up,
    Tensor* ranks, Tensor* starts, Tensor* slots, Tensor** result) {
  return compute(AdaptGiven<Tensor*>{base, x, down, up, ranks, starts, slots}, result);
}
