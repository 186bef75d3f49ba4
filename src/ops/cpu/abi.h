// The plain C interface that Python calls through ctypes. Field order and widths are repeated in
// kernel_library.py, projection_calls.py, adapt_calls.py and state_calls.py (struct.pack formats);
// SLIPSTREAM_ABI changes with them.
#pragma once
#include <cstddef>
#include <cstdint>

#define SLIPSTREAM_ABI 26
#define SLIPSTREAM_EXPORT extern "C" __attribute__((visibility("default")))

enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// What a cache of keys and values has: numbers in the dtype of queries, or codes of 8 bits, each row of
// which ends with a float32 factor (cached_rows.h).
enum CacheKind : int64_t { kAsQueries = 0, kInt8Codes = 1, kFloat8Codes = 2 };

enum Status : int {
  kOk = 0,
  kBadSlot = 1,       // slot_mapping names a slot outside of the cache
  kBadBlock = 2,      // a needed block table entry names a block outside of the cache
  kBadLengths = 3,    // query_start_loc or seq_lens contradict each other or the tensors
  kBadShape = 4,      // head_dim, heads or block_size is not supported by the kernel
  kOutOfMemory = 5,
  kCompiledFailed = 6,  // code that was compiled ahead of time failed; it holds the message
  kNoToken = 7,         // a step reads a token that was not produced yet, or is out of the vocabulary
  kBadRow = 8,          // a step names a row, or a position in it, that does not exist
  kBadMasks = 9,        // masks belong to other rows than those that sample, or are too short
};

// Modifiers of a layer's scores, in the order in which they are applied.
struct AttentionSpec {
  float scale;         // factor
  float cap;           // cap * tanh(score / cap); 0 for none
  int64_t window;      // keys that a token sees, itself included; 0 for all
  int64_t chunk;       // a token sees keys of its own chunk of so many tokens; 0 for no chunks
  const float* sinks;  // [num_heads], a logit that takes part in the denominator only; or null
};

// Strides are in elements; heads lie head_dim apart and the last dimension is contiguous.
struct AttentionArgs {
  const void* query;               // [tokens, num_heads, head_dim]
  const void* key;                 // [tokens, num_kv_heads, head_dim]
  const void* value;               // [tokens, num_kv_heads, head_dim]
  // [num_blocks, block_size, num_kv_heads, head_dim] contiguous; of codes, head_dim + 4 bytes
  void* key_cache;
  void* value_cache;               // same
  const int32_t* block_tables;     // [rows, block_table_stride]
  const int32_t* query_start_loc;  // [rows + 1]
  const int32_t* seq_lens;         // [rows]
  const int64_t* slot_mapping;     // [tokens]
  void* out;                       // [tokens, num_heads, head_dim] contiguous
  const AttentionSpec* spec;
  int64_t query_stride, key_stride, value_stride, block_table_stride;
  int64_t tokens, rows, num_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, max_blocks;
  int64_t dtype, threads;
  int64_t deterministic;  // whether results must not depend on how a row's tokens are cut into calls
  int64_t cache_kind;     // a CacheKind
  // 0, or how many leading elements of a key are its value, if key_cache is value_cache too. Elements of
  // `out` behind as many mean nothing then.
  int64_t value_dim;
};

// The cache has one vector per token: `rank` numbers from which the projections `up` make a key of `nope`
// numbers and a value of `value` numbers for each head, and `rope` rotated numbers that belong to the
// keys of all heads. Strides are in elements.
struct LatentArgs {
  const void* query;               // [tokens, heads, nope + rope], contiguous but for its tokens
  const void* latent;              // [tokens, rank + rope]
  void* cache;                     // [num_blocks, block_size, rank + rope] contiguous
  const void* up;                  // [heads, nope + value, rank] contiguous
  const int32_t* block_tables;     // [rows, block_table_stride]
  const int32_t* query_start_loc;  // [rows + 1]
  const int32_t* seq_lens;         // [rows]
  const int64_t* slot_mapping;     // [tokens]
  void* out;                       // [tokens, heads, value] contiguous
  const AttentionSpec* spec;       // only the scale counts
  int64_t query_stride, latent_stride, block_table_stride;
  int64_t tokens, rows, heads, nope, rope, rank, value;
  int64_t num_blocks, block_size, max_blocks;
  int64_t dtype, threads, deterministic;  // as in AttentionArgs
};

