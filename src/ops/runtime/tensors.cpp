// Allocates and frees tensors, and implements the C interface that compiled code calls.
//
// The function names are torch's with another prefix of the same length, which src/compile/replace_torch_shims.py
// writes into the code.
#include "runtime/tensors.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "runtime/bound.h"

namespace {

constexpr size_t kLeast = 512;
// Bytes that a thread may always hold, used or free, even if its peak use is lower.
constexpr int64_t kLeastKept = int64_t(64) << 20;
constexpr int kClasses = 4 * 64;
// More bytes than any tensor has: a larger size is an error.
constexpr int64_t kMostBytes = int64_t(1) << 47;

// Sizes are rounded up to one of four between two powers of two.
struct SizeClass {
  explicit SizeClass(size_t bytes) {
    bytes = bytes < kLeast ? kLeast : bytes;
    const int exponent = 63 - __builtin_clzll(bytes - 1);
    const size_t step = size_t(1) << (exponent - 2);
    capacity = (bytes + step - 1) & ~(step - 1);
    index = exponent * 4 + int(capacity / step) - 5;
  }
  size_t capacity;
  int index;
};

// Free list of one size; the last freed is reused first.
class Stack {
 public:
  void push(Memory* memory) {
    memory->next = newest_;
    memory->previous = nullptr;
    (newest_ == nullptr ? oldest_ : newest_->previous) = memory;
    newest_ = memory;
  }
  Memory* pop() {
    Memory* taken = newest_;
    newest_ = taken->next;
    (newest_ == nullptr ? oldest_ : newest_->previous) = nullptr;
    return taken;
  }
  Memory* drop_oldest() {
    Memory* dropped = oldest_;
    oldest_ = dropped->previous;
    (oldest_ == nullptr ? newest_ : oldest_->next) = nullptr;
    return dropped;
  }
  bool is_empty() const { return newest_ == nullptr; }
  int64_t oldest() const { return oldest_->freed; }

 private:
  Memory *newest_ = nullptr, *oldest_ = nullptr;
};

// The free memory and tensors of a thread.
//
// Large memory comes from the system, which zeroes it page by page; that took a tenth of a prompt's step.
// So memory is kept for the next step: up to twice the peak use, since the sizes in use change during a
// step. Beyond that, the least recently used memory is freed; otherwise sizes that do not recur would
// displace those that do.
class Spare {
 public:
  ~Spare() {
    make_room(0, 0);
    while (tensors_ != nullptr) delete std::exchange(tensors_, tensors_->next);
  }

  Memory* memory(size_t bytes) {
    const SizeClass size(bytes);
    const auto capacity = int64_t(size.capacity);
    Stack& stack = stacks_[size.index];
    Memory* memory = nullptr;
    if (!stack.is_empty()) {
      memory = stack.pop();
      memory->references = 1;
      spare_ -= capacity;
    } else {
      make_room(capacity, std::max(kLeastKept, 2 * most_used_));
      void* place = allocate(size.capacity);
      if (place == nullptr) {
        make_room(0, 0);
        place = allocate(size.capacity);
      }
      if (place == nullptr) return nullptr;
      memory = new (place) Memory{1, size.capacity};
    }
    ++in_use_;
    used_ += capacity;
    most_used_ = std::max(most_used_, used_);
    return memory;
  }

  void take(Memory* memory) {
    const auto capacity = int64_t(memory->capacity);
    --in_use_;
    // Another thread may have allocated it, so this thread's count may not include it.
    used_ = std::max<int64_t>(0, used_ - capacity);
    make_room(capacity, std::max(kLeastKept, 2 * most_used_));
    memory->freed = ++clock_;
    stacks_[SizeClass(memory->capacity).index].push(memory);
    spare_ += capacity;
  }

  Tensor* tensor() {
    Tensor* tensor = tensors_;
    if (tensor == nullptr) {
      tensor = new (std::nothrow) Tensor;
    } else {
      tensors_ = tensor->next;
    }
    if (tensor != nullptr) ++in_use_;
    return tensor;
  }

  void take(Tensor* tensor) {
    --in_use_;
    tensor->next = tensors_;
    tensors_ = tensor;
  }

