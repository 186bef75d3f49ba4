// What compiled code hands over, read through one interface for both kinds of tensors, and results of the
// kind that it has. For the mappings of compiled_entries.h.
#pragma once
#include "runtime/bound.h"

// A tensor of either kind.
struct Seen {
  void* data = nullptr;
  int64_t dims = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t torch_dtype = -1;

  explicit Seen(Tensor* tensor)
      : data(tensor->data),
        dims(tensor->dims),
        sizes(tensor->sizes),
        strides(tensor->strides),
        torch_dtype(tensor->dtype) {}

  explicit Seen(Handle tensor) {
    int64_t *its_sizes = nullptr, *its_strides = nullptr;
    slipstream_torch.get_data_ptr(tensor, &data);
    slipstream_torch.get_dim(tensor, &dims);
    slipstream_torch.get_sizes(tensor, &its_sizes);
    slipstream_torch.get_strides(tensor, &its_strides);
    slipstream_torch.get_dtype(tensor, &torch_dtype);
    sizes = its_sizes, strides = its_strides;
  }

  int dtype() const {
    for (const auto& pair : kTorchDTypes) {
      if (pair.torch == torch_dtype) return int(pair.ours);
    }
    return -1;
  }
};

// Where a tensor's elements lie; null for an absent one.
template <class T>
void* address_of(T* given) {
  return given == nullptr ? nullptr : Seen(*given).data;
}

// A matrix [outputs, inputs], or a stack of them, laid out as LinearArgs describes it.
struct SeenMatrix {
  int64_t sizes[3] = {};
  int64_t group = 0, group_dtype = kFloat32;

  template <class T>
  SeenMatrix(const Seen& values, T* scales, int64_t kind) {
    const bool in_strips =
        kind == kBFloat16Strips || kind == kInt8Strips || kind == kInt4Strips;
    const bool has_4_bits = kind == kInt4 || kind == kE2M1 || kind == kInt4Strips;
    const int64_t stacked = values.dims - (in_strips ? 3 : 2), last = values.dims - 1;
    for (int64_t i = 0; i < stacked; ++i) sizes[i] = values.sizes[i];
    int64_t &outputs = sizes[stacked], &inputs = sizes[stacked + 1];
    outputs = values.sizes[stacked] * (in_strips ? kStripOutputs : 1);
    const int64_t of_a_slice = has_4_bits ? 8 : kind == kBFloat16Strips ? 2 : 4;
    inputs = in_strips ? values.sizes[last - 1] * of_a_slice
                       : values.sizes[last] * (has_4_bits ? 2 : 1);
    if (scales == nullptr) return;
    const Seen seen(*scales);
    // Bytes are powers of two.
    group_dtype = seen.dtype() == kInt4 ? kPowers : seen.dtype();
    if (seen.dims == stacked + 1) {
      outputs = seen.sizes[stacked];
    } else {
      group = inputs / seen.sizes[stacked + 1];
    }
  }
};

// Runs a kernel into a new contiguous tensor of the kind of tensors that the caller has.
template <class Args, size_t dims>
int32_t run_into_new(Args args, int (*kernel)(const Args*), const int64_t (&sizes)[dims],
                     int32_t torch_dtype, Handle* result) {
  int64_t strides[dims];
  slipstream_contiguous_strides(int64_t(dims), sizes, strides);
  Handle out = nullptr;
  if (slipstream_torch.empty_strided(int64_t(dims), sizes, strides, torch_dtype, kCpu, kNoIndex,
                                     &out)) {
    return kOutOfMemory;
  }
  args.out = Seen(out).data;
  const int status = kernel(&args);
  if (status == kOk) {
    *result = out;
  } else {
    slipstream_torch.delete_tensor(out);
  }
  return status;
}

template <class Args, size_t dims>
int32_t run_into_new(Args args, int (*kernel)(const Args*), const int64_t (&sizes)[dims],
                     int32_t torch_dtype, Tensor** result) {
  int64_t strides[dims];
  slipstream_contiguous_strides(int64_t(dims), sizes, strides);
  Owned out(slipstream_allocate(int64_t(dims), sizes, strides, torch_dtype));
  if (!out) return kOutOfMemory;
  args.out = out->data;
  const int status = kernel(&args);
  if (status == kOk) *result = out.give();
  return status;
}
