// The plain C interface that Python calls through ctypes. The structs, and the entry points of kernels
// that take them, are declared once, in abi.py, from which abi_records.h is written.
#pragma once
#include <cstddef>
#include <cstdint>

#include "runtime/weight_kinds.h"

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

// Scales of kE2M1, beside the dtypes that numbers of groups may have: bytes e that stand for 2^(e - 127).
constexpr int64_t kPowers = 3;

// How an expert's gate and up are joined; the numbers are those of experts.py.
enum Activation : int64_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

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
constexpr int kMaxStepTensors = 16;

// AOTInductorModelContainerRunSingleThreaded
typedef int32_t CompiledFunction(void* container, Handle* inputs, size_t num_inputs,
                                 Handle* outputs, size_t num_outputs, void* stream, void* proxy);

struct Bound;  // a compiled function and its weights
struct Step;   // a running step (step.h)
struct Instruction;
// What an instruction runs; returns a Status. Python finds the functions by their names,
// slipstream_step_<kind>.
typedef int StepFunction(const Instruction*, Step*);

#include "runtime/abi_records.h"

// The next `tokens` tokens of a row, from position `start` on; `samples`: how many of the last ones to
// sample after. It is 0 or 1, or more where the last tokens are drafts. `verifies` as in AttentionArgs.
struct RowStep {
  int64_t row, start, tokens, samples, verifies;
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
// A whole step: gathers the rows' tokens, runs the model, and samples the next tokens [S] of each sampling
// row by temperature and seed, into `token_ids` and into the rows. `padding` tokens without a row are
// appended. `own` has the model's own inputs of the other tokens, [own_inputs, tokens]. Null arguments: no
// `own` means zeros, as padding has; no `gate` means no masks; no `token_ids` means no sampling; no
// `hidden` or `logits` means that they are not returned.
SLIPSTREAM_EXPORT int slipstream_step(const StepContext*, const RowStep* steps, int64_t num_steps,
                                      int64_t padding, const int64_t* own, MaskGate* gate,
                                      int64_t* token_ids, Handle* hidden, Handle* logits);

// A request's own constraint on a row, beside its grammar.
enum RowConstraint : uint8_t { kUnconstrained = 0, kAllowedTokens = 1, kMayNotEnd = 2 };

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
struct GrammarStep {
  void* matcher;
  int64_t row, token;
};

enum Outcome : int64_t {
  kAdvanced = 0,
  kMatcherFailed = 1,
  kNothingPossible = 2,
  kComplete = 3,  // only the end of the output may follow; its mask was not written
  kEnded = 4,     // the token ends the output; nothing was done
};

// Makes grammar steps in order, and applies the rows' constraints to the new masks. Stops after the first
// step whose outcome is not kAdvanced or that takes longer than `ordinary` seconds. Returns how many were
// made; -1, before any is made, if a row or a token is invalid.
SLIPSTREAM_EXPORT int64_t slipstream_grammar_steps(const MatcherFunctions*, const MaskArgs*,
                                                   const GrammarStep*, int64_t count,
                                                   double ordinary, LastGrammarStep*);
