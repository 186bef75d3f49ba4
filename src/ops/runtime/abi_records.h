// Written by `python -m src.ops.runtime.abi` from abi.py; change that file instead.
// Included by abi.h alone.
#pragma once

#define SLIPSTREAM_ABI 2114396565

// Modifiers of a layer's scores, in the order in which they are applied; 0 or null for none.
//
// A soft cap is cap * tanh(score / cap). A token sees `window` keys up to its own, those of its
// own `chunk` of so many tokens, and `ahead` keys behind its own. Sinks, [num_heads], are logits
// that take part in the denominator only.
struct AttentionSpec {
  float scale;
  float cap;
  int64_t window;
  int64_t chunk;
  const float* sinks;
  int64_t ahead;
};
static_assert(sizeof(AttentionSpec) == 40, "as in Python");
static_assert(offsetof(AttentionSpec, scale) == 0 && sizeof(AttentionSpec::scale) == 4, "as in Python");
static_assert(offsetof(AttentionSpec, cap) == 4 && sizeof(AttentionSpec::cap) == 4, "as in Python");
static_assert(offsetof(AttentionSpec, window) == 8 && sizeof(AttentionSpec::window) == 8, "as in Python");
static_assert(offsetof(AttentionSpec, chunk) == 16 && sizeof(AttentionSpec::chunk) == 8, "as in Python");
static_assert(offsetof(AttentionSpec, sinks) == 24 && sizeof(AttentionSpec::sinks) == 8, "as in Python");
static_assert(offsetof(AttentionSpec, ahead) == 32 && sizeof(AttentionSpec::ahead) == 8, "as in Python");

// Attention over a paged cache. Strides are in elements.
//
// Heads lie head_dim apart, and the last dimension is contiguous. Rows of a cache of codes have
// head_dim + 4 bytes. If it is `deterministic`, results must not depend on how a row's tokens are
// cut into calls.
struct AttentionArgs {
  const void* query;  // [tokens, num_heads, head_dim], with a free stride of the first dimension
  // [tokens, num_kv_heads, head_dim], with a free stride of the first dimension; or null
  const void* key;
  // [tokens, num_kv_heads, head_dim], with a free stride of the first dimension; or null
  const void* value;
  void* key_cache;  // [num_blocks, block_size, num_kv_heads, any] contiguous
  void* value_cache;  // [num_blocks, block_size, num_kv_heads, any] contiguous
  const int32_t* block_tables;  // [rows, max_blocks], with a free stride of the first dimension
  const int32_t* query_start_loc;  // [rows + 1] contiguous
  const int32_t* seq_lens;  // [rows] contiguous
  const int64_t* slot_mapping;  // [tokens] contiguous
  void* out;  // [tokens, num_heads, head_dim] contiguous
  const int32_t* verifies;  // [rows] contiguous; or null
  int64_t tokens;
  int64_t num_heads;
  int64_t head_dim;
  int64_t num_kv_heads;
  int64_t num_blocks;
  int64_t block_size;
  int64_t rows;
  int64_t max_blocks;
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int64_t block_table_stride;
  int64_t deterministic = 0;
  int64_t dtype;
  int64_t threads;
  const AttentionSpec* spec;
  int64_t cache_kind;  // a CacheKind
  // 0, or how many leading elements of a key are its value, if key_cache is value_cache too.
  // Elements of `out` behind as many mean nothing then.
  int64_t value_dim;
};
static_assert(sizeof(AttentionArgs) == 232, "as in Python");
static_assert(offsetof(AttentionArgs, query) == 0 && sizeof(AttentionArgs::query) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, key) == 8 && sizeof(AttentionArgs::key) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, value) == 16 && sizeof(AttentionArgs::value) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, key_cache) == 24 && sizeof(AttentionArgs::key_cache) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, value_cache) == 32 && sizeof(AttentionArgs::value_cache) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, block_tables) == 40 && sizeof(AttentionArgs::block_tables) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, query_start_loc) == 48 && sizeof(AttentionArgs::query_start_loc) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, seq_lens) == 56 && sizeof(AttentionArgs::seq_lens) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, slot_mapping) == 64 && sizeof(AttentionArgs::slot_mapping) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, out) == 72 && sizeof(AttentionArgs::out) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, verifies) == 80 && sizeof(AttentionArgs::verifies) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, tokens) == 88 && sizeof(AttentionArgs::tokens) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, num_heads) == 96 && sizeof(AttentionArgs::num_heads) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, head_dim) == 104 && sizeof(AttentionArgs::head_dim) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, num_kv_heads) == 112 && sizeof(AttentionArgs::num_kv_heads) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, num_blocks) == 120 && sizeof(AttentionArgs::num_blocks) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, block_size) == 128 && sizeof(AttentionArgs::block_size) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, rows) == 136 && sizeof(AttentionArgs::rows) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, max_blocks) == 144 && sizeof(AttentionArgs::max_blocks) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, query_stride) == 152 && sizeof(AttentionArgs::query_stride) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, key_stride) == 160 && sizeof(AttentionArgs::key_stride) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, value_stride) == 168 && sizeof(AttentionArgs::value_stride) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, block_table_stride) == 176 && sizeof(AttentionArgs::block_table_stride) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, deterministic) == 184 && sizeof(AttentionArgs::deterministic) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, dtype) == 192 && sizeof(AttentionArgs::dtype) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, threads) == 200 && sizeof(AttentionArgs::threads) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, spec) == 208 && sizeof(AttentionArgs::spec) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, cache_kind) == 216 && sizeof(AttentionArgs::cache_kind) == 8, "as in Python");
static_assert(offsetof(AttentionArgs, value_dim) == 224 && sizeof(AttentionArgs::value_dim) == 8, "as in Python");

