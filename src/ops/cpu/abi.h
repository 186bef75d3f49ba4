// The plain C interface that Python calls through ctypes. Field order and widths are repeated in
// library.py (struct.pack formats); SLIPSTREAM_ABI changes with them.
#pragma once
#include <cstdint>

#define SLIPSTREAM_ABI 2
#define SLIPSTREAM_EXPORT extern "C" __attribute__((visibility("default")))

enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

enum Status : int {
  kOk = 0,
  kBadSlot = 1,       // slot_mapping names a slot outside of the cache
  kBadBlock = 2,      // a needed block table entry names a block outside of the cache
  kBadLengths = 3,    // query_start_loc or seq_lens contradict each other or the tensors
  kBadShape = 4,      // head_dim, heads or block_size outside of what the kernel is made for
  kOutOfMemory = 5,
};

// Strides are in elements; heads lie head_dim apart and the last dimension is contiguous.
struct AttentionArgs {
  const void* query;               // [tokens, num_heads, head_dim]
  const void* key;                 // [tokens, num_kv_heads, head_dim]
  const void* value;               // [tokens, num_kv_heads, head_dim]
  void* key_cache;                 // [num_blocks, block_size, num_kv_heads, head_dim] contiguous
  void* value_cache;               // same
  const int32_t* block_tables;     // [rows, block_table_stride]
  const int32_t* query_start_loc;  // [rows + 1]
  const int32_t* seq_lens;         // [rows]
  const int64_t* slot_mapping;     // [tokens]
  void* out;                       // [tokens, num_heads, head_dim] contiguous
  int64_t query_stride, key_stride, value_stride, block_table_stride;
  int64_t tokens, rows, num_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, max_blocks;
  int64_t sliding_window, dtype, threads;
  double scale;
};

struct GumbelArgs {
  const float* logits;  // [rows, vocab_size], rows logits_stride apart
  const int64_t* seeds;
  const int64_t* positions;
  const float* temperatures;
  int64_t* tokens;
  int64_t rows, vocab_size, logits_stride, threads;
};

// How weights are held, beside the float types of DType.
enum WeightKind : int64_t { kInt4 = 4, kInt8 = 8 };

struct LinearArgs {
  const void* x;        // [tokens, inputs], rows x_stride apart
  const void* weight;   // [outputs, inputs] contiguous; int4: [outputs, inputs / 2]
  const float* scales;  // int8: [outputs]; int4: [outputs, inputs / group]; otherwise unused
  const void* bias;     // [outputs] of x's dtype, or null
  void* out;            // [tokens, outputs] contiguous, of x's dtype
  int64_t tokens, inputs, outputs, x_stride;
  int64_t dtype, kind, group, threads;  // kind: a DType or a WeightKind
};

typedef int AttentionFunction(const AttentionArgs*);
typedef int GumbelFunction(const GumbelArgs*);
typedef int LinearFunction(const LinearArgs*);

SLIPSTREAM_EXPORT AttentionFunction slipstream_paged_attention;
SLIPSTREAM_EXPORT GumbelFunction slipstream_gumbel_argmax;
SLIPSTREAM_EXPORT LinearFunction slipstream_linear;
