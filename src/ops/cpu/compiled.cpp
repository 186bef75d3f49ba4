// Code that AOTInductor compiled ahead of time: calls it, and gives it this library's kernels.
//
// Tensors travel as opaque handles of libtorch's stable C interface, whose functions come by
// address, so that neither its headers nor its libraries are needed to build this.
#include <algorithm>
#include <iterator>
#include <memory>
#include <vector>

#include "abi.h"

namespace {

TorchFunctions torch_functions;

// Of the compiled function that runs in this thread.
thread_local int64_t current_threads = 1;

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
    if (handle_ != nullptr) torch_functions.delete_tensor(handle_);
    handle_ = nullptr;
  }

  char* data() const {
    void* pointer = nullptr;
    torch_functions.get_data_ptr(handle_, &pointer);
    return static_cast<char*>(pointer);
  }
  const int64_t* sizes() const {
    int64_t* sizes = nullptr;
    torch_functions.get_sizes(handle_, &sizes);
    return sizes;
  }
  const int64_t* strides() const {
    int64_t* strides = nullptr;
    torch_functions.get_strides(handle_, &strides);
    return strides;
  }

 private:
  Handle handle_ = nullptr;
};

// What lies at `data`, contiguous, seen as token argument `input` with `tokens` tokens.
bool view(const BoundInput& input, void* data, int64_t tokens, Handle* result) {
  int64_t sizes[kMaxDims], strides[kMaxDims];
  int64_t stride = 1;
  for (int64_t i = input.dims - 1; i >= 0; --i) {
    sizes[i] = i == 0 ? tokens : input.sizes[i];
    strides[i] = stride;
    stride *= sizes[i];
  }
  return torch_functions.from_blob(data, input.dims, sizes, strides, 0, int32_t(input.dtype), kCpu,
                                   kNoIndex, result) == 0;
}

int dtype_of(Handle tensor) {
  int32_t code = -1;
  torch_functions.get_dtype(tensor, &code);
  for (const auto& pair : kTorchDTypes) {
    if (pair.torch == code) return int(pair.ours);
  }
  return -1;
}

}  // namespace

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
        is_whole = torch_functions.new_handle(inputs[i].handle, &handles[i]) == 0 && is_whole;
      }
    }
    if (!is_whole) {
      for (Handle handle : handles) {
        if (handle != nullptr) torch_functions.delete_tensor(handle);
      }
      return kOutOfMemory;
    }
    current_threads = threads;
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

void slipstream_use_torch(const TorchFunctions* functions) { torch_functions = *functions; }

Bound* slipstream_bind(CompiledFunction* run, void* container, const BoundInput* inputs,
                       int64_t num_inputs, int64_t num_outputs, int64_t threads) {
  return new Bound{run, container, num_outputs, threads, {inputs, inputs + num_inputs}};
}

void slipstream_unbind(Bound* bound) {
  for (const BoundInput& input : bound->inputs) {
    if (input.handle != nullptr) torch_functions.delete_tensor(input.handle);
  }
  delete bound;
}

int slipstream_call(const Bound* bound, int64_t tokens, void* const* data, Handle* results) {
  Owned given[kMaxTokenInputs];
  int count = 0;
  for (const BoundInput& input : bound->inputs) {
    if (input.handle != nullptr) continue;
    if (!view(input, data[count], tokens, given[count].receive())) return kOutOfMemory;
    ++count;
  }
  return bound->call(given, results);
}

int slipstream_forward(const ForwardArgs* args) {
  const int64_t tokens = args->attention.tokens;
  AttentionArgs attention = args->attention;
  Owned given[kMaxTokenInputs];
  Handle results[4];
  const auto& positions = args->calls[0]->token_input(1);
  if (!view(args->calls[0]->token_input(0), args->input_ids, tokens, given[0].receive()) ||
      !view(positions, args->positions, tokens, given[1].receive())) {
    return kOutOfMemory;
  }
  if (int status = args->calls[0]->call(given, results)) return status;
  for (int64_t layer = 0; layer < args->layers; ++layer) {
    Owned query, key, value, residual;
    Owned* outputs[] = {&query, &key, &value, &residual};
    for (int i = 0; i < 4; ++i) *outputs[i]->receive() = results[i];
    attention.query = query.data();
    attention.key = key.data();
    attention.value = value.data();
    attention.query_stride = query.strides()[0];
    attention.key_stride = key.strides()[0];
    attention.value_stride = value.strides()[0];
    attention.key_cache = args->key_caches[layer];
    attention.value_cache = args->value_caches[layer];
    attention.sliding_window = args->sliding_windows[layer];
    if (int status = slipstream_paged_attention(&attention)) return status;
    const bool is_last = layer == args->layers - 1;
    const Bound& next = *args->calls[layer + 1];
    if (!view(next.token_input(0), attention.out, tokens, given[0].receive()) ||
        (!is_last && !view(positions, args->positions, tokens, given[2].receive()))) {
      return kOutOfMemory;
    }
    *given[1].receive() = residual.give();
    if (int status = next.call(given, is_last ? args->hidden : results)) return status;
  }
  return kOk;
}

// The name and the signature that generated code expects of the op `streamed_linear`.
SLIPSTREAM_EXPORT int32_t aoti_torch_cpu_streamed_linear(Handle x, Handle weight, Handle* scales,
                                                         Handle* bias, Handle* result) {
  auto data = [](Handle tensor) {
    void* pointer = nullptr;
    torch_functions.get_data_ptr(tensor, &pointer);
    return pointer;
  };
  int64_t *x_sizes = nullptr, *x_strides = nullptr, *weight_sizes = nullptr;
  torch_functions.get_sizes(x, &x_sizes);
  torch_functions.get_strides(x, &x_strides);
  torch_functions.get_sizes(weight, &weight_sizes);
  LinearArgs args{};
  args.tokens = x_sizes[0], args.inputs = x_sizes[1], args.outputs = weight_sizes[0];
  args.x_stride = x_strides[0], args.threads = current_threads;
  args.dtype = dtype_of(x), args.kind = dtype_of(weight);
  if (scales != nullptr) {
    int64_t dims = 0, *sizes = nullptr;
    torch_functions.get_dim(*scales, &dims);
    torch_functions.get_sizes(*scales, &sizes);
    args.group = dims == 1 ? 0 : args.inputs / sizes[1];
    args.scales = static_cast<const float*>(data(*scales));
  }
  const int64_t sizes[] = {args.tokens, args.outputs}, strides[] = {args.outputs, 1};
  int32_t code = -1;
  torch_functions.get_dtype(x, &code);
  Owned out;
  if (torch_functions.empty_strided(2, sizes, strides, code, kCpu, kNoIndex, out.receive()) != 0) {
    return kOutOfMemory;
  }
  args.x = data(x), args.weight = data(weight), args.out = out.data();
  args.bias = bias == nullptr ? nullptr : data(*bias);
  const int status = slipstream_linear(&args);
  if (status == kOk) *result = out.give();
  return status;
}