// Latent attention. Strides are in elements.
//
// The cache has one vector per token: `rank` numbers from which the projections `up` make a key of
// `nope` numbers and a value of `value` numbers for each head, and `rope` rotated numbers that
// belong to the keys of all heads.
struct LatentArgs {
  const void* query;  // [tokens, heads, nope + rope], with a free stride of the first dimension
  const void* latent;  // [tokens, rank + rope], with a free stride of the first dimension
  void* cache;  // [num_blocks, block_size, rank + rope] contiguous
  const void* up;  // [heads, nope + value, rank] contiguous
  const int32_t* block_tables;  // [rows, max_blocks], with a free stride of the first dimension
  const int32_t* query_start_loc;  // [rows + 1] contiguous
  const int32_t* seq_lens;  // [rows] contiguous
  const int64_t* slot_mapping;  // [tokens] contiguous
  void* out;  // [tokens, heads, value] contiguous
  const int32_t* verifies;  // [rows] contiguous; or null
  int64_t tokens;
  int64_t heads;
  int64_t nope;
  int64_t rope;
  int64_t rank;
  int64_t num_blocks;
  int64_t block_size;
  int64_t value;
  int64_t rows;
  int64_t max_blocks;
  int64_t query_stride;
  int64_t latent_stride;
  int64_t block_table_stride;
  int64_t deterministic = 0;
  int64_t dtype;
  int64_t threads;
  const AttentionSpec* spec;  // only the scale counts
};
static_assert(sizeof(LatentArgs) == 216, "as in Python");
static_assert(offsetof(LatentArgs, query) == 0 && sizeof(LatentArgs::query) == 8, "as in Python");
static_assert(offsetof(LatentArgs, latent) == 8 && sizeof(LatentArgs::latent) == 8, "as in Python");
static_assert(offsetof(LatentArgs, cache) == 16 && sizeof(LatentArgs::cache) == 8, "as in Python");
static_assert(offsetof(LatentArgs, up) == 24 && sizeof(LatentArgs::up) == 8, "as in Python");
static_assert(offsetof(LatentArgs, block_tables) == 32 && sizeof(LatentArgs::block_tables) == 8, "as in Python");
static_assert(offsetof(LatentArgs, query_start_loc) == 40 && sizeof(LatentArgs::query_start_loc) == 8, "as in Python");
static_assert(offsetof(LatentArgs, seq_lens) == 48 && sizeof(LatentArgs::seq_lens) == 8, "as in Python");
static_assert(offsetof(LatentArgs, slot_mapping) == 56 && sizeof(LatentArgs::slot_mapping) == 8, "as in Python");
static_assert(offsetof(LatentArgs, out) == 64 && sizeof(LatentArgs::out) == 8, "as in Python");
static_assert(offsetof(LatentArgs, verifies) == 72 && sizeof(LatentArgs::verifies) == 8, "as in Python");
static_assert(offsetof(LatentArgs, tokens) == 80 && sizeof(LatentArgs::tokens) == 8, "as in Python");
static_assert(offsetof(LatentArgs, heads) == 88 && sizeof(LatentArgs::heads) == 8, "as in Python");
static_assert(offsetof(LatentArgs, nope) == 96 && sizeof(LatentArgs::nope) == 8, "as in Python");
static_assert(offsetof(LatentArgs, rope) == 104 && sizeof(LatentArgs::rope) == 8, "as in Python");
static_assert(offsetof(LatentArgs, rank) == 112 && sizeof(LatentArgs::rank) == 8, "as in Python");
static_assert(offsetof(LatentArgs, num_blocks) == 120 && sizeof(LatentArgs::num_blocks) == 8, "as in Python");
static_assert(offsetof(LatentArgs, block_size) == 128 && sizeof(LatentArgs::block_size) == 8, "as in Python");
static_assert(offsetof(LatentArgs, value) == 136 && sizeof(LatentArgs::value) == 8, "as in Python");
static_assert(offsetof(LatentArgs, rows) == 144 && sizeof(LatentArgs::rows) == 8, "as in Python");
static_assert(offsetof(LatentArgs, max_blocks) == 152 && sizeof(LatentArgs::max_blocks) == 8, "as in Python");
static_assert(offsetof(LatentArgs, query_stride) == 160 && sizeof(LatentArgs::query_stride) == 8, "as in Python");
static_assert(offsetof(LatentArgs, latent_stride) == 168 && sizeof(LatentArgs::latent_stride) == 8, "as in Python");
static_assert(offsetof(LatentArgs, block_table_stride) == 176 && sizeof(LatentArgs::block_table_stride) == 8, "as in Python");
static_assert(offsetof(LatentArgs, deterministic) == 184 && sizeof(LatentArgs::deterministic) == 8, "as in Python");
static_assert(offsetof(LatentArgs, dtype) == 192 && sizeof(LatentArgs::dtype) == 8, "as in Python");
static_assert(offsetof(LatentArgs, threads) == 200 && sizeof(LatentArgs::threads) == 8, "as in Python");
static_assert(offsetof(LatentArgs, spec) == 208 && sizeof(LatentArgs::spec) == 8, "as in Python");

