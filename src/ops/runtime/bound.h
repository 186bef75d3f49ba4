// Tensors by handle, and compiled functions with their weights; shared by all callers of compiled code.
#pragma once
#include <vector>

#include "runtime/tensors.h"

extern TorchFunctions slipstream_torch;

// Number of threads of the compiled function that runs in this thread.
extern thread_local int64_t slipstream_threads;
// Number of tokens in its call.
extern thread_local int64_t slipstream_tokens;

constexpr int32_t kCpu = 0;
constexpr int32_t kNoIndex = -1;

// A tensor over contiguous `data` with the shape of token argument `input` for `tokens` tokens.
inline Tensor* view(const BoundInput& input, const void* data, int64_t tokens) {
  int64_t sizes[kMaxDims], strides[kMaxDims];
  for (int64_t i = 0; i < input.dims; ++i) sizes[i] = i == 0 ? tokens : input.sizes[i];
  slipstream_contiguous_strides(input.dims, sizes, strides);
  return slipstream_view(const_cast<void*>(data), nullptr, input.dims, sizes, strides,
                         int32_t(input.dtype));
}

struct Bound {
  CompiledFunction* run;
  void* container;
  int64_t outputs, threads;
  bool has_own_tensors;  // whether a Handle is a Tensor (tensors.h) to its code; else one of torch
  std::vector<BoundInput> inputs;
  std::vector<Tensor*> weights{};         // for own tensors: one per input, null for token arguments
  mutable std::vector<Handle> handles{};  // of the call that is running

  // `given` are the token arguments in order; their references are consumed in any case. The caller
  // owns a reference of each result; results are null on failure.
  int call(int64_t tokens, Owned* given, Tensor** results) const;

  // Token argument number `index`.
  const BoundInput& token_input(int index) const {
    size_t i = 0;
    for (; inputs[i].handle != nullptr || index-- > 0; ++i) {
    }
    return inputs[i];
  }

 private:
  int call_with_torch(Owned* given, Tensor** results) const;
  int run_with(Handle* results) const;
  void drop(Handle result) const;
};
