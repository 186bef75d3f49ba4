// Calls code that AOTInductor compiled ahead of time, and provides it with this library's kernels.
//
// Tensors are passed as opaque handles: of this library (`tensors.h`), if the code was rewritten for
// them; else of libtorch's stable C interface. Its functions are passed as addresses, so building this
// needs neither its headers nor its libraries.
#include <algorithm>
#include <utility>

#include "bound.h"
#include "compiled_entries.h"

TorchFunctions slipstream_torch;
thread_local int64_t slipstream_threads = 1;

namespace {

// A tensor of either kind, read through one interface.
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

// The dtype of groups' numbers. Bytes are powers of two.
int64_t group_dtype_of(const Seen& scales) {
  return scales.dtype() == kInt4 ? kPowers : scales.dtype();
}

bool in_strips(int64_t kind) {
  return kind == kBFloat16Strips || kind == kInt8Strips || kind == kInt4Strips;
}

template <class T>
LinearArgs linear_args(const StreamedLinearGiven<T>& given) {
  const Seen x(given.x), weight(given.weight);
  T *const scales = given.scales, *const bias = given.bias, *const offsets = given.offsets;
  LinearArgs args{};
  args.tokens = x.sizes[0], args.inputs = x.sizes[1], args.outputs = weight.sizes[0];
  args.x_stride = x.strides[0], args.threads = slipstream_threads;
  args.dtype = x.dtype(), args.kind = given.kind;
  if (in_strips(args.kind)) args.outputs *= kStripOutputs;
  if (scales != nullptr) {
    const Seen seen(*scales);
    args.group = seen.dims == 1 ? 0 : args.inputs / seen.sizes[1];
    if (seen.dims == 1) args.outputs = seen.sizes[0];
    args.scales = seen.data;
    args.group_dtype = group_dtype_of(seen);
  }
  args.x = x.data, args.weight = weight.data;
  args.bias = bias == nullptr ? nullptr : Seen(*bias).data;
  if (offsets != nullptr) args.offsets = Seen(*offsets).data;
  return args;
}

// Layout of the experts' matrices [E, outputs, inputs], as LinearArgs describes it for one of them.
struct Held {
  int64_t outputs, group = 0, group_dtype = kFloat32;
  const void *scales = nullptr, *offsets = nullptr;

  template <class T>
  Held(const Seen& matrices, int64_t kind, T* scales_of, T* offsets_of, int64_t inputs)
      : outputs(matrices.sizes[1]) {
    if (in_strips(kind)) outputs *= kStripOutputs;
    if (scales_of == nullptr) return;
    const Seen seen(*scales_of);
    scales = seen.data;
    if (offsets_of != nullptr) offsets = Seen(*offsets_of).data;
    group_dtype = group_dtype_of(seen);
    if (seen.dims == 2) {
      outputs = seen.sizes[1];
    } else {
      group = inputs / seen.sizes[2];
    }
  }
};

template <class T>
AdaptArgs adapt_args(const AdaptGiven<T>& given) {
  const Seen base(given.base), x(given.x), down(given.down), up(given.up), ranks(given.ranks);
  AdaptArgs args{};
  args.base = base.data, args.x = x.data, args.down = down.data, args.up = up.data;
  args.ranks = static_cast<const int32_t*>(ranks.data);
  args.starts = static_cast<const int32_t*>(Seen(given.starts).data);
  args.chosen = static_cast<const int64_t*>(Seen(given.slots).data);
  args.tokens = base.sizes[0], args.outputs = base.sizes[1], args.inputs = x.sizes[1];
  args.x_stride = x.strides[0], args.slots = ranks.sizes[0], args.parts = ranks.sizes[1];
  args.room = up.sizes[1], args.dtype = base.dtype(), args.threads = slipstream_threads;
  return args;
}

template <class T>
ExpertsArgs experts_args(const ExpertsGiven<T>& given) {
  const Seen x(given.hidden), chosen(given.ids), first(given.gate_up), second(given.down);
  ExpertsArgs args{};
  args.x = x.data, args.tokens = x.sizes[0], args.hidden = x.sizes[1], args.x_stride = x.strides[0];
  args.dtype = x.dtype(), args.experts = first.sizes[0], args.chosen = chosen.sizes[1];
  const Held up(first, given.gate_up_kind, given.gate_up_scales, given.gate_up_offsets, args.hidden);
  args.gate_up = first.data, args.gate_up_scales = up.scales, args.gate_up_offsets = up.offsets;
  args.gate_up_kind = given.gate_up_kind, args.gate_up_group = up.group;
  args.gate_up_group_dtype = up.group_dtype;
  args.intermediate = up.outputs / 2;
  const Held last(second, given.down_kind, given.down_scales, given.down_offsets,
                  args.intermediate);
  args.down = second.data, args.down_scales = last.scales, args.down_offsets = last.offsets;
  args.down_kind = given.down_kind, args.down_group = last.group;
  args.down_group_dtype = last.group_dtype;
  const auto order = [](T* given) {
    return given == nullptr ? nullptr : static_cast<const int32_t*>(Seen(*given).data);
  };
  args.gate_up_order = order(given.gate_up_order), args.down_order = order(given.down_order);
  if (given.gate_up_bias != nullptr) args.gate_up_bias = Seen(*given.gate_up_bias).data;
  if (given.down_bias != nullptr) args.down_bias = Seen(*given.down_bias).data;
  args.weights = static_cast<const float*>(Seen(given.weights).data);
  args.ids = static_cast<const int64_t*>(chosen.data);
  args.activation = given.activation, args.alpha = given.alpha, args.limit = given.limit;
  args.weighs_inputs = given.weighs_inputs, args.threads = slipstream_threads;
  return args;
}

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

// Runs a kernel into a new tensor [rows, columns] of the kind of tensors that the caller has.
template <class Args>
int32_t run_into_new(Args args, int (*kernel)(const Args*), int64_t rows, int64_t columns,
                     int32_t torch_dtype, Handle* result) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  Handle out = nullptr;
  if (slipstream_torch.empty_strided(2, sizes, strides, torch_dtype, kCpu, kNoIndex, &out)) {
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

template <class Args>
int32_t run_into_new(Args args, int (*kernel)(const Args*), int64_t rows, int64_t columns,
                     int32_t torch_dtype, Tensor** result) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  Owned out(slipstream_allocate(2, sizes, strides, torch_dtype));
  if (!out) return kOutOfMemory;
  args.out = out->data;
  const int status = kernel(&args);
  if (status == kOk) *result = out.give();
  return status;
}

template <class T>
int32_t compute(const StreamedLinearGiven<T>& given, T* result) {
  const LinearArgs args = linear_args(given);
  return run_into_new(args, slipstream_linear, args.tokens, args.outputs, Seen(given.x).torch_dtype,
                      result);
}

template <class T>
int32_t compute(const ExpertsGiven<T>& given, T* result) {
  const ExpertsArgs args = experts_args(given);
  return run_into_new(args, slipstream_experts, args.tokens, args.hidden,
                      Seen(given.hidden).torch_dtype, result);
}

template <class T>
int32_t compute(const AdaptGiven<T>& given, T* result) {
  const AdaptArgs args = adapt_args(given);
  return run_into_new(args, slipstream_adapt, args.tokens, args.outputs,
                      Seen(given.base).torch_dtype, result);
}