// Draws a token for each row of logits.
struct GumbelArgs {
  const float* logits;  // [rows, vocab_size], with a free stride of the first dimension
  const int64_t* seeds;  // [rows] contiguous
  const int64_t* positions;  // [rows] contiguous
  const float* temperatures;  // [rows] contiguous
  int64_t* tokens;  // [rows] contiguous
  int64_t rows;
  int64_t vocab_size;
  int64_t logits_stride;
  int64_t threads;
};
static_assert(sizeof(GumbelArgs) == 72, "as in Python");
static_assert(offsetof(GumbelArgs, logits) == 0 && sizeof(GumbelArgs::logits) == 8, "as in Python");
static_assert(offsetof(GumbelArgs, seeds) == 8 && sizeof(GumbelArgs::seeds) == 8, "as in Python");
static_assert(offsetof(GumbelArgs, positions) == 16 && sizeof(GumbelArgs::positions) == 8, "as in Python");
static_assert(offsetof(GumbelArgs, temperatures) == 24 && sizeof(GumbelArgs::temperatures) == 8, "as in Python");
static_assert(offsetof(GumbelArgs, tokens) == 32 && sizeof(GumbelArgs::tokens) == 8, "as in Python");
static_assert(offsetof(GumbelArgs, rows) == 40 && sizeof(GumbelArgs::rows) == 8, "as in Python");
static_assert(offsetof(GumbelArgs, vocab_size) == 48 && sizeof(GumbelArgs::vocab_size) == 8, "as in Python");
static_assert(offsetof(GumbelArgs, logits_stride) == 56 && sizeof(GumbelArgs::logits_stride) == 8, "as in Python");
static_assert(offsetof(GumbelArgs, threads) == 64 && sizeof(GumbelArgs::threads) == 8, "as in Python");

// A projection; `kind` is a DType or a WeightKind.
struct LinearArgs {
  const void* x;  // [tokens, inputs], with a free stride of the first dimension
  // [outputs, inputs] contiguous; 4 bits: half as many columns. In strips of 64 outputs (the last
  // one is padded): int8 [strips, inputs / 4, 64, 4], int4 [strips, inputs / 8, 64, 4], bfloat16
  // [strips, inputs / 2, 64, 2]
  const void* weight;
  // int8 with group 0: [outputs]; otherwise [outputs, inputs / group], in strips [strips, inputs /
  // group, 64]; or null
  const void* scales;
  // of groups, like the scales: a weight is level * scale - offset; null for zeros
  const void* offsets;
  const void* bias;  // [outputs] contiguous; or null
  void* out;  // [tokens, outputs] contiguous
  int64_t tokens;
  int64_t inputs;
  int64_t outputs;
  int64_t x_stride;
  int64_t kind;
  int64_t group;  // inputs; 0: a row's
  int64_t group_dtype;  // of scales and offsets of groups: kFloat32, kBFloat16 or kPowers
  int64_t dtype;
  int64_t threads;
};
static_assert(sizeof(LinearArgs) == 120, "as in Python");
static_assert(offsetof(LinearArgs, x) == 0 && sizeof(LinearArgs::x) == 8, "as in Python");
static_assert(offsetof(LinearArgs, weight) == 8 && sizeof(LinearArgs::weight) == 8, "as in Python");
static_assert(offsetof(LinearArgs, scales) == 16 && sizeof(LinearArgs::scales) == 8, "as in Python");
static_assert(offsetof(LinearArgs, offsets) == 24 && sizeof(LinearArgs::offsets) == 8, "as in Python");
static_assert(offsetof(LinearArgs, bias) == 32 && sizeof(LinearArgs::bias) == 8, "as in Python");
static_assert(offsetof(LinearArgs, out) == 40 && sizeof(LinearArgs::out) == 8, "as in Python");
static_assert(offsetof(LinearArgs, tokens) == 48 && sizeof(LinearArgs::tokens) == 8, "as in Python");
static_assert(offsetof(LinearArgs, inputs) == 56 && sizeof(LinearArgs::inputs) == 8, "as in Python");
static_assert(offsetof(LinearArgs, outputs) == 64 && sizeof(LinearArgs::outputs) == 8, "as in Python");
static_assert(offsetof(LinearArgs, x_stride) == 72 && sizeof(LinearArgs::x_stride) == 8, "as in Python");
static_assert(offsetof(LinearArgs, kind) == 80 && sizeof(LinearArgs::kind) == 8, "as in Python");
static_assert(offsetof(LinearArgs, group) == 88 && sizeof(LinearArgs::group) == 8, "as in Python");
static_assert(offsetof(LinearArgs, group_dtype) == 96 && sizeof(LinearArgs::group_dtype) == 8, "as in Python");
static_assert(offsetof(LinearArgs, dtype) == 104 && sizeof(LinearArgs::dtype) == 8, "as in Python");
static_assert(offsetof(LinearArgs, threads) == 112 && sizeof(LinearArgs::threads) == 8, "as in Python");

