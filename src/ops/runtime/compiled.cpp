// Calls code that AOTInductor compiled ahead of time, and provides it with this library's kernels.
//
// Tensors are passed as opaque handles: of this library (`tensors.h`), if the code was rewritten for
// them; else of libtorch's stable C interface. Its functions are passed as addresses, so building this
// needs neither its headers nor its libraries.
#include <algorithm>
#include <utility>

#include "runtime/compiled_entries.h"

TorchFunctions slipstream_torch;
thread_local int64_t slipstream_threads = 1;

namespace {

bool lies_in(const void* data, const Tensor& tensor) {
  const int64_t items = slipstream_extent(tensor.dims, tensor.sizes, tensor.strides);
  const char* place = static_cast<const char*>(data);
  return place >= tensor.data &&
         place < tensor.data + items * slipstream_item_size(tensor.dtype);
}

}  // namespace

int Bound::call(int64_t tokens, Owned* given, Tensor** results) const {
  slipstream_threads = threads;
  slipstream_tokens = tokens;
  if (!has_own_tensors) return call_with_torch(given, results);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_weight = inputs[i].handle != nullptr;
    if (is_weight) ++weights[i]->references;
    handles[i] = is_weight ? weights[i] : (given++)->give();
  }
  return run_with(reinterpret_cast<Handle*>(results));
}

// Runs the code. If two results are one tensor, the code returns one reference for both; a second is added.
int Bound::run_with(Handle* results) const {
  std::fill(results, results + outputs, nullptr);
  const int failed = run(container, handles.data(), handles.size(), results, size_t(outputs),
                         nullptr, nullptr);
  for (Handle* each = results; each < results + outputs; ++each) {
    if (*each == nullptr) continue;
    const bool is_again = std::find(results, each, *each) != each;
    if (failed && !is_again) drop(*each);
    if (failed || !is_again) continue;
    if (has_own_tensors) {
      ++static_cast<Tensor*>(*each)->references;
    } else if (slipstream_torch.new_handle(*each, each) != 0) {
      *each = nullptr;
    }
  }
  if (failed) std::fill(results, results + outputs, nullptr);
  return failed ? kCompiledFailed : kOk;
}

void Bound::drop(Handle result) const {
  if (has_own_tensors) {
    slipstream_release(static_cast<Tensor*>(result));
  } else {
    slipstream_torch.delete_tensor(result);
  }
}

int Bound::call_with_torch(Owned* given, Tensor** results) const {
  Owned arguments[kMaxTokenInputs];
  int count = 0;
  bool is_whole = true;
  for (size_t i = 0; i < inputs.size(); ++i) {
    handles[i] = nullptr;
    if (inputs[i].handle != nullptr) {
      is_whole = slipstream_torch.new_handle(inputs[i].handle, &handles[i]) == 0 && is_whole;
      continue;
    }
    Tensor* tensor = *arguments[count++].receive() = (given++)->give();
    is_whole = slipstream_torch.from_blob(tensor->data, tensor->dims, tensor->sizes,
                                          tensor->strides, 0, tensor->dtype, kCpu, kNoIndex,
                                          &handles[i]) == 0 &&
               is_whole;
  }
  if (!is_whole) {
    for (Handle handle : handles) {
      if (handle != nullptr) slipstream_torch.delete_tensor(handle);
    }
    return kOutOfMemory;
  }
  Handle made[kMaxResults] = {};
  if (int status = run_with(made)) return status;
  for (int64_t i = 0; i < outputs; ++i) {
    results[i] = nullptr;
    is_whole = is_whole && made[i] != nullptr;
    if (made[i] == nullptr) continue;
    Tensor* source = nullptr;
    const void* data = Seen(made[i]).data;
    for (int j = 0; j < count; ++j) {
      if (lies_in(data, *arguments[j])) source = arguments[j].get();
    }
    results[i] = slipstream_from_torch(made[i], source);
    is_whole = is_whole && results[i] != nullptr;
  }
  if (is_whole) return kOk;
  for (int64_t i = 0; i < outputs; ++i) {
    if (results[i] != nullptr) slipstream_release(std::exchange(results[i], nullptr));
  }
  return kOutOfMemory;
}

void slipstream_use_torch(const TorchFunctions* functions) { slipstream_torch = *functions; }

Bound* slipstream_bind(CompiledFunction* run, void* container, const BoundInput* inputs,
                       int64_t num_inputs, int64_t num_outputs, int64_t threads,
                       int64_t has_own_tensors) {
  auto* bound = new Bound{run, container, num_outputs, threads, has_own_tensors != 0,
                          {inputs, inputs + num_inputs}};
  bound->handles.resize(size_t(num_inputs));
  bool is_whole = true;
  for (BoundInput& input : bound->inputs) {
    const bool is_weight = has_own_tensors && input.handle != nullptr;
    bound->weights.push_back(is_weight ? slipstream_from_torch(input.handle) : nullptr);
    if (!is_weight || bound->weights.back() != nullptr) continue;
    input.handle = nullptr;
    is_whole = false;
  }
  if (is_whole) return bound;
  slipstream_unbind(bound);
  return nullptr;
}

void slipstream_unbind(Bound* bound) {
  for (size_t i = 0; i < bound->inputs.size(); ++i) {
    if (bound->weights[i] != nullptr) {
      slipstream_release(bound->weights[i]);
    } else if (bound->inputs[i].handle != nullptr) {
      slipstream_torch.delete_tensor(bound->inputs[i].handle);
    }
  }
  delete bound;
}

int slipstream_call(const Bound* bound, int64_t tokens, void* const* data, Handle* results) {
  Owned given[kMaxTokenInputs], made[kMaxResults];
  int count = 0;
  for (const BoundInput& input : bound->inputs) {
    if (input.handle != nullptr) continue;
    *given[count].receive() = view(input, data[count], tokens);
    if (!given[count++]) return kOutOfMemory;
  }
  ByTorch results_are(true);
  Tensor* tensors[kMaxResults] = {};
  if (int status = bound->call(tokens, given, tensors)) return status;
  for (int64_t i = 0; i < bound->outputs; ++i) *made[i].receive() = tensors[i];
  for (int64_t i = 0; i < bound->outputs; ++i) {
    results[i] = slipstream_to_torch(*made[i]);
    if (results[i] != nullptr) continue;
    while (i > 0) slipstream_torch.delete_tensor(results[--i]);
    return kOutOfMemory;
  }
  return kOk;
}
