// A whole step in one call: from the rows' input tokens to the sampled tokens, which are written back to
// the rows.
//
// No Python runs between the layers, nor between forward pass and sampling. The GIL is released for the
// whole call, so the event loop can run.
#include "runtime/step.h"

#include <new>

#include "runtime/mask_gate.h"

namespace {

int64_t blocks_of(const StepContext& c, int64_t length) {
  return (length + c.block_size - 1) / c.block_size;
}

Status check(const StepContext& c, const RowStep& step) {
  const int64_t end = step.start + step.tokens;
  const bool is_there = step.row >= 0 && step.row < c.rows && step.start >= 0 && step.tokens > 0 &&
                        step.samples >= 0 && step.samples <= step.tokens &&
                        end + (step.samples != 0) <= c.token_stride &&
                        blocks_of(c, end) <= c.block_table_stride;
  return is_there ? kOk : kBadRow;
}

void gather_sampling(const StepContext& c, const RowStep& step, int64_t next, Inputs* in) {
  in->rows.push_back(step.row);
  in->next.push_back(next);
  in->seeds.push_back(c.seeds[step.row * c.seed_stride]);
  in->temperatures.push_back(float(c.temperatures[step.row * c.temperature_stride]));
}

Status gather(const StepContext& c, const RowStep* steps, int64_t count, int64_t padding,
              Inputs* in) {
  in->clear(c.groups);
  for (int64_t i = 0; i < count; ++i) {
    if (Status status = check(c, steps[i])) return status;
    in->max_blocks = std::max(in->max_blocks, blocks_of(c, steps[i].start + steps[i].tokens));
  }
  for (int64_t i = 0; i < count; ++i) {
    const RowStep& step = steps[i];
    const int64_t end = step.start + step.tokens;
    const int32_t* tokens = c.tokens + step.row * c.token_stride;
    const int32_t* table = c.block_tables + step.row * c.block_table_stride;
    for (int64_t position = step.start; position < end; ++position) {
      // Compiled code checks this too, but a failure inside a multi-threaded loop aborts the process.
      if (tokens[position] < 0 || tokens[position] >= c.vocab_size) return kNoToken;
      in->ids.push_back(tokens[position]);
      in->positions.push_back(position);
    }
    if (c.adapter_slots != nullptr) {
      in->adapters.insert(in->adapters.end(), size_t(step.tokens), c.adapter_slots[step.row]);
    }
    for (int64_t group = 0; group < c.groups; ++group) {
      const int32_t* its = table + group * c.group_stride;
      for (int64_t position = step.start; position < end; ++position) {
        const int64_t block = its[position / c.block_size];
        // Negative (not written) if the row has no block there.
        in->slots[size_t(group)].push_back(block * c.block_size + position % c.block_size);
      }
    }
    in->all.add(step.tokens, end, step.verifies != 0, table, c.group_stride, in->max_blocks);
    in->all_rows.push_back(step.row);
    for (int64_t behind = step.samples; behind-- > 0;) {
      in->last.add(1, end - behind, false, table, c.group_stride, in->max_blocks);
      in->sampled.push_back(int64_t(in->ids.size()) - 1 - behind);
      gather_sampling(c, step, end - behind, in);
    }
  }
  in->ids.insert(in->ids.end(), size_t(padding), 0);
  in->positions.insert(in->positions.end(), size_t(padding), 0);
  in->adapters.insert(in->adapters.end(), size_t(padding), -1);
  for (auto& slots : in->slots) slots.insert(slots.end(), size_t(padding), -1);
  return kOk;
}

// Sets the model's own inputs; padding has zeros.
void gather_own(const StepContext& c, const int64_t* own, int64_t padding, Inputs* in) {
  const int64_t all = int64_t(in->ids.size()), given = all - padding;
  in->own.assign(size_t(c.own_inputs * all), 0);
  if (own == nullptr) return;
  for (int64_t i = 0; i < c.own_inputs; ++i) {
    std::copy_n(own + i * given, given, in->own.begin() + i * all);
  }
}

}  // namespace