struct GumbelArgs {
  const float* logits;  // [rows, vocab_size], rows logits_stride apart
  const int64_t* seeds;
  const int64_t* positions;
  const float* temperatures;
  int64_t* tokens;
  int64_t rows, vocab_size, logits_stride, threads;
};

// Layouts of weights, beside the float types of DType. Quantized weights in strips
// (integer_linear.h) are multiplied by rounded inputs.
enum WeightKind : int64_t {
  kInt4 = 4,
  kInt4Strips = 5,
  kE2M1 = 6,  // numbers of four bits, packed like kInt4, in groups that have kPowers
  kInt8 = 8,
  kInt8Strips = 9,
  kFloat8 = 12,  // e4m3
  kBFloat16Strips = 17
};
constexpr int kStripOutputs = 64;
// Scales of kE2M1, beside the dtypes that numbers of groups may have: bytes e that stand for 2^(e - 127).
constexpr int64_t kPowers = 3;

struct LinearArgs {
  const void* x;        // [tokens, inputs], rows x_stride apart
  // [outputs, inputs] contiguous; four bits: [outputs, inputs / 2]. In strips of 64 outputs (the last one is
  // padded): int8 [strips, inputs / 4, 64, 4], int4 [strips, inputs / 8, 64, 4], bfloat16
  // [strips, inputs / 2, 64, 2].
  const void* weight;
  // int8 with group 0: [outputs]; otherwise [outputs, inputs / group], in strips
  // [strips, inputs / group, 64]
  const void* scales;
  const void* bias;     // [outputs] of x's dtype, or null
  void* out;            // [tokens, outputs] contiguous, of x's dtype
  const void* offsets;  // of groups, like `scales`: a weight is level * scale - offset; null for zeros
  int64_t tokens, inputs, outputs, x_stride;
  int64_t dtype, kind, group, threads;  // kind: a DType or a WeightKind
  int64_t group_dtype;  // of scales and offsets of groups: kFloat32, kBFloat16 or kPowers
};

// How an expert's gate and up are joined; the numbers are those of experts.py.
enum Activation : int64_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

// Each expert has a matrix of gate and up, [2 * intermediate, hidden], and one of down,
// [hidden, intermediate]. Experts are stacked; each is laid out like `weight` and `scales` of LinearArgs.
struct ExpertsArgs {
  const void* x;  // [tokens, hidden], rows x_stride apart
  const void* gate_up;
  const void* down;
  const void* gate_up_scales;
  const void* down_scales;
  const float* weights;  // [tokens, chosen]
  const int64_t* ids;    // [tokens, chosen]; an invalid expert number adds nothing
  void* out;             // [tokens, hidden] contiguous, of x's dtype
  int64_t tokens, hidden, intermediate, experts, chosen, x_stride, dtype;
  int64_t gate_up_kind, gate_up_group, down_kind, down_group;  // as in LinearArgs
  int64_t activation, threads;
  const void* gate_up_bias;  // [experts, 2 * intermediate] of x's dtype, or null
  const void* down_bias;     // [experts, hidden] of x's dtype, or null
  double alpha, limit;       // of kClampedSwiglu
  int64_t weighs_inputs;     // whether `weights` are factors of x instead of the results
  const void* gate_up_offsets;  // like the scales, or null
  const void* down_offsets;
  int64_t gate_up_group_dtype, down_group_dtype;  // as in LinearArgs
  // [experts, inputs]: which input an expert's weights in each column are for; null: in order.
  const int32_t* gate_up_order;
  const int32_t* down_order;
};

// Updates of a projection's results; see `ops.adapt`. All matrices have one dtype.
struct AdaptArgs {
  const void* base;       // [tokens, outputs] contiguous
  const void* x;          // [tokens, inputs], rows x_stride apart
  const void* down;       // [slots, parts * room, inputs] contiguous
  const void* up;         // [slots, room, outputs] contiguous
  const int32_t* ranks;   // [slots, parts]
  const int32_t* starts;  // [parts + 1]
  const int64_t* chosen;  // [tokens], slots; negative for none
  void* out;              // [tokens, outputs] contiguous
  int64_t tokens, inputs, outputs, x_stride, slots, parts, room, dtype, threads;
};