  // Tensors that wrap torch's count as well.
  void count(int64_t more) { in_use_ += more; }
  int64_t in_use() const { return in_use_; }
  int64_t bytes() const { return spare_; }

 private:
  static void* allocate(size_t capacity) {
    return std::aligned_alloc(alignof(Memory), sizeof(Memory) + capacity);
  }

  // Frees memory until `bytes` more fit into a total of `most`.
  void make_room(int64_t bytes, int64_t most) {
    while (spare_ > 0 && used_ + spare_ + bytes > most) {
      Stack* oldest = nullptr;
      for (Stack& stack : stacks_) {
        if (stack.is_empty()) continue;
        if (oldest == nullptr || stack.oldest() < oldest->oldest()) oldest = &stack;
      }
      Memory* memory = oldest->drop_oldest();
      spare_ -= int64_t(memory->capacity);
      std::free(memory);
    }
  }

  Stack stacks_[kClasses];
  Tensor* tensors_ = nullptr;
  int64_t spare_ = 0, used_ = 0, most_used_ = 0;  // bytes
  int64_t clock_ = 0;
  int64_t in_use_ = 0;  // tensors and memories allocated minus those released in this thread
};

thread_local Spare spare;
thread_local bool is_by_torch = false;

void release(Memory* memory) {
  if (--memory->references > 0) return;
  if (memory->capacity > 0) return spare.take(memory);
  if (memory->torch != nullptr) slipstream_torch.delete_tensor(memory->torch);
  if (memory->source != nullptr) slipstream_release(memory->source);
  spare.count(-1);
  delete memory;
}

// Whether the tensor is exactly a wrapped tensor of torch (same data, shape and strides) and needs no
// other tensor to stay alive.
bool is_torchs(const Tensor& tensor) {
  const Memory* memory = tensor.memory;
  if (memory == nullptr || memory->torch == nullptr || memory->source != nullptr) return false;
  const Handle handle = memory->torch;
  void* data = nullptr;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  slipstream_torch.get_data_ptr(handle, &data);
  slipstream_torch.get_dim(handle, &dims);
  slipstream_torch.get_sizes(handle, &sizes);
  slipstream_torch.get_strides(handle, &strides);
  if (data != tensor.data || dims != tensor.dims) return false;
  for (int64_t i = 0; i < dims; ++i) {
    if (sizes[i] != tensor.sizes[i] || strides[i] != tensor.strides[i]) return false;
  }
  return true;
}

// Copies elements to contiguous memory. Returns the address after the last one.
char* copy(const Tensor& from, int64_t dim, const char* data, int64_t item, char* to) {
  if (dim == from.dims) {
    std::memcpy(to, data, size_t(item));
    return to + item;
  }
  if (dim == from.dims - 1 && from.strides[dim] == 1) {
    std::memcpy(to, data, size_t(item * from.sizes[dim]));
    return to + item * from.sizes[dim];
  }
  for (int64_t i = 0; i < from.sizes[dim]; ++i) {
    to = copy(from, dim + 1, data + i * from.strides[dim] * item, item, to);
  }
  return to;
}

int32_t answer(Tensor* tensor, Tensor** result) {
  *result = tensor;
  return tensor == nullptr ? 1 : 0;
}

}  // namespace

int64_t slipstream_item_size(int32_t dtype) {
  // uint8, int8, int16, int32, int64, float16, float32, float64, complex of three sizes, bool,
  // quantized ones, bfloat16, bits, four of float8, uint16, uint32, uint64.
  constexpr int64_t kSizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0,
                                2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1,  1, 2, 4, 8};
  return dtype >= 0 && dtype < int32_t(sizeof kSizes / sizeof *kSizes) ? kSizes[dtype] : 0;
}

int64_t slipstream_extent(int64_t dims, const int64_t* sizes, const int64_t* strides) {
  int64_t last = 0;
  for (int64_t i = 0; i < dims; ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return last + 1;
}

void slipstream_contiguous_strides(int64_t dims, const int64_t* sizes, int64_t* strides) {
  int64_t stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i];
  }
}

