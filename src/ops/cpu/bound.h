// Tensors by handle, and compiled functions with their weights: what those share who call them.
#pragma once
#include <vector>

#include "abi.h"

extern TorchFunctions slipstream_torch;

// Intra-op threads of the compiled function that runs in this thread.
extern thread_local int64_t slipstream_threads;

constexpr int32_t kCpu = 0;
constexpr int32_t kNoIndex = -1;

// A handle that goes with its scope, unless it was given away.
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { reset(); }

  Handle* receive() { return reset(), &handle_; }
  Handle get() const { return handle_; }
  Handle give() {
    Handle given = handle_;
    handle_ = nullptr;
    return given;
  }
  void reset() {
    if (handle_ != nullptr) slipstream_torch.delete_tensor(handle_);
    handle_ = nullptr;
  }

  char* data() const {
    void* pointer = nullptr;
    slipstream_torch.get_data_ptr(handle_, &pointer);
    return static_cast<char*>(pointer);
  }
  const int64_t* sizes() const {
    int64_t* sizes = nullptr;
    slipstream_torch.get_sizes(handle_, &sizes);
    return sizes;
  }
  const int64_t* strides() const {
    int64_t* strides = nullptr;
    slipstream_torch.get_strides(handle_, &strides);
    return strides;
  }

 private:
  Handle handle_ = nullptr;
};

// What lies at `data`, contiguous, seen as token argument `input` with `tokens` tokens.
inline bool view(const BoundInput& input, const void* data, int64_t tokens, Handle* result) {
  int64_t sizes[kMaxDims], strides[kMaxDims];
  int64_t stride = 1;
  for (int64_t i = input.dims - 1; i >= 0; --i) {
    sizes[i] = i == 0 ? tokens : input.sizes[i];
    strides[i] = stride;
    stride *= sizes[i];
  }
  return slipstream_torch.from_blob(const_cast<void*>(data), input.dims, sizes, strides, 0,
                                    int32_t(input.dtype), kCpu, kNoIndex, result) == 0;
}

struct Bound {
  CompiledFunction* run;
  void* container;
  int64_t outputs, threads;
  std::vector<BoundInput> inputs;

  // `given` are the token arguments in order; all of them are used up, whatever happens.
  int call(Owned* given, Handle* results) const {
    std::vector<Handle> handles(inputs.size(), nullptr);
    bool is_whole = true;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].handle == nullptr) {
        handles[i] = (given++)->give();
      } else {
        is_whole = slipstream_torch.new_handle(inputs[i].handle, &handles[i]) == 0 && is_whole;
      }
    }
    if (!is_whole) {
      for (Handle handle : handles) {
        if (handle != nullptr) slipstream_torch.delete_tensor(handle);
      }
      return kOutOfMemory;
    }
    slipstream_threads = threads;
    int failed = run(container, handles.data(), handles.size(), results, size_t(outputs), nullptr,
                     nullptr);
    return failed ? kCompiledFailed : kOk;
  }

  // Token argument number `index`.
  const BoundInput& token_input(int index) const {
    size_t i = 0;
    for (; inputs[i].handle != nullptr || index-- > 0; ++i) {
    }
    return inputs[i];
  }
};
