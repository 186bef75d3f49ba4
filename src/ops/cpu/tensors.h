// Tensors of compiled code: what AOTInductor's C interface needs of a tensor, and no more.
//
// torch's own take a few microseconds for each call of a region, in allocation and in tensor objects:
// with one stream of a small model a sixth of a step.
#pragma once
#include "abi.h"

constexpr int kTensorDims = 8;

struct Tensor;

// What a tensor and its views lie in. Counts are plain: a tensor belongs to one thread at a time.
struct alignas(64) Memory {
  int64_t references;
  size_t capacity;           // bytes, which follow this; 0 if they lie elsewhere
  Handle torch = nullptr;    // torch's tensor that has them, and goes with this
  Tensor* source = nullptr;  // what else they may belong to
  // While it is spare: freed before and after this, of its size; and when it was.
  Memory* next = nullptr;
  Memory* previous = nullptr;
  int64_t freed = 0;
};

struct Tensor {
  char* data;
  Memory* memory;  // null: it outlives the tensor
  Tensor* next;    // while it is spare
  int64_t references, dims;
  int64_t sizes[kTensorDims], strides[kTensorDims];  // in elements
  int32_t dtype;                                     // torch's number
};

// A view of `data`; takes a reference of `memory` over. Null, and that goes, if it has too many
// dimensions or there is no room.
Tensor* slipstream_view(void* data, Memory* memory, int64_t dims, const int64_t* sizes,
                        const int64_t* strides, int32_t dtype);
// One with memory of its own, uninitialized; null where there is none.
Tensor* slipstream_allocate(int64_t dims, const int64_t* sizes, const int64_t* strides,
                            int32_t dtype);
void slipstream_release(Tensor*);

// One of torch's that goes with the new one, whatever comes of it; `source`, if not null, lives as
// long too.
Tensor* slipstream_from_torch(Handle, Tensor* source = nullptr);
// One of torch's with what this one has: its own where it is one, else a contiguous copy. Null where
// there is no room.
Handle slipstream_to_torch(const Tensor&);

// While it lives, this thread's new tensors are torch's, so that they need not be copied to become so.
class ByTorch {
 public:
  explicit ByTorch(bool is_wanted);
  ByTorch(const ByTorch&) = delete;
  ByTorch& operator=(const ByTorch&) = delete;
  ~ByTorch();

 private:
  const bool before_;
};

// Bytes of an element; 0 of a dtype that is not known.
int64_t slipstream_item_size(int32_t dtype);
// Elements from the first to behind the last.
int64_t slipstream_extent(int64_t dims, const int64_t* sizes, const int64_t* strides);
// Of elements that follow each other.
void slipstream_contiguous_strides(int64_t dims, const int64_t* sizes, int64_t* strides);

// A reference that goes with its scope, unless it was given away.
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