int Step::run(Tensor** hidden) {
  if (!put(0, in.ids.data()) || !put(1, in.positions.data())) return kOutOfMemory;
  if (context.adapter_slots != nullptr && !put(2, in.adapters.data())) return kOutOfMemory;
  for (int64_t i = 0; i < context.own_inputs; ++i) {
    if (!put(context.first_own + i, in.own.data() + i * tokens_)) return kOutOfMemory;
  }
  for (int64_t i = 0; i < context.length; ++i) {
    const Instruction& step = context.program[i];
    narrows_ = i == context.last_mixer && !is_whole_;
    // The last call's result goes to Python, so torch allocates it and it need not be copied.
    ByTorch result_is(i == context.length - 1 && wants_all_);
    if (int status = step.run(&step, this)) return status;
    if (narrows_) {
      if (int status = narrow()) return status;
      if (tokens_ == 0) return kOk;
    }
  }
  *hidden = tensors_[context.hidden].give();
  return kOk;
}

bool Step::put(int64_t number, const int64_t* data) {
  const int64_t sizes[] = {tokens_}, strides[] = {1};
  *tensors_[number].receive() = slipstream_view(const_cast<int64_t*>(data), nullptr, 1, sizes, strides,
                                                int32_t(context.torch_index_dtype));
  return bool(tensors_[number]);
}

bool Step::put_mixed(const Instruction& step, int64_t width) {
  const int64_t tokens = narrows_ ? int64_t(in.sampled.size()) : tokens_;
  const int64_t sizes[] = {tokens, width}, strides[] = {width, 1};
  Owned& mixed = tensors_[step.writes[0]];
  *mixed.receive() =
      slipstream_view(in.mixed.data(), nullptr, 2, sizes, strides, int32_t(context.torch_dtype));
  return bool(mixed);
}

void Step::release_last(const Instruction& step) {
  for (int64_t i = 0; i < step.num_reads; ++i) {
    if (step.last_reads >> i & 1) tensors_[step.reads[i]].reset();
  }
}

int Step::call(const Instruction& step) {
  Owned given[kMaxTokenInputs];
  Tensor* results[kMaxResults] = {};
  for (int64_t i = 0; i < step.num_reads; ++i) {
    Owned& read = tensors_[step.reads[i]];
    if (step.last_reads >> i & 1) {
      *given[i].receive() = read.give();
    } else {
      ++read->references;
      *given[i].receive() = read.get();
    }
  }
  const auto* bound = static_cast<const Bound*>(step.record);
  if (int status = bound->call(tokens_, given, results)) return status;
  for (int64_t i = 0; i < step.num_writes; ++i) *tensors_[step.writes[i]].receive() = results[i];
  return kOk;
}

// Behind the last mixer, the step has only its sampled tokens.
int Step::narrow() {
  tokens_ = int64_t(in.sampled.size());
  if (tokens_ == 0) return kOk;
  for (int64_t i = 0; i < kMaxStepTensors; ++i) {
    if ((context.kept >> i & 1) && !keep(i)) return kOutOfMemory;
  }
  return kOk;
}

// Reduces a step tensor, whose rows are contiguous, to the rows of the sampled tokens.
bool Step::keep(int64_t number) {
  const Tensor& whole = *tensors_[number];
  int64_t sizes[kTensorDims], strides[kTensorDims];
  std::copy_n(whole.sizes, whole.dims, sizes);
  sizes[0] = tokens_;
  slipstream_contiguous_strides(whole.dims, sizes, strides);
  const size_t item = size_t(slipstream_item_size(whole.dtype));
  const char* rows = in.pick(whole.data, size_t(whole.strides[0]) * item, size_t(strides[0]) * item,
                             &in.kept[number]);
  Owned kept(slipstream_view(const_cast<char*>(rows), nullptr, whole.dims, sizes, strides,
                             whole.dtype));
  *tensors_[number].receive() = kept.give();
  return bool(tensors_[number]);
}

SLIPSTREAM_EXPORT int slipstream_step_call(const Instruction* instruction, Step* step) {
  return step->call(*instruction);
}