// A layer of experts, whose matrices are stacked.
//
// Kinds are as in LinearArgs, and so is each matrix of a stack. `activation` is an Activation;
// `alpha` and `limit` are those of kClampedSwiglu. If it `weighs_inputs`, weights are factors of x
// instead of the results. An order says which input an expert's weights in each column are for.
struct ExpertsArgs {
  const void* x;  // [tokens, hidden], with a free stride of the first dimension
  // [experts, 2 * intermediate, hidden] contiguous; 4 bits: half as many columns. In strips of 64
  // outputs (the last one is padded): int8 [strips, inputs / 4, 64, 4], int4 [strips, inputs / 8,
  // 64, 4], bfloat16 [strips, inputs / 2, 64, 2]
  const void* gate_up;
  // int8 with group 0: [experts, 2 * intermediate]; otherwise [experts, 2 * intermediate, inputs /
  // group], in strips [strips, inputs / group, 64]; or null
  const void* gate_up_scales;
  // of groups, like the scales: a weight is level * scale - offset; null for zeros
  const void* gate_up_offsets;
  const int32_t* gate_up_order;  // [experts, hidden] contiguous; or null
  // [experts, hidden, intermediate] contiguous; 4 bits: half as many columns. In strips of 64
  // outputs (the last one is padded): int8 [strips, inputs / 4, 64, 4], int4 [strips, inputs / 8,
  // 64, 4], bfloat16 [strips, inputs / 2, 64, 2]
  const void* down;
  // int8 with group 0: [experts, hidden]; otherwise [experts, hidden, inputs / group], in strips
  // [strips, inputs / group, 64]; or null
  const void* down_scales;
  // of groups, like the scales: a weight is level * scale - offset; null for zeros
  const void* down_offsets;
  const int32_t* down_order;  // [experts, intermediate] contiguous; or null
  const float* weights;  // [tokens, chosen] contiguous
  const int64_t* ids;  // [tokens, chosen] contiguous
  const void* gate_up_bias;  // [experts, 2 * intermediate] contiguous; or null
  const void* down_bias;  // [experts, hidden] contiguous; or null
  void* out;  // [tokens, hidden] contiguous
  int64_t tokens;
  int64_t hidden;
  int64_t experts;
  int64_t intermediate;
  int64_t chosen;
  int64_t x_stride;
  int64_t gate_up_kind;
  int64_t gate_up_group;  // inputs; 0: a row's
  int64_t gate_up_group_dtype;  // of scales and offsets of groups: kFloat32, kBFloat16 or kPowers
  int64_t down_kind;
  int64_t down_group;  // inputs; 0: a row's
  int64_t down_group_dtype;  // of scales and offsets of groups: kFloat32, kBFloat16 or kPowers
  int64_t activation = 0;
  double alpha = 1.0;
  double limit = 0.0;
  int64_t weighs_inputs = 0;
  int64_t dtype;
  int64_t threads;
};
static_assert(sizeof(ExpertsArgs) == 256, "as in Python");
static_assert(offsetof(ExpertsArgs, x) == 0 && sizeof(ExpertsArgs::x) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, gate_up) == 8 && sizeof(ExpertsArgs::gate_up) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, gate_up_scales) == 16 && sizeof(ExpertsArgs::gate_up_scales) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, gate_up_offsets) == 24 && sizeof(ExpertsArgs::gate_up_offsets) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, gate_up_order) == 32 && sizeof(ExpertsArgs::gate_up_order) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, down) == 40 && sizeof(ExpertsArgs::down) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, down_scales) == 48 && sizeof(ExpertsArgs::down_scales) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, down_offsets) == 56 && sizeof(ExpertsArgs::down_offsets) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, down_order) == 64 && sizeof(ExpertsArgs::down_order) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, weights) == 72 && sizeof(ExpertsArgs::weights) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, ids) == 80 && sizeof(ExpertsArgs::ids) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, gate_up_bias) == 88 && sizeof(ExpertsArgs::gate_up_bias) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, down_bias) == 96 && sizeof(ExpertsArgs::down_bias) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, out) == 104 && sizeof(ExpertsArgs::out) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, tokens) == 112 && sizeof(ExpertsArgs::tokens) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, hidden) == 120 && sizeof(ExpertsArgs::hidden) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, experts) == 128 && sizeof(ExpertsArgs::experts) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, intermediate) == 136 && sizeof(ExpertsArgs::intermediate) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, chosen) == 144 && sizeof(ExpertsArgs::chosen) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, x_stride) == 152 && sizeof(ExpertsArgs::x_stride) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, gate_up_kind) == 160 && sizeof(ExpertsArgs::gate_up_kind) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, gate_up_group) == 168 && sizeof(ExpertsArgs::gate_up_group) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, gate_up_group_dtype) == 176 && sizeof(ExpertsArgs::gate_up_group_dtype) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, down_kind) == 184 && sizeof(ExpertsArgs::down_kind) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, down_group) == 192 && sizeof(ExpertsArgs::down_group) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, down_group_dtype) == 200 && sizeof(ExpertsArgs::down_group_dtype) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, activation) == 208 && sizeof(ExpertsArgs::activation) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, alpha) == 216 && sizeof(ExpertsArgs::alpha) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, limit) == 224 && sizeof(ExpertsArgs::limit) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, weighs_inputs) == 232 && sizeof(ExpertsArgs::weighs_inputs) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, dtype) == 240 && sizeof(ExpertsArgs::dtype) == 8, "as in Python");
static_assert(offsetof(ExpertsArgs, threads) == 248 && sizeof(ExpertsArgs::threads) == 8, "as in Python");