struct QuantizeArgs {
  const void* weight;  // [rows, inputs] contiguous, finite
  void* values;        // like `weight` of LinearArgs, for `kind`
  void* scales;        // int8: float [rows]; int4: bfloat16 [rows, inputs / group], also in strips
  void* offsets;       // int4: like `scales`
  int64_t rows, inputs, dtype, kind, group, threads;
};

// Strides are in elements. Rows have their tokens behind one another; those behind the last are padding.
struct ConvolutionArgs {
  const void* x;       // [tokens, channels], rows x_stride apart
  const void* weight;  // [taps, channels] contiguous; all of one dtype
  const void* bias;    // [channels], or null
  void* states;        // [num_slots, taps - 1, channels], slots state_stride apart
  const int64_t* slots;   // [rows]
  const int32_t* starts;  // [rows + 1]
  void* out;              // [tokens, channels] contiguous
  int64_t x_stride, state_stride, tokens, rows, channels, taps, num_slots, dtype, threads;
};

struct RecurrenceArgs {
  const void* query;      // [tokens, key_heads, key_dim], tokens query_stride apart
  const void* key;        // the same, key_stride
  const void* value;      // [tokens, heads, dim], tokens value_stride apart
  const float* decay;     // [tokens, heads] contiguous
  const float* factor;    // [tokens, heads] contiguous
  const float* skip;      // [heads], or null
  float* states;          // [num_slots, heads, key_dim, dim], slots state_stride apart
  const int64_t* slots;   // [rows]
  const int32_t* starts;  // [rows + 1]
  void* out;              // [tokens, heads, dim] contiguous
  int64_t query_stride, key_stride, value_stride, state_stride;
  int64_t tokens, rows, key_heads, heads, key_dim, dim, num_slots, dtype, delta, normalizes, threads;
};

typedef int ConvolutionFunction(const ConvolutionArgs*);
typedef int RecurrenceFunction(const RecurrenceArgs*);
typedef int QuantizeFunction(const QuantizeArgs*);
// Packs `strips` * 64 rows of `words` bfloat16 pairs as kBFloat16Strips, in place.
typedef int LayOutFunction(void* weight, int64_t strips, int64_t words, int64_t threads);
typedef int AttentionFunction(const AttentionArgs*);
typedef int LatentFunction(const LatentArgs*);
typedef int GumbelFunction(const GumbelArgs*);
typedef int LinearFunction(const LinearArgs*);
typedef int ExpertsFunction(const ExpertsArgs*);
typedef int AdaptFunction(const AdaptArgs*);

SLIPSTREAM_EXPORT AttentionFunction slipstream_paged_attention;
SLIPSTREAM_EXPORT LatentFunction slipstream_latent_attention;
SLIPSTREAM_EXPORT GumbelFunction slipstream_gumbel_argmax;
SLIPSTREAM_EXPORT LinearFunction slipstream_linear;
SLIPSTREAM_EXPORT ExpertsFunction slipstream_experts;
SLIPSTREAM_EXPORT AdaptFunction slipstream_adapt;
SLIPSTREAM_EXPORT ConvolutionFunction slipstream_convolution;
SLIPSTREAM_EXPORT RecurrenceFunction slipstream_recurrence;
// Rounds weights to int8 by row, or to int4 by group.
SLIPSTREAM_EXPORT QuantizeFunction slipstream_quantize;
SLIPSTREAM_EXPORT LayOutFunction slipstream_lay_out;

// For code compiled ahead of time: a pointer to an at::Tensor, or to a Tensor (tensors.h) if the code
// was rewritten for those.
typedef void* Handle;

