// The plain C interface that Python calls through ctypes. Field order and widths are repeated in
// kernel_library.py and projection_calls.py (struct.pack formats); SLIPSTREAM_ABI changes with them.
#pragma once
#include <cstddef>
#include <cstdint>

#define SLIPSTREAM_ABI 18
#define SLIPSTREAM_EXPORT extern "C" __attribute__((visibility("default")))

enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

enum Status : int {
  kOk = 0,
  kBadSlot = 1,       // slot_mapping names a slot outside of the cache
  kBadBlock = 2,      // a needed block table entry names a block outside of the cache
  kBadLengths = 3,    // query_start_loc or seq_lens contradict each other or the tensors
  kBadShape = 4,      // head_dim, heads or block_size outside of what the kernel is made for
  kOutOfMemory = 5,
  kCompiledFailed = 6,  // code that was compiled ahead of time says so; it knows why
  kNoToken = 7,         // a step has a token that nobody has produced, or that is none
  kBadRow = 8,          // a step names a row, or a position of it, that is not there
  kBadMasks = 9,        // masks are not of the rows that sample, or too short
};

// What becomes of a layer's scores, in this order.
struct AttentionSpec {
  float scale;         // factor of them
  float cap;           // cap * tanh(score / cap); 0 for none
  int64_t window;      // keys that a token sees, itself included; 0 for all
  const float* sinks;  // [num_heads], a logit that takes part in the denominator only; or null
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
  const AttentionSpec* spec;
  int64_t query_stride, key_stride, value_stride, block_table_stride;
  int64_t tokens, rows, num_heads, num_kv_heads, head_dim;
  int64_t num_blocks, block_size, max_blocks;
  int64_t dtype, threads;
  int64_t deterministic;  // whether how a row's tokens are cut into calls may not show in any bit
};

struct GumbelArgs {
  const float* logits;  // [rows, vocab_size], rows logits_stride apart
  const int64_t* seeds;
  const int64_t* positions;
  const float* temperatures;
  int64_t* tokens;
  int64_t rows, vocab_size, logits_stride, threads;
};

// How weights are held, beside the float types of DType. Those in strips (integer_linear.h) are
// multiplied by rounded inputs.
enum WeightKind : int64_t {
  kInt4 = 4,
  kInt4Strips = 5,
  kInt8 = 8,
  kInt8Strips = 9,
  kBFloat16Strips = 17
};
constexpr int kStripOutputs = 64;

struct LinearArgs {
  const void* x;        // [tokens, inputs], rows x_stride apart
  // [outputs, inputs] contiguous; int4: [outputs, inputs / 2]; in strips of 64 outputs, the last one
  // whole: int8 [strips, inputs / 4, 64, 4], int4 [strips, inputs / 8, 64, 4], bfloat16
  // [strips, inputs / 2, 64, 2].
  const void* weight;
  // int8: [outputs]; int4: [outputs, inputs / group], in strips [strips, inputs / group, 64]
  const float* scales;
  const void* bias;     // [outputs] of x's dtype, or null
  void* out;            // [tokens, outputs] contiguous, of x's dtype
  int64_t tokens, inputs, outputs, x_stride;
  int64_t dtype, kind, group, threads;  // kind: a DType or a WeightKind
};

// Of experts' gates; numbers as in experts.py.
enum Activation : int64_t { kSilu = 0, kGeluTanh = 1 };

// Of each expert a matrix of gates and ups, [2 * intermediate, hidden], and one [hidden, intermediate]:
// each as `weight` and `scales` of LinearArgs, one expert's after the other's.
struct ExpertsArgs {
  const void* x;  // [tokens, hidden], rows x_stride apart
  const void* gate_up;
  const void* down;
  const float* gate_up_scales;
  const float* down_scales;
  const float* weights;  // [tokens, chosen]
  const int64_t* ids;    // [tokens, chosen]: what is no expert's number adds nothing
  void* out;             // [tokens, hidden] contiguous, of x's dtype
  int64_t tokens, hidden, intermediate, experts, chosen, x_stride, dtype;
  int64_t gate_up_kind, gate_up_group, down_kind, down_group;  // as of LinearArgs
  int64_t activation, threads;
};