// Updates of a projection's results; see `ops.lora`. All matrices have one dtype.
struct LoraArgs {
  const void* base;  // [tokens, outputs] contiguous
  const void* x;  // [tokens, inputs], with a free stride of the first dimension
  const void* down;  // [num_slots, parts * room, inputs] contiguous
  const void* up;  // [num_slots, room, outputs] contiguous
  const int32_t* ranks;  // [num_slots, parts] contiguous
  const int32_t* starts;  // [parts + 1] contiguous
  const int64_t* chosen;  // [tokens] contiguous
  void* out;  // [tokens, outputs] contiguous
  int64_t tokens;
  int64_t outputs;
  int64_t inputs;
  int64_t slots;
  int64_t parts;
  int64_t room;
  int64_t x_stride;
  int64_t dtype;
  int64_t threads;
};
static_assert(sizeof(LoraArgs) == 136, "as in Python");
static_assert(offsetof(LoraArgs, base) == 0 && sizeof(LoraArgs::base) == 8, "as in Python");
static_assert(offsetof(LoraArgs, x) == 8 && sizeof(LoraArgs::x) == 8, "as in Python");
static_assert(offsetof(LoraArgs, down) == 16 && sizeof(LoraArgs::down) == 8, "as in Python");
static_assert(offsetof(LoraArgs, up) == 24 && sizeof(LoraArgs::up) == 8, "as in Python");
static_assert(offsetof(LoraArgs, ranks) == 32 && sizeof(LoraArgs::ranks) == 8, "as in Python");
static_assert(offsetof(LoraArgs, starts) == 40 && sizeof(LoraArgs::starts) == 8, "as in Python");
static_assert(offsetof(LoraArgs, chosen) == 48 && sizeof(LoraArgs::chosen) == 8, "as in Python");
static_assert(offsetof(LoraArgs, out) == 56 && sizeof(LoraArgs::out) == 8, "as in Python");
static_assert(offsetof(LoraArgs, tokens) == 64 && sizeof(LoraArgs::tokens) == 8, "as in Python");
static_assert(offsetof(LoraArgs, outputs) == 72 && sizeof(LoraArgs::outputs) == 8, "as in Python");
static_assert(offsetof(LoraArgs, inputs) == 80 && sizeof(LoraArgs::inputs) == 8, "as in Python");
static_assert(offsetof(LoraArgs, slots) == 88 && sizeof(LoraArgs::slots) == 8, "as in Python");
static_assert(offsetof(LoraArgs, parts) == 96 && sizeof(LoraArgs::parts) == 8, "as in Python");
static_assert(offsetof(LoraArgs, room) == 104 && sizeof(LoraArgs::room) == 8, "as in Python");
static_assert(offsetof(LoraArgs, x_stride) == 112 && sizeof(LoraArgs::x_stride) == 8, "as in Python");
static_assert(offsetof(LoraArgs, dtype) == 120 && sizeof(LoraArgs::dtype) == 8, "as in Python");
static_assert(offsetof(LoraArgs, threads) == 128 && sizeof(LoraArgs::threads) == 8, "as in Python");

// Rounds weights to int8 by row, or to int4 by group.
struct QuantizeArgs {
  const void* weight;  // [rows, inputs] contiguous, finite
  void* values;  // like `weight` of LinearArgs, for `kind`
  void* scales;  // int8: float [rows]; int4: bfloat16 [rows, inputs / group], also in strips
  void* offsets;  // int4: like `scales`
  int64_t rows;
  int64_t inputs;
  int64_t dtype;
  int64_t kind;
  int64_t group;
  int64_t threads;
};
static_assert(sizeof(QuantizeArgs) == 80, "as in Python");
static_assert(offsetof(QuantizeArgs, weight) == 0 && sizeof(QuantizeArgs::weight) == 8, "as in Python");
static_assert(offsetof(QuantizeArgs, values) == 8 && sizeof(QuantizeArgs::values) == 8, "as in Python");
static_assert(offsetof(QuantizeArgs, scales) == 16 && sizeof(QuantizeArgs::scales) == 8, "as in Python");
static_assert(offsetof(QuantizeArgs, offsets) == 24 && sizeof(QuantizeArgs::offsets) == 8, "as in Python");
static_assert(offsetof(QuantizeArgs, rows) == 32 && sizeof(QuantizeArgs::rows) == 8, "as in Python");
static_assert(offsetof(QuantizeArgs, inputs) == 40 && sizeof(QuantizeArgs::inputs) == 8, "as in Python");
static_assert(offsetof(QuantizeArgs, dtype) == 48 && sizeof(QuantizeArgs::dtype) == 8, "as in Python");
static_assert(offsetof(QuantizeArgs, kind) == 56 && sizeof(QuantizeArgs::kind) == 8, "as in Python");
static_assert(offsetof(QuantizeArgs, group) == 64 && sizeof(QuantizeArgs::group) == 8, "as in Python");
static_assert(offsetof(QuantizeArgs, threads) == 72 && sizeof(QuantizeArgs::threads) == 8, "as in Python");

// Packs rows of bfloat16 as kBFloat16Strips, in place.
struct LayOutArgs {
  void* weight;  // [strips * 64, 2 * words] contiguous
  int64_t strips;
  int64_t words;
  int64_t threads;
};
static_assert(sizeof(LayOutArgs) == 32, "as in Python");
static_assert(offsetof(LayOutArgs, weight) == 0 && sizeof(LayOutArgs::weight) == 8, "as in Python");
static_assert(offsetof(LayOutArgs, strips) == 8 && sizeof(LayOutArgs::strips) == 8, "as in Python");
static_assert(offsetof(LayOutArgs, words) == 16 && sizeof(LayOutArgs::words) == 8, "as in Python");
static_assert(offsetof(LayOutArgs, threads) == 24 && sizeof(LayOutArgs::threads) == 8, "as in Python");

// A causal convolution. Strides are in elements.
//
// Rows have their tokens behind one another; those behind the last are padding.
struct ConvolutionArgs {
  const void* x;  // [tokens, channels], with a free stride of the first dimension
  const void* weight;  // [taps, channels] contiguous
  const void* bias;  // [channels] contiguous; or null
  void* states;  // [num_slots, taps - 1, channels], with a free stride of the first dimension
  const int64_t* slots;  // [rows] contiguous
  const int32_t* starts;  // [rows + 1] contiguous
  void* out;  // [tokens, channels] contiguous
  int64_t tokens;
  int64_t channels;
  int64_t taps;
  int64_t num_slots;
  int64_t rows;
  int64_t x_stride;
  int64_t state_stride;
  int64_t silu = 1;
  int64_t dtype;
  int64_t threads;
};
static_assert(sizeof(ConvolutionArgs) == 136, "as in Python");
static_assert(offsetof(ConvolutionArgs, x) == 0 && sizeof(ConvolutionArgs::x) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, weight) == 8 && sizeof(ConvolutionArgs::weight) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, bias) == 16 && sizeof(ConvolutionArgs::bias) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, states) == 24 && sizeof(ConvolutionArgs::states) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, slots) == 32 && sizeof(ConvolutionArgs::slots) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, starts) == 40 && sizeof(ConvolutionArgs::starts) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, out) == 48 && sizeof(ConvolutionArgs::out) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, tokens) == 56 && sizeof(ConvolutionArgs::tokens) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, channels) == 64 && sizeof(ConvolutionArgs::channels) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, taps) == 72 && sizeof(ConvolutionArgs::taps) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, num_slots) == 80 && sizeof(ConvolutionArgs::num_slots) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, rows) == 88 && sizeof(ConvolutionArgs::rows) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, x_stride) == 96 && sizeof(ConvolutionArgs::x_stride) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, state_stride) == 104 && sizeof(ConvolutionArgs::state_stride) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, silu) == 112 && sizeof(ConvolutionArgs::silu) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, dtype) == 120 && sizeof(ConvolutionArgs::dtype) == 8, "as in Python");
static_assert(offsetof(ConvolutionArgs, threads) == 128 && sizeof(ConvolutionArgs::threads) == 8, "as in Python");