struct TorchFunctions {  // aoti_torch_...
  int32_t (*new_handle)(Handle, Handle*);
  int32_t (*delete_tensor)(Handle);
  int32_t (*from_blob)(void* data, int64_t dims, const int64_t* sizes, const int64_t* strides,
                       int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index,
                       Handle*);
  int32_t (*empty_strided)(int64_t dims, const int64_t* sizes, const int64_t* strides,
                           int32_t dtype, int32_t device_type, int32_t device_index, Handle*);
  int32_t (*get_data_ptr)(Handle, void**);
  int32_t (*get_dim)(Handle, int64_t*);
  int32_t (*get_sizes)(Handle, int64_t**);
  int32_t (*get_strides)(Handle, int64_t**);
  int32_t (*get_dtype)(Handle, int32_t*);
};

// torch's number of a dtype, and ours (a DType or a WeightKind).
struct DTypePair {
  int32_t torch;
  int64_t ours;
};
constexpr DTypePair kTorchDTypes[] = {
    {6, kFloat32}, {15, kBFloat16}, {5, kFloat16}, {1, kInt8}, {0, kInt4}, {24, kFloat8}};

constexpr int kMaxDims = 3;
constexpr int kMaxTokenInputs = 8;
constexpr int kMaxResults = 8;

struct BoundInput {
  Handle handle;  // a weight; null for an argument whose dimension 0 counts tokens
  int64_t dtype;  // torch's number; this and the fields below are for token arguments only
  int64_t dims, sizes[kMaxDims];  // sizes[0] is unused
};

// AOTInductorModelContainerRunSingleThreaded
typedef int32_t CompiledFunction(void* container, Handle* inputs, size_t num_inputs,
                                 Handle* outputs, size_t num_outputs, void* stream, void* proxy);

struct Bound;  // a compiled function and its weights

// Constants of one layer's attention, and its part of the KV cache.
struct AttentionLayer {
  void* key_cache;    // as in AttentionArgs; `cache` of LatentArgs
  void* value_cache;  // same; null for latent attention
  const AttentionSpec* spec;
  const void* up;     // `up` of LatentArgs; null for ordinary attention
  int64_t num_heads, num_kv_heads, head_dim, num_blocks, block_size;
  int64_t group;      // index of the group of layers whose block tables it uses
  int64_t nope, rank, value;  // as in LatentArgs, where head_dim is nope + rope
  int64_t cache_kind;         // a CacheKind
};

constexpr int kMaxStepTensors = 16;

// One entry of a program: a compiled call, or a layer's attention. Step tensors have numbers.
struct Instruction {
  const Bound* call;                // null: attention
  const AttentionLayer* attention;  // reads query, key and value, or query and latent; writes its output
  int64_t num_reads, num_writes;
  int64_t reads[kMaxTokenInputs], writes[kMaxResults];
  int64_t last_reads;  // bit i: no later instruction reads reads[i]
};

// Shared by all steps of an engine: its program, its KV cache and its rows.
struct StepContext {
  // [length]: from token ids (tensor 0), positions (1) and slots of adapters (2)
  const Instruction* program;
  const Bound* head;           // hidden states to logits
  int32_t* tokens;                 // [rows, token_stride]: (row, position) -> token id
  const int32_t* block_tables;     // [groups, rows, block_table_stride], groups group_stride apart
  const double* temperatures;      // per row, temperature_stride apart
  const int64_t* seeds;            // per row, seed_stride apart
  const int32_t* adapter_slots;    // per row; or null, and tensor 2 is not given
  int64_t length, last_attention;  // of the program; index of its last attention
  int64_t kept;    // bit i: tensor i is read after the last attention, which does not write it
  int64_t hidden;  // number of the hidden states' tensor
  int64_t rows, token_stride, groups, group_stride, block_table_stride;
  int64_t temperature_stride, seed_stride;
  int64_t vocab_size, block_size, attended_width;  // elements per token of the widest attention output
  int64_t dtype, torch_dtype, torch_index_dtype;   // of the model; torch's numbers of it and of int64
  int64_t threads, deterministic;
};

// The next `tokens` tokens of a row, from position `start` on; `samples`: whether to sample after them.
struct RowStep {
  int64_t row, start, tokens, samples;
};