struct QuantizeArgs {
  const void* weight;  // [rows, inputs] contiguous, finite
  void* values;        // as `weight` of LinearArgs, of the kind
  float* scales;       // int8: [rows]; int4: [rows, inputs / group], in strips too
  int64_t rows, inputs, dtype, kind, group, threads;
};

typedef int QuantizeFunction(const QuantizeArgs*);
// Turns `strips` times 64 rows of `words` pairs of bfloat16 into kBFloat16Strips, in place.
typedef int LayOutFunction(void* weight, int64_t strips, int64_t words, int64_t threads);
typedef int AttentionFunction(const AttentionArgs*);
typedef int GumbelFunction(const GumbelArgs*);
typedef int LinearFunction(const LinearArgs*);
typedef int ExpertsFunction(const ExpertsArgs*);

SLIPSTREAM_EXPORT AttentionFunction slipstream_paged_attention;
SLIPSTREAM_EXPORT GumbelFunction slipstream_gumbel_argmax;
SLIPSTREAM_EXPORT LinearFunction slipstream_linear;
SLIPSTREAM_EXPORT ExpertsFunction slipstream_experts;
// Rounds weights to int8 by row, or to int4 by group.
SLIPSTREAM_EXPORT QuantizeFunction slipstream_quantize;
SLIPSTREAM_EXPORT LayOutFunction slipstream_lay_out;

// Code that was compiled ahead of time. A Handle is a pointer to an at::Tensor, or to a Tensor
// (tensors.h) for code that was made to take those.
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

// torch's numbers of dtypes, and ours (a DType or a WeightKind).
struct DTypePair {
  int32_t torch;
  int64_t ours;
};
constexpr DTypePair kTorchDTypes[] = {
    {6, kFloat32}, {15, kBFloat16}, {5, kFloat16}, {1, kInt8}, {0, kInt4}};

constexpr int kMaxDims = 3;
constexpr int kMaxTokenInputs = 8;
constexpr int kMaxResults = 8;

struct BoundInput {
  Handle handle;  // of a weight; null of an argument whose dimension 0 counts tokens
  int64_t dtype;  // torch's number; the rest is of token arguments only
  int64_t dims, sizes[kMaxDims];  // sizes[0] is unused
};

// AOTInductorModelContainerRunSingleThreaded
typedef int32_t CompiledFunction(void* container, Handle* inputs, size_t num_inputs,
                                 Handle* outputs, size_t num_outputs, void* stream, void* proxy);

struct Bound;  // a compiled function and its weights

// What attention of one layer is told, and its part of KV memory.
struct AttentionLayer {
  void* key_cache;    // [num_blocks, block_size, num_kv_heads, head_dim]
  void* value_cache;  // same
  const AttentionSpec* spec;
  int64_t num_heads, num_kv_heads, head_dim, num_blocks, block_size;
  int64_t group;  // of layers: whose block tables are its
};

constexpr int kMaxStepTensors = 16;

// One entry of a program: a compiled call, or attention of a layer. Step tensors go by number.
struct Instruction {
  const Bound* call;                // null: attention
  const AttentionLayer* attention;  // reads query, key, value, and writes what they attend to
  int64_t num_reads, num_writes;
  int64_t reads[kMaxTokenInputs], writes[kMaxResults];
  int64_t last_reads;  // bit i: nobody reads reads[i] behind this
};

// What all steps of an engine share: its program, its KV memory, and its rows.
struct StepContext {
  const Instruction* program;  // [length]: from token ids (tensor 0) and positions (1)
  const Bound* head;           // hidden states to logits
  int32_t* tokens;                 // [rows, token_stride]: row and position to token
  const int32_t* block_tables;     // [groups, rows, block_table_stride], groups group_stride apart
  const double* temperatures;      // of a row, temperature_stride apart
  const int64_t* seeds;            // of a row, seed_stride apart
  int64_t length, last_attention;  // of the program; the last instruction that is attention
  int64_t kept;    // bit i: tensor i is read behind that, besides what that writes
  int64_t hidden;  // the tensor of hidden states
  int64_t rows, token_stride, groups, group_stride, block_table_stride;
  int64_t temperature_stride, seed_stride;
  int64_t vocab_size, block_size, attended_width;  // elements of the widest attention's output
  int64_t dtype, torch_dtype, torch_index_dtype;   // of the model, and torch's number of int64
  int64_t threads, deterministic;
};