// A linear recurrence. Strides are in elements, rows as in ConvolutionArgs.
struct RecurrenceArgs {
  const void* query;  // [tokens, key_heads, key_dim], with a free stride of the first dimension
  const void* key;  // [tokens, key_heads, key_dim], with a free stride of the first dimension
  const void* value;  // [tokens, heads, dim], with a free stride of the first dimension
  const float* decay;  // [tokens, heads] contiguous
  const float* factor;  // [tokens, heads] contiguous
  const float* skip;  // [heads] contiguous; or null
  float* states;  // [num_slots, heads, key_dim, dim], with a free stride of the first dimension
  const int64_t* slots;  // [rows] contiguous
  const int32_t* starts;  // [rows + 1] contiguous
  void* out;  // [tokens, heads, dim] contiguous
  int64_t tokens;
  int64_t key_heads;
  int64_t key_dim;
  int64_t heads;
  int64_t dim;
  int64_t num_slots;
  int64_t rows;
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int64_t state_stride;
  int64_t delta;
  int64_t normalizes;
  int64_t dtype;
  int64_t threads;
};
static_assert(sizeof(RecurrenceArgs) == 200, "as in Python");
static_assert(offsetof(RecurrenceArgs, query) == 0 && sizeof(RecurrenceArgs::query) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, key) == 8 && sizeof(RecurrenceArgs::key) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, value) == 16 && sizeof(RecurrenceArgs::value) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, decay) == 24 && sizeof(RecurrenceArgs::decay) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, factor) == 32 && sizeof(RecurrenceArgs::factor) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, skip) == 40 && sizeof(RecurrenceArgs::skip) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, states) == 48 && sizeof(RecurrenceArgs::states) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, slots) == 56 && sizeof(RecurrenceArgs::slots) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, starts) == 64 && sizeof(RecurrenceArgs::starts) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, out) == 72 && sizeof(RecurrenceArgs::out) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, tokens) == 80 && sizeof(RecurrenceArgs::tokens) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, key_heads) == 88 && sizeof(RecurrenceArgs::key_heads) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, key_dim) == 96 && sizeof(RecurrenceArgs::key_dim) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, heads) == 104 && sizeof(RecurrenceArgs::heads) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, dim) == 112 && sizeof(RecurrenceArgs::dim) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, num_slots) == 120 && sizeof(RecurrenceArgs::num_slots) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, rows) == 128 && sizeof(RecurrenceArgs::rows) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, query_stride) == 136 && sizeof(RecurrenceArgs::query_stride) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, key_stride) == 144 && sizeof(RecurrenceArgs::key_stride) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, value_stride) == 152 && sizeof(RecurrenceArgs::value_stride) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, state_stride) == 160 && sizeof(RecurrenceArgs::state_stride) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, delta) == 168 && sizeof(RecurrenceArgs::delta) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, normalizes) == 176 && sizeof(RecurrenceArgs::normalizes) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, dtype) == 184 && sizeof(RecurrenceArgs::dtype) == 8, "as in Python");
static_assert(offsetof(RecurrenceArgs, threads) == 192 && sizeof(RecurrenceArgs::threads) == 8, "as in Python");

// An argument of a compiled function: a weight, or a tensor whose first dimension is tokens.
struct BoundInput {
  Handle handle;  // a weight; null for a token argument
  int64_t dtype;  // torch's number; this and the fields below are for token arguments only
  int64_t dims;
  int64_t sizes[kMaxDims];  // sizes[0] is unused
};
static_assert(sizeof(BoundInput) == 48, "as in Python");
static_assert(offsetof(BoundInput, handle) == 0 && sizeof(BoundInput::handle) == 8, "as in Python");
static_assert(offsetof(BoundInput, dtype) == 8 && sizeof(BoundInput::dtype) == 8, "as in Python");
static_assert(offsetof(BoundInput, dims) == 16 && sizeof(BoundInput::dims) == 8, "as in Python");
static_assert(offsetof(BoundInput, sizes) == 24 && sizeof(BoundInput::sizes) == 24, "as in Python");

// A layer's attention in a step.
struct AttentionLayer {
  const AttentionArgs* attention;  // with the layer's constants, and its part of the KV cache
  int64_t group;  // index of the group of layers whose block tables it uses
};
static_assert(sizeof(AttentionLayer) == 16, "as in Python");
static_assert(offsetof(AttentionLayer, attention) == 0 && sizeof(AttentionLayer::attention) == 8, "as in Python");
static_assert(offsetof(AttentionLayer, group) == 8 && sizeof(AttentionLayer::group) == 8, "as in Python");