Tensor* slipstream_view(void* data, Memory* memory, int64_t dims, const int64_t* sizes,
                        const int64_t* strides, int32_t dtype) {
  Tensor* tensor = dims <= kTensorDims ? spare.tensor() : nullptr;
  if (tensor == nullptr) {
    if (memory != nullptr) release(memory);
    return nullptr;
  }
  tensor->data = static_cast<char*>(data);
  tensor->memory = memory;
  tensor->references = 1;
  tensor->dims = dims;
  tensor->dtype = dtype;
  for (int64_t i = 0; i < dims; ++i) tensor->sizes[i] = sizes[i], tensor->strides[i] = strides[i];
  return tensor;
}

Tensor* slipstream_allocate(int64_t dims, const int64_t* sizes, const int64_t* strides,
                            int32_t dtype) {
  if (is_by_torch) {
    Handle handle = nullptr;
    const int failed =
        slipstream_torch.empty_strided(dims, sizes, strides, dtype, kCpu, kNoIndex, &handle);
    return failed ? nullptr : slipstream_from_torch(handle);
  }
  const int64_t item = slipstream_item_size(dtype), count = slipstream_extent(dims, sizes, strides);
  if (item == 0 || count < 0 || count > kMostBytes / item) return nullptr;
  Memory* memory = spare.memory(size_t(count * item));
  return memory == nullptr
             ? nullptr
             : slipstream_view(memory + 1, memory, dims, sizes, strides, dtype);
}

void slipstream_release(Tensor* tensor) {
  if (--tensor->references > 0) return;
  if (tensor->memory != nullptr) release(tensor->memory);
  spare.take(tensor);
}

Tensor* slipstream_from_torch(Handle handle, Tensor* source) {
  auto* memory = new (std::nothrow) Memory{1, 0, handle, source};
  if (memory == nullptr) {
    slipstream_torch.delete_tensor(handle);
    return nullptr;
  }
  spare.count(1);
  if (source != nullptr) ++source->references;
  void* data = nullptr;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = -1;
  slipstream_torch.get_data_ptr(handle, &data);
  slipstream_torch.get_dim(handle, &dims);
  slipstream_torch.get_sizes(handle, &sizes);
  slipstream_torch.get_strides(handle, &strides);
  slipstream_torch.get_dtype(handle, &dtype);
  return slipstream_view(data, memory, dims, sizes, strides, dtype);
}

ByTorch::ByTorch(bool is_wanted) : before_(std::exchange(is_by_torch, is_wanted)) {}
ByTorch::~ByTorch() { is_by_torch = before_; }

Handle slipstream_to_torch(const Tensor& tensor) {
  Handle handle = nullptr;
  if (is_torchs(tensor)) {
    return slipstream_torch.new_handle(tensor.memory->torch, &handle) == 0 ? handle : nullptr;
  }
  int64_t strides[kTensorDims];
  slipstream_contiguous_strides(tensor.dims, tensor.sizes, strides);
  if (slipstream_torch.empty_strided(tensor.dims, tensor.sizes, strides, tensor.dtype, kCpu,
                                     kNoIndex, &handle) != 0) {
    return nullptr;
  }
  void* to = nullptr;
  slipstream_torch.get_data_ptr(handle, &to);
  if (slipstream_extent(tensor.dims, tensor.sizes, strides) > 0) {
    copy(tensor, 0, tensor.data, slipstream_item_size(tensor.dtype), static_cast<char*>(to));
  }
  return handle;
}

// The functions aoti_torch_... of torch's shim.h that code of fused loops and of this library's kernels
// calls. They return 0, or 1 for what they do not support.
SLIPSTREAM_EXPORT int32_t slipstream_new_tensor_handle(Tensor* tensor, Tensor** result) {
  ++tensor->references;
  return answer(tensor, result);
}

SLIPSTREAM_EXPORT int32_t slipstream_delete_tensor_object(Tensor* tensor) {
  slipstream_release(tensor);
  return 0;
}

SLIPSTREAM_EXPORT int32_t slipstream_empty_strided(int64_t dims, const int64_t* sizes,
                                                   const int64_t* strides, int32_t dtype, int32_t,
                                                   int32_t, Tensor** result) {
  return answer(slipstream_allocate(dims, sizes, strides, dtype), result);
}