namespace {

// Logits [S, V] of the sampled tokens, from hidden states [T, H] or [S, H].
int logits_of(const StepContext& c, Inputs& in, const Tensor& hidden, Tensor** logits) {
  const int64_t samples = int64_t(in.sampled.size());
  const char* from = hidden.data;
  const size_t width = size_t(hidden.sizes[1]) * item_size(c);
  if (samples != hidden.sizes[0]) from = in.pick(from, width, width, &in.hidden);
  Owned given[1];
  *given[0].receive() = view(c.head->token_input(0), from, samples);
  if (!given[0]) return kOutOfMemory;
  return c.head->call(samples, given, logits);
}

int draw(const StepContext& c, const Inputs& in, const float* logits, int64_t vocab_size,
         int64_t stride, int64_t* token_ids) {
  GumbelArgs args{};
  args.logits = logits, args.vocab_size = vocab_size, args.logits_stride = stride;
  args.seeds = in.seeds.data(), args.positions = in.next.data();
  args.temperatures = in.temperatures.data(), args.tokens = token_ids;
  args.rows = int64_t(in.rows.size()), args.threads = c.threads;
  if (int status = slipstream_gumbel_argmax(&args)) return status;
  for (size_t i = 0; i < in.rows.size(); ++i) {
    // NO_TOKEN becomes a valid token id: a later step may already have been given this position.
    const int64_t token = std::max<int64_t>(token_ids[i], 0);
    c.tokens[in.rows[i] * c.token_stride + in.next[i]] = int32_t(token);
  }
  return kOk;
}

// Gives Python the tensors for which it passed a pointer: all of them, or none on failure.
int hand_over(const Owned& hidden, Handle* hidden_result, const Owned& logits,
              Handle* logits_result) {
  if (hidden_result != nullptr && hidden) {
    *hidden_result = slipstream_to_torch(*hidden);
    if (*hidden_result == nullptr) return kOutOfMemory;
  }
  if (logits_result != nullptr && logits) {
    *logits_result = slipstream_to_torch(*logits);
    if (*logits_result != nullptr) return kOk;
    if (hidden_result != nullptr && hidden) slipstream_torch.delete_tensor(*hidden_result);
    return kOutOfMemory;
  }
  return kOk;
}

// Marks a step as running for the pool during its lifetime.
class UnderWay {
 public:
  explicit UnderWay(int64_t threads) { slipstream_begin_step(threads); }
  ~UnderWay() { slipstream_end_step(); }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
};

int run(const StepContext& c, const RowStep* steps, int64_t count, int64_t padding,
        const int64_t* own, MaskGate* gate, int64_t* token_ids, Handle* hidden_result,
        Handle* logits_result) {
  thread_local Inputs in;
  const UnderWay under_way(c.threads);
  if (Status status = gather(c, steps, count, padding, &in)) return status;
  gather_own(c, own, padding, &in);
  Owned hidden, logits;
  // A step that draws gives the hidden states of its sampled tokens, another one those of all.
  const bool draws = token_ids != nullptr;
  Step running(c, in, hidden_result != nullptr && !draws);
  if (int status = running.run(hidden.receive())) return status;
  if (!in.sampled.empty() && (draws || logits_result != nullptr)) {
    ByTorch result_is(logits_result != nullptr);
    if (int status = logits_of(c, in, *hidden, logits.receive())) return status;
    if (draws) {
      auto* scores = reinterpret_cast<float*>(logits->data);
      const int64_t size = logits->sizes[1], stride = logits->strides[0];
      if (gate != nullptr) {
        const int64_t samples = int64_t(in.rows.size());
        if (int status = gate->apply(scores, samples, size, stride, c.threads)) return status;
      }
      if (int status = draw(c, in, scores, size, stride, token_ids)) return status;
    }
  }
  return hand_over(hidden, hidden_result, logits, logits_result);
}

}  // namespace

SLIPSTREAM_EXPORT int slipstream_step(const StepContext* context, const RowStep* steps,
                                      int64_t num_steps, int64_t padding, const int64_t* own,
                                      MaskGate* gate, int64_t* token_ids, Handle* hidden,
                                      Handle* logits) {
  try {
    return run(*context, steps, num_steps, padding, own, gate, token_ids, hidden, logits);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