// A layer's latent attention in a step.
struct LatentLayer {
  const LatentArgs* attention;  // as in AttentionLayer
  int64_t group;  // as in AttentionLayer
};
static_assert(sizeof(LatentLayer) == 16, "as in Python");
static_assert(offsetof(LatentLayer, attention) == 0 && sizeof(LatentLayer::attention) == 8, "as in Python");
static_assert(offsetof(LatentLayer, group) == 8 && sizeof(LatentLayer::group) == 8, "as in Python");

// A layer's convolution and recurrence in a step; a row's states are in the slot of its number.
//
// Queries, keys and values are parts of the channels that are convolved.
struct RecurrenceLayer {
  const ConvolutionArgs* convolution;  // with the layer's constants and states
  const RecurrenceArgs* recurrence;  // the same
  int64_t query;  // number of the first channel of queries
  int64_t key;  // the same of keys
  int64_t value;  // the same of values
};
static_assert(sizeof(RecurrenceLayer) == 40, "as in Python");
static_assert(offsetof(RecurrenceLayer, convolution) == 0 && sizeof(RecurrenceLayer::convolution) == 8, "as in Python");
static_assert(offsetof(RecurrenceLayer, recurrence) == 8 && sizeof(RecurrenceLayer::recurrence) == 8, "as in Python");
static_assert(offsetof(RecurrenceLayer, query) == 16 && sizeof(RecurrenceLayer::query) == 8, "as in Python");
static_assert(offsetof(RecurrenceLayer, key) == 24 && sizeof(RecurrenceLayer::key) == 8, "as in Python");
static_assert(offsetof(RecurrenceLayer, value) == 32 && sizeof(RecurrenceLayer::value) == 8, "as in Python");

// One entry of a program: a function and its constants. Step tensors have numbers.
struct Instruction {
  StepFunction* run;  // of a kind of mixer, or slipstream_step_call
  const void* record;  // a record of the function's kind, or a Bound
  int64_t num_reads;
  int64_t num_writes;
  int64_t reads[kMaxTokenInputs];
  int64_t writes[kMaxResults];
  int64_t last_reads;  // bit i: no later instruction reads reads[i]
};
static_assert(sizeof(Instruction) == 168, "as in Python");
static_assert(offsetof(Instruction, run) == 0 && sizeof(Instruction::run) == 8, "as in Python");
static_assert(offsetof(Instruction, record) == 8 && sizeof(Instruction::record) == 8, "as in Python");
static_assert(offsetof(Instruction, num_reads) == 16 && sizeof(Instruction::num_reads) == 8, "as in Python");
static_assert(offsetof(Instruction, num_writes) == 24 && sizeof(Instruction::num_writes) == 8, "as in Python");
static_assert(offsetof(Instruction, reads) == 32 && sizeof(Instruction::reads) == 64, "as in Python");
static_assert(offsetof(Instruction, writes) == 96 && sizeof(Instruction::writes) == 64, "as in Python");
static_assert(offsetof(Instruction, last_reads) == 160 && sizeof(Instruction::last_reads) == 8, "as in Python");

// Shared by all steps of an engine: its program, its KV cache and its rows.
struct StepContext {
  // [length]: from token ids (tensor 0), positions (1), slots of adapters (2) and own inputs
  const Instruction* program;
  const Bound* head;  // hidden states to logits
  int32_t* tokens;  // [rows, token_stride]: (row, position) -> token id
  const int32_t* block_tables;  // [groups, rows, block_table_stride], groups group_stride apart
  const double* temperatures;  // per row, temperature_stride apart
  const int64_t* seeds;  // per row, seed_stride apart
  const int32_t* adapter_slots;  // per row; or null, and tensor 2 is not given
  int64_t length;  // of the program
  int64_t last_mixer;  // index of its last mixer
  int64_t kept;  // bit i: tensor i is read after the last mixer, which does not write it
  int64_t hidden;  // number of the hidden states' tensor
  int64_t own_inputs;  // step inputs of the model's own
  int64_t first_own;  // number of the first one's tensor; the others follow
  int64_t rows;
  int64_t token_stride;
  int64_t groups;
  int64_t group_stride;
  int64_t block_table_stride;
  int64_t temperature_stride;
  int64_t seed_stride;
  int64_t vocab_size;
  int64_t block_size;
  int64_t mixed_width;  // elements per token of the widest output of a mixer
  int64_t dtype;  // of the model
  int64_t torch_dtype;  // torch's number of it
  int64_t torch_index_dtype;  // torch's number of int64
  int64_t threads;
  int64_t deterministic;
};
static_assert(sizeof(StepContext) == 224, "as in Python");
static_assert(offsetof(StepContext, program) == 0 && sizeof(StepContext::program) == 8, "as in Python");
static_assert(offsetof(StepContext, head) == 8 && sizeof(StepContext::head) == 8, "as in Python");
static_assert(offsetof(StepContext, tokens) == 16 && sizeof(StepContext::tokens) == 8, "as in Python");
static_assert(offsetof(StepContext, block_tables) == 24 && sizeof(StepContext::block_tables) == 8, "as in Python");
static_assert(offsetof(StepContext, temperatures) == 32 && sizeof(StepContext::temperatures) == 8, "as in Python");
static_assert(offsetof(StepContext, seeds) == 40 && sizeof(StepContext::seeds) == 8, "as in Python");
static_assert(offsetof(StepContext, adapter_slots) == 48 && sizeof(StepContext::adapter_slots) == 8, "as in Python");
static_assert(offsetof(StepContext, length) == 56 && sizeof(StepContext::length) == 8, "as in Python");
static_assert(offsetof(StepContext, last_mixer) == 64 && sizeof(StepContext::last_mixer) == 8, "as in Python");
static_assert(offsetof(StepContext, kept) == 72 && sizeof(StepContext::kept) == 8, "as in Python");
static_assert(offsetof(StepContext, hidden) == 80 && sizeof(StepContext::hidden) == 8, "as in Python");
static_assert(offsetof(StepContext, own_inputs) == 88 && sizeof(StepContext::own_inputs) == 8, "as in Python");
static_assert(offsetof(StepContext, first_own) == 96 && sizeof(StepContext::first_own) == 8, "as in Python");
static_assert(offsetof(StepContext, rows) == 104 && sizeof(StepContext::rows) == 8, "as in Python");
static_assert(offsetof(StepContext, token_stride) == 112 && sizeof(StepContext::token_stride) == 8, "as in Python");
static_assert(offsetof(StepContext, groups) == 120 && sizeof(StepContext::groups) == 8, "as in Python");
static_assert(offsetof(StepContext, group_stride) == 128 && sizeof(StepContext::group_stride) == 8, "as in Python");
static_assert(offsetof(StepContext, block_table_stride) == 136 && sizeof(StepContext::block_table_stride) == 8, "as in Python");
static_assert(offsetof(StepContext, temperature_stride) == 144 && sizeof(StepContext::temperature_stride) == 8, "as in Python");
static_assert(offsetof(StepContext, seed_stride) == 152 && sizeof(StepContext::seed_stride) == 8, "as in Python");
static_assert(offsetof(StepContext, vocab_size) == 160 && sizeof(StepContext::vocab_size) == 8, "as in Python");
static_assert(offsetof(StepContext, block_size) == 168 && sizeof(StepContext::block_size) == 8, "as in Python");
static_assert(offsetof(StepContext, mixed_width) == 176 && sizeof(StepContext::mixed_width) == 8, "as in Python");
static_assert(offsetof(StepContext, dtype) == 184 && sizeof(StepContext::dtype) == 8, "as in Python");
static_assert(offsetof(StepContext, torch_dtype) == 192 && sizeof(StepContext::torch_dtype) == 8, "as in Python");
static_assert(offsetof(StepContext, torch_index_dtype) == 200 && sizeof(StepContext::torch_index_dtype) == 8, "as in Python");
static_assert(offsetof(StepContext, threads) == 208 && sizeof(StepContext::threads) == 8, "as in Python");
static_assert(offsetof(StepContext, deterministic) == 216 && sizeof(StepContext::deterministic) == 8, "as in Python");

