// A running step, as the functions of its instructions see it.
//
// An instruction is a function and a record, the function's constants. Mixers have theirs in
// step_mixers.cpp, compiled calls have slipstream_step_call. So another kind of mixer is one more
// function, and the interpreter (step.cpp) does not know it.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/bound.h"
#include "runtime/parallel.h"

// Aligned like torch's own tensors: results must not depend on the alignment of an input.
struct alignas(64) Line {
  char bytes[64];
};

inline size_t lines(size_t bytes) { return (bytes + sizeof(Line) - 1) / sizeof(Line); }

// The rows of a step, or of its sampled tokens, with several tokens each.
struct Batch {
  std::vector<int32_t> starts, lengths;      // [B + 1], [B]
  std::vector<int32_t> verifies;             // [B]: whether a row verifies drafts
  std::vector<std::vector<int32_t>> blocks;  // per group of layers, [B, max_blocks]

  void clear(int64_t groups) {
    for (auto* each : {&starts, &lengths, &verifies}) each->clear();
    starts.push_back(0);
    blocks.resize(size_t(groups));
    for (auto& each : blocks) each.clear();
  }

  // `table` is the row's block table in the first group; tables of groups lie `group_stride` apart.
  void add(int64_t tokens, int64_t length, bool is_verifying, const int32_t* table, int64_t group_stride,
           int64_t max_blocks) {
    starts.push_back(starts.back() + int32_t(tokens));
    lengths.push_back(int32_t(length));
    verifies.push_back(int32_t(is_verifying));
    for (auto& each : blocks) {
      each.insert(each.end(), table, table + max_blocks);
      table += group_stride;
    }
  }

  int64_t rows() const { return int64_t(lengths.size()); }
};

// What a step computes with, gathered from the rows. Reused between steps to avoid allocations.
struct Inputs {
  std::vector<int64_t> ids, positions, adapters;  // [T]
  std::vector<int64_t> own;                    // [own_inputs, T]
  std::vector<std::vector<int64_t>> slots;     // per group of layers, [T]
  Batch all, last;                             // all tokens; only those after which a token is sampled
  std::vector<int64_t> sampled, seeds, next;   // [S]: token index; seed; position of the drawn token
  std::vector<int64_t> rows;                   // [S]: row of the step context
  std::vector<int64_t> all_rows;               // [B]: row of the step context, and so of its states
  std::vector<float> temperatures;             // [S]
  std::vector<Line> mixed, scratch;            // a mixer's output [T, width], and what it needs meanwhile
  std::vector<Line> picked, hidden;            // [S, width], [S, H]
  std::vector<Line> kept[kMaxStepTensors];     // per step tensor, [S, ...]
  int64_t max_blocks = 0;

  void clear(int64_t groups) {
    for (auto* each : {&ids, &positions, &adapters, &sampled, &seeds, &next, &rows, &all_rows}) each->clear();
    slots.resize(size_t(groups));
    for (auto& each : slots) each.clear();
    all.clear(groups), last.clear(groups);
    temperatures.clear();
    max_blocks = 0;
  }

  // Copies the rows of the sampled tokens from `from`, which has `width` bytes per token, `stride` apart.
  const char* pick(const char* from, size_t stride, size_t width, std::vector<Line>* to) const {
    to->resize(lines(sampled.size() * width));
    char* row = to->data()->bytes;
    for (const int64_t token : sampled) {
      std::memcpy(row, from + size_t(token) * stride, width);
      row += width;
    }
    return to->data()->bytes;
  }
};

inline size_t item_size(const StepContext& c) { return c.dtype == kFloat32 ? 4 : 2; }

// The tensors of a running step, by number.
struct Step {
  Step(const StepContext& context, Inputs& in, bool wants_all)
      : context(context),
        in(in),
        tokens_(int64_t(in.ids.size())),
        wants_all_(wants_all),
        is_whole_(wants_all || int64_t(in.sampled.size()) == tokens_) {}

  const StepContext& context;
  Inputs& in;

  // Runs the program. Sets `hidden` to the hidden states of every token if all are wanted, else of the
  // sampled tokens. Leaves it null if no token is sampled.
  int run(Tensor** hidden);

  // Tokens of the tensors.
  int64_t tokens() const { return tokens_; }
  // Whether the mixer that runs need only compute its output for the sampled tokens. It changes its
  // memory by all of them.
  bool narrows() const { return narrows_; }
  // A tensor that the instruction reads.
  const Tensor& read(const Instruction& step, int64_t place) const {
    return *tensors_[step.reads[place]].get();
  }

  // Runs a compiled function.
  int call(const Instruction& step);

  // Runs a mixer. `compute(out)` computes its output [tokens, width], or if it narrows that of the
  // sampled tokens, into memory of the step, and returns a status.
  template <class Compute>
  int mix(const Instruction& step, int64_t width, const Compute& compute) {
    slipstream_rouse(context.threads);
    const size_t needed = lines(size_t(tokens_ * context.mixed_width) * item_size(context));
    if (in.mixed.size() < needed) in.mixed.resize(needed);
    if (int status = compute(in.mixed.data()->bytes)) return status;
    release_last(step);
    return put_mixed(step, width) ? kOk : kOutOfMemory;
  }

 private:
  bool put(int64_t number, const int64_t* data);
  bool put_mixed(const Instruction& step, int64_t width);
  void release_last(const Instruction& step);
  bool keep(int64_t number);
  int narrow();

  int64_t tokens_;
  const bool wants_all_, is_whole_;
  bool narrows_ = false;
  Owned tensors_[kMaxStepTensors];
};
