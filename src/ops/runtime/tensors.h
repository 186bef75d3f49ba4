// Tensors for compiled code, with only what AOTInductor's C interface needs.
//
// torch's tensors cost a few microseconds per call of a compiled region, for allocation and tensor
// objects. With one stream of a small model that was a sixth of a step.
#pragma once
#include "runtime/abi.h"

constexpr int kTensorDims = 8;

struct Tensor;

// The storage of a tensor and its views. Reference counts are not atomic: one thread at a time.
struct alignas(64) Memory {
  int64_t references;
  size_t capacity;           // bytes, which follow this struct; 0 if the data lies elsewhere
  Handle torch = nullptr;    // torch's tensor that owns the data; deleted with this
  Tensor* source = nullptr;  // another tensor that must outlive this storage
  // In the free list of its size: neighbours, and the time when it was freed.
  Memory* next = nullptr;
  Memory* previous = nullptr;
  int64_t freed = 0;
};

struct Tensor {
  char* data;
  Memory* memory;  // null: the data outlives the tensor
  Tensor* next;    // in the free list
  int64_t references, dims;
  int64_t sizes[kTensorDims], strides[kTensorDims];  // in elements
  int32_t dtype;                                     // torch's number
};

// A view of `data`. Consumes a reference of `memory`, even on failure. Null if there are too many
// dimensions or no memory.
Tensor* slipstream_view(void* data, Memory* memory, int64_t dims, const int64_t* sizes,
                        const int64_t* strides, int32_t dtype);
// A tensor with uninitialized memory of its own; null if there is none.
Tensor* slipstream_allocate(int64_t dims, const int64_t* sizes, const int64_t* strides,
                            int32_t dtype);
void slipstream_release(Tensor*);

// Wraps a tensor of torch and takes ownership of it, even on failure. `source`, if not null, is kept
// alive as long.
Tensor* slipstream_from_torch(Handle, Tensor* source = nullptr);
// A tensor of torch with the same contents: the wrapped one if there is one, else a contiguous copy. Null
// if there is no memory.
Handle slipstream_to_torch(const Tensor&);

// During its lifetime, new tensors of this thread are torch's, so that converting them needs no copy.
class ByTorch {
 public:
  explicit ByTorch(bool is_wanted);
  ByTorch(const ByTorch&) = delete;
  ByTorch& operator=(const ByTorch&) = delete;
  ~ByTorch();

 private:
  const bool before_;
};

// Bytes of an element; 0 for an unknown dtype.
int64_t slipstream_item_size(int32_t dtype);
// Number of elements from the first to the last one in memory, inclusive.
int64_t slipstream_extent(int64_t dims, const int64_t* sizes, const int64_t* strides);
// Strides of a contiguous tensor.
void slipstream_contiguous_strides(int64_t dims, const int64_t* sizes, int64_t* strides);

// Holds a reference and releases it at the end of its scope, unless it was given away.
class Owned {
 public:
  Owned() = default;
  explicit Owned(Tensor* tensor) : tensor_(tensor) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { reset(); }

  Tensor** receive() { return reset(), &tensor_; }
  Tensor* give() {
    Tensor* given = tensor_;
    tensor_ = nullptr;
    return given;
  }
  void reset() {
    if (tensor_ != nullptr) slipstream_release(tensor_);
    tensor_ = nullptr;
  }
  Tensor* get() const { return tensor_; }
  Tensor* operator->() const { return tensor_; }
  Tensor& operator*() const { return *tensor_; }
  explicit operator bool() const { return tensor_ != nullptr; }

 private:
  Tensor* tensor_ = nullptr;
};