SLIPSTREAM_EXPORT void slipstream_use_torch(const TorchFunctions*);
// Takes ownership of the handles; null if a weight has an unsupported shape.
SLIPSTREAM_EXPORT Bound* slipstream_bind(CompiledFunction*, void* container, const BoundInput*,
                                         int64_t num_inputs, int64_t num_outputs, int64_t threads,
                                         int64_t has_own_tensors);
SLIPSTREAM_EXPORT void slipstream_unbind(Bound*);
// `data` are the token arguments, contiguous. The caller owns the results. Not thread-safe.
SLIPSTREAM_EXPORT int slipstream_call(const Bound*, int64_t tokens, void* const* data,
                                      Handle* results);
// A step waits here for the masks of its rows, which another thread computes meanwhile.
struct MaskGate;
SLIPSTREAM_EXPORT MaskGate* slipstream_new_gate();
SLIPSTREAM_EXPORT void slipstream_delete_gate(MaskGate*);
// Lets the step continue. The i-th sampling row may draw the tokens of mask rows[i] (layout as in
// MaskArgs), or any token if that is negative. The masks must not change until the step has sampled.
SLIPSTREAM_EXPORT int slipstream_open_gate(MaskGate*, const uint32_t* masks, int64_t words,
                                           const int64_t* rows, int64_t count);
// A whole step: gathers the rows' tokens, runs the model, and samples the next token [S] of each sampling
// row by temperature and seed, into `token_ids` and into the rows. `padding` tokens without a row are
// appended. Null arguments: no `gate` means no masks; no `token_ids` means no sampling; no `hidden` or
// `logits` means that they are not returned.
SLIPSTREAM_EXPORT int slipstream_step(const StepContext*, const RowStep* steps, int64_t num_steps,
                                      int64_t padding, MaskGate* gate, int64_t* token_ids,
                                      Handle* hidden, Handle* logits);

// A request's own constraint on a row, beside its grammar.
enum Wish : uint8_t { kNoWish = 0, kHasWish = 1, kGoesOn = 2 };

// All but `wishes` are [rows, words]; bit v % 32 of word v / 32 stands for token v.
struct MaskArgs {
  uint32_t* masks;          // tokens that a row's grammar allows
  const uint32_t* ends;     // tokens that end its output
  const uint32_t* allowed;  // tokens of which its output may consist
  const uint8_t* wishes;    // [rows], a Wish: none; `allowed` counts; also, output must not end yet
  int64_t rows, words;
};

// Applies the constraints of some rows to their masks, and sets for each whether any token is possible.
// Returns the number of rows without any; -1, without a change, if a row is invalid.
SLIPSTREAM_EXPORT int64_t slipstream_restrict_masks(const MaskArgs*, const int64_t* rows,
                                                    int64_t count, uint8_t* possible);

// Structs of llguidance.h, where their names begin with Llg.
struct MaskResult {
  const uint32_t* sample_mask;
  float temperature;
  bool is_stop;
};

struct CommitResult {
  const uint32_t* tokens;
  uint32_t n_tokens;
  bool is_stop;
};

struct MatcherFunctions {  // llg_commit_token, llg_compute_mask: 0, or an error
  int32_t (*commit_token)(void* matcher, uint32_t token, CommitResult*);
  int32_t (*compute_mask)(void* matcher, MaskResult*);
};

// A grammar step: a row's matcher takes a token (none if negative) and computes the row's next mask.
struct Move {
  void* matcher;
  int64_t row, token;
};

enum Outcome : int64_t {
  kMoved = 0,
  kMatcherFailed = 1,
  kNothingPossible = 2,
  kComplete = 3,  // only the end of the output may follow; its mask was not written
  kEnded = 4,     // the token ends the output; nothing was done
};

struct LastMove {
  int64_t outcome;  // an Outcome
  double seconds;   // CPU time of this thread
};

// Makes grammar steps in order, and applies the rows' constraints to the new masks. Stops after the first
// step whose outcome is not kMoved or that takes longer than `ordinary` seconds. Returns how many were
// made; -1, before any is made, if a row or a token is invalid.
SLIPSTREAM_EXPORT int64_t slipstream_move(const MatcherFunctions*, const MaskArgs*, const Move*,
                                          int64_t count, double ordinary, LastMove*);