SLIPSTREAM_EXPORT int32_t slipstream__reinterpret_tensor(Tensor* tensor, int64_t dims,
                                                         const int64_t* sizes,
                                                         const int64_t* strides, int64_t offset,
                                                         Tensor** result) {
  const int64_t item = slipstream_item_size(tensor->dtype);
  if (item == 0) return 1;
  if (tensor->memory != nullptr) ++tensor->memory->references;
  char* data = tensor->data + offset * item;
  return answer(slipstream_view(data, tensor->memory, dims, sizes, strides, tensor->dtype), result);
}

SLIPSTREAM_EXPORT int32_t slipstream_create_tensor_from_blob(void* data, int64_t dims,
                                                             const int64_t* sizes,
                                                             const int64_t* strides, int64_t offset,
                                                             int32_t dtype, int32_t, int32_t,
                                                             Tensor** result) {
  const int64_t item = slipstream_item_size(dtype);
  if (item == 0) return 1;
  char* begin = static_cast<char*>(data) + offset * item;
  return answer(slipstream_view(begin, nullptr, dims, sizes, strides, dtype), result);
}

SLIPSTREAM_EXPORT int32_t slipstream_clone(Tensor* tensor, Tensor** result) {
  int64_t strides[kTensorDims];
  slipstream_contiguous_strides(tensor->dims, tensor->sizes, strides);
  Tensor* made = slipstream_allocate(tensor->dims, tensor->sizes, strides, tensor->dtype);
  if (made != nullptr && slipstream_extent(tensor->dims, tensor->sizes, strides) > 0) {
    copy(*tensor, 0, tensor->data, slipstream_item_size(tensor->dtype), made->data);
  }
  return answer(made, result);
}

SLIPSTREAM_EXPORT int32_t slipstream_get_data_ptr(Tensor* tensor, void** result) {
  *result = tensor->data;
  return 0;
}

SLIPSTREAM_EXPORT int32_t slipstream_get_dim(Tensor* tensor, int64_t* result) {
  *result = tensor->dims;
  return 0;
}

SLIPSTREAM_EXPORT int32_t slipstream_get_numel(Tensor* tensor, int64_t* result) {
  *result = 1;
  for (int64_t i = 0; i < tensor->dims; ++i) *result *= tensor->sizes[i];
  return 0;
}

SLIPSTREAM_EXPORT int32_t slipstream_get_sizes(Tensor* tensor, int64_t** result) {
  *result = tensor->sizes;
  return 0;
}

SLIPSTREAM_EXPORT int32_t slipstream_get_strides(Tensor* tensor, int64_t** result) {
  *result = tensor->strides;
  return 0;
}

SLIPSTREAM_EXPORT int32_t slipstream_get_size(Tensor* tensor, int64_t dim, int64_t* result) {
  *result = tensor->sizes[dim];
  return 0;
}

SLIPSTREAM_EXPORT int32_t slipstream_get_stride(Tensor* tensor, int64_t dim, int64_t* result) {
  *result = tensor->strides[dim];
  return 0;
}

SLIPSTREAM_EXPORT int32_t slipstream_get_dtype(Tensor* tensor, int32_t* result) {
  *result = tensor->dtype;
  return 0;
}

SLIPSTREAM_EXPORT int32_t slipstream_get_device_type(Tensor*, int32_t* result) {
  *result = kCpu;
  return 0;
}

// For constants, which code never has if it was rewritten to call these; so it fails.
SLIPSTREAM_EXPORT int32_t slipstream_get_storage_size(Tensor*, int64_t*) { return 1; }
SLIPSTREAM_EXPORT int32_t slipstream_get_storage_offset(Tensor*, int64_t*) { return 1; }
SLIPSTREAM_EXPORT int32_t slipstream_create_tensor_from_blob_v2(void*, int64_t, const int64_t*,
                                                                const int64_t*, int64_t, int32_t,
                                                                int32_t, int32_t, Tensor**, int32_t,
                                                                const uint8_t*, int64_t) {
  return 1;
}

// Counts of this thread, for tests of leaks and reuse: tensors and memories in use, and free bytes.
SLIPSTREAM_EXPORT int64_t slipstream_count_tensors() { return spare.in_use(); }
SLIPSTREAM_EXPORT int64_t slipstream_count_spare_bytes() { return spare.bytes(); }