// Masks of rows and their requests' own constraints.
//
// All but `constraints` are [rows, words]; bit v % 32 of word v / 32 stands for token v.
struct MaskArgs {
  uint32_t* masks;  // tokens that a row's grammar allows
  const uint32_t* ends;  // tokens that end its output
  const uint32_t* allowed;  // tokens of which its output may consist
  // [rows], a RowConstraint: none; `allowed` counts; also, output must not end yet
  const uint8_t* constraints;
  int64_t rows;
  int64_t words;
};
static_assert(sizeof(MaskArgs) == 48, "as in Python");
static_assert(offsetof(MaskArgs, masks) == 0 && sizeof(MaskArgs::masks) == 8, "as in Python");
static_assert(offsetof(MaskArgs, ends) == 8 && sizeof(MaskArgs::ends) == 8, "as in Python");
static_assert(offsetof(MaskArgs, allowed) == 16 && sizeof(MaskArgs::allowed) == 8, "as in Python");
static_assert(offsetof(MaskArgs, constraints) == 24 && sizeof(MaskArgs::constraints) == 8, "as in Python");
static_assert(offsetof(MaskArgs, rows) == 32 && sizeof(MaskArgs::rows) == 8, "as in Python");
static_assert(offsetof(MaskArgs, words) == 40 && sizeof(MaskArgs::words) == 8, "as in Python");

// How the last of some grammar steps ended.
struct LastGrammarStep {
  int64_t outcome;  // an Outcome
  double seconds;  // CPU time of this thread
};
static_assert(sizeof(LastGrammarStep) == 16, "as in Python");
static_assert(offsetof(LastGrammarStep, outcome) == 0 && sizeof(LastGrammarStep::outcome) == 8, "as in Python");
static_assert(offsetof(LastGrammarStep, seconds) == 8 && sizeof(LastGrammarStep::seconds) == 8, "as in Python");

typedef int AttentionFunction(const AttentionArgs*);
SLIPSTREAM_EXPORT AttentionFunction slipstream_paged_attention;
typedef int LatentFunction(const LatentArgs*);
SLIPSTREAM_EXPORT LatentFunction slipstream_latent_attention;
typedef int GumbelFunction(const GumbelArgs*);
SLIPSTREAM_EXPORT GumbelFunction slipstream_gumbel_argmax;
typedef int LinearFunction(const LinearArgs*);
SLIPSTREAM_EXPORT LinearFunction slipstream_linear;
typedef int ExpertsFunction(const ExpertsArgs*);
SLIPSTREAM_EXPORT ExpertsFunction slipstream_experts;
typedef int LoraFunction(const LoraArgs*);
SLIPSTREAM_EXPORT LoraFunction slipstream_lora;
typedef int QuantizeFunction(const QuantizeArgs*);
SLIPSTREAM_EXPORT QuantizeFunction slipstream_quantize;
typedef int LayOutFunction(const LayOutArgs*);
SLIPSTREAM_EXPORT LayOutFunction slipstream_lay_out;
typedef int ConvolutionFunction(const ConvolutionArgs*);
SLIPSTREAM_EXPORT ConvolutionFunction slipstream_convolution;
typedef int RecurrenceFunction(const RecurrenceArgs*);
SLIPSTREAM_EXPORT RecurrenceFunction slipstream_recurrence;
