// Code that AOTInductor compiled ahead of time: calls it, and gives it this library's kernels.
//
// Tensors travel as opaque handles of libtorch's stable C interface, whose functions come by
// address, so that neither its headers nor its libraries are needed to build this.
#include "bound.h"

TorchFunctions slipstream_torch;
thread_local int64_t slipstream_threads = 1;

namespace {

int dtype_of(Handle tensor) {
  int32_t code = -1;
  slipstream_torch.get_dtype(tensor, &code);
  for (const auto& pair : kTorchDTypes) {
    if (pair.torch == code) return int(pair.ours);
  }
  return -1;
}

}  // namespace

void slipstream_use_torch(const TorchFunctions* functions) { slipstream_torch = *functions; }

Bound* slipstream_bind(CompiledFunction* run, void* container, const BoundInput* inputs,
                       int64_t num_inputs, int64_t num_outputs, int64_t threads) {
  return new Bound{run, container, num_outputs, threads, {inputs, inputs + num_inputs}};
}

void slipstream_unbind(Bound* bound) {
  for (const BoundInput& input : bound->inputs) {
    if (input.handle != nullptr) slipstream_torch.delete_tensor(input.handle);
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

// The name and the signature that generated code expects of the op `streamed_linear`.
SLIPSTREAM_EXPORT int32_t aoti_torch_cpu_streamed_linear(Handle x, Handle weight, Handle* scales,
                                                         Handle* bias, Handle* result) {
  auto data = [](Handle tensor) {
    void* pointer = nullptr;
    slipstream_torch.get_data_ptr(tensor, &pointer);
    return pointer;
  };
  int64_t *x_sizes = nullptr, *x_strides = nullptr, *weight_sizes = nullptr, weight_dims = 0;
  slipstream_torch.get_sizes(x, &x_sizes);
  slipstream_torch.get_strides(x, &x_strides);
  slipstream_torch.get_sizes(weight, &weight_sizes);
  slipstream_torch.get_dim(weight, &weight_dims);
  LinearArgs args{};
  args.tokens = x_sizes[0], args.inputs = x_sizes[1], args.outputs = weight_sizes[0];
  args.x_stride = x_strides[0], args.threads = slipstream_threads;
  args.dtype = dtype_of(x), args.kind = dtype_of(weight);
  if (scales == nullptr && weight_dims == 3) {
    args.kind = kBFloat16Strips;
    args.outputs = weight_sizes[0] * kStripOutputs;
  }
  if (scales != nullptr) {
    int64_t dims = 0, *sizes = nullptr;
    slipstream_torch.get_dim(*scales, &dims);
    slipstream_torch.get_sizes(*scales, &sizes);
    args.group = dims == 1 ? 0 : args.inputs / sizes[1];
    if (weight_dims == 3) {
      args.kind = args.kind == kInt8 ? kInt8Strips : kInt4Strips;
      args.outputs = dims == 1 ? sizes[0] : sizes[0] * sizes[2];
    }
    args.scales = static_cast<const float*>(data(*scales));
  }
  const int64_t sizes[] = {args.tokens, args.outputs}, strides[] = {args.outputs, 1};
  int32_t code = -1;
  slipstream_torch.get_dtype(x, &code);
  Owned out;
  if (slipstream_torch.empty_strided(2, sizes, strides, code, kCpu, kNoIndex, out.receive()) != 0) {
    return kOutOfMemory;
  }
  args.x = data(x), args.weight = data(weight), args.out = out.data();
  args.bias = bias == nullptr ? nullptr : data(*bias);
  const int status = slipstream_linear(&args);
  if (status == kOk) *result = out.give();
  return status;
}