// The next `tokens` tokens of a row, from position `start` on.
struct RowStep {
  int64_t row, start, tokens, samples;
};

SLIPSTREAM_EXPORT void slipstream_use_torch(const TorchFunctions*);
// Takes the handles over; null if a weight cannot be taken.
SLIPSTREAM_EXPORT Bound* slipstream_bind(CompiledFunction*, void* container, const BoundInput*,
                                         int64_t num_inputs, int64_t num_outputs, int64_t threads,
                                         int64_t has_own_tensors);
SLIPSTREAM_EXPORT void slipstream_unbind(Bound*);
// `data` are the token arguments, contiguous; results are the caller's. Not for two threads at once.
SLIPSTREAM_EXPORT int slipstream_call(const Bound*, int64_t tokens, void* const* data,
                                      Handle* results);
// Where a step waits for the masks of its rows, which another thread computes meanwhile.
struct MaskGate;
SLIPSTREAM_EXPORT MaskGate* slipstream_new_gate();
SLIPSTREAM_EXPORT void slipstream_delete_gate(MaskGate*);
// Row i of those that sample may draw what row rows[i] of `masks` says (as of MaskArgs), which stays
// as it is until then; anything where that is negative.
SLIPSTREAM_EXPORT int slipstream_open_gate(MaskGate*, const uint32_t* masks, int64_t words,
                                           const int64_t* rows, int64_t count);
// A whole step: gathers the rows' tokens, computes, and draws the tokens that follow the rows that
// sample, [S], by temperature and seed, into `token_ids` and into the rows. `padding` tokens follow
// those of the rows, of no row. Null: `gate`, any token may be drawn; `token_ids`, none is; `hidden`,
// `logits`, not wanted.
SLIPSTREAM_EXPORT int slipstream_step(const StepContext*, const RowStep* steps, int64_t num_steps,
                                      int64_t padding, MaskGate* gate, int64_t* token_ids,
                                      Handle* hidden, Handle* logits);

// What rows wish besides their grammars.
enum Wish : uint8_t { kNoWish = 0, kHasWish = 1, kGoesOn = 2 };

// All are [rows, words]: bit v % 32 of word v / 32 is of token v.
struct MaskArgs {
  uint32_t* masks;          // what a row's grammar allows
  const uint32_t* ends;     // what ends its output
  const uint32_t* allowed;  // what it may consist of
  const uint8_t* wishes;    // [rows] a Wish
  int64_t rows, words;
};

// Changes the masks of some rows by their wishes, and says of each whether anything is possible.
// Returns of how many nothing is; -1, and changes nothing, if one is not there.
SLIPSTREAM_EXPORT int64_t slipstream_restrict_masks(const MaskArgs*, const int64_t* rows,
                                                    int64_t count, uint8_t* possible);

// Of llguidance.h, whose names these have there with Llg in front.
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

// A row's matcher takes a token, or none where that is negative, and computes the row's next mask.
struct Move {
  void* matcher;
  int64_t row, token;
};

enum Outcome : int64_t {
  kMoved = 0,
  kMatcherFailed = 1,
  kNothingPossible = 2,
  kComplete = 3,  // only the output's end may follow; its mask has not been written
  kEnded = 4,     // the token ends the output; nothing has been done
};

struct LastMove {
  int64_t outcome;  // an Outcome
  double seconds;   // of this thread's processor time
};

// Makes moves in turn, up to one that ends in another way than kMoved or takes longer than
// `ordinary` seconds, and brings the rows' wishes into their masks. Returns how many were made; -1,
// and makes none, if a row or a token is not there.
SLIPSTREAM_EXPORT int64_t slipstream_move(const MatcherFunctions*, const MaskArgs*, const Move*,
                                          int64_t count, double ordinary, LastMove*);
