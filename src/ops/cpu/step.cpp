// A whole step in one call: from the rows' input tokens to the sampled tokens, which are written back to
// the rows.
//
// No Python runs between the layers, nor between forward pass and sampling. The GIL is released for the
// whole call, so the event loop can run.
#include <algorithm>
#include <cstring>
#include <new>

#include "bound.h"
#include "mask_gate.h"
#include "parallel.h"

namespace {

// Aligned like torch's own tensors: results must not depend on the alignment of an input.
struct alignas(64) Line {
  char bytes[64];
};

size_t lines(size_t bytes) { return (bytes + sizeof(Line) - 1) / sizeof(Line); }

// The attention batch: rows with several tokens each.
struct Batch {
  std::vector<int32_t> starts, lengths;      // [B + 1], [B]
  std::vector<std::vector<int32_t>> blocks;  // per group of layers, [B, max_blocks]

  void clear(int64_t groups) {
    for (auto* each : {&starts, &lengths}) each->clear();
    starts.push_back(0);
    blocks.resize(size_t(groups));
    for (auto& each : blocks) each.clear();
  }

  // `table` is the row's block table in the first group; tables of groups lie `group_stride` apart.
  void add(int64_t tokens, int64_t length, const int32_t* table, int64_t group_stride,
           int64_t max_blocks) {
    starts.push_back(starts.back() + int32_t(tokens));
    lengths.push_back(int32_t(length));
    for (auto& each : blocks) {
      each.insert(each.end(), table, table + max_blocks);
      table += group_stride;
    }
  }

  void put_into(AttentionArgs* attention, int64_t group) const {
    attention->rows = int64_t(lengths.size()), attention->tokens = starts.back();
    attention->query_start_loc = starts.data(), attention->seq_lens = lengths.data();
    attention->block_tables = blocks[size_t(group)].data();
  }
};

// What a step computes with, gathered from the rows. Reused between steps to avoid allocations.
struct Inputs {
  std::vector<int64_t> ids, positions, adapters;  // [T]
  std::vector<std::vector<int64_t>> slots;     // per group of layers, [T]
  Batch all, last;                             // all tokens; only the last token of each sampling row
  std::vector<int64_t> sampled, seeds, next;   // [S]: token index; seed; position of the drawn token
  std::vector<int64_t> rows;                   // [S]: row of the step context
  std::vector<float> temperatures;             // [S]
  std::vector<Line> attention;                 // [T, num_heads, head_dim]
  std::vector<Line> query, hidden;             // [S, num_heads, head_dim], [S, H]
  std::vector<Line> kept[kMaxStepTensors];     // per step tensor, [S, ...]
  int64_t max_blocks = 0;

  void clear(int64_t groups) {
    for (auto* each : {&ids, &positions, &adapters, &sampled, &seeds, &next, &rows}) each->clear();
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

size_t item_size(const StepContext& c) { return c.dtype == kFloat32 ? 4 : 2; }

int64_t blocks_of(const StepContext& c, int64_t length) {
  return (length + c.block_size - 1) / c.block_size;
}

Status check(const StepContext& c, const RowStep& step) {
  const int64_t end = step.start + step.tokens;
  const bool is_there = step.row >= 0 && step.row < c.rows && step.start >= 0 && step.tokens > 0 &&
                        end + (step.samples != 0) <= c.token_stride &&
                        blocks_of(c, end) <= c.block_table_stride;
  return is_there ? kOk : kBadRow;
}

void gather_sampling(const StepContext& c, const RowStep& step, Inputs* in) {
  in->rows.push_back(step.row);
  in->next.push_back(step.start + step.tokens);
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
    in->all.add(step.tokens, end, table, c.group_stride, in->max_blocks);
    if (!step.samples) continue;
    in->last.add(1, end, table, c.group_stride, in->max_blocks);
    in->sampled.push_back(int64_t(in->ids.size()) - 1);
    gather_sampling(c, step, in);
  }
  in->ids.insert(in->ids.end(), size_t(padding), 0);
  in->positions.insert(in->positions.end(), size_t(padding), 0);
  in->adapters.insert(in->adapters.end(), size_t(padding), -1);
  for (auto& slots : in->slots) slots.insert(slots.end(), size_t(padding), -1);
  return kOk;
}

AttentionArgs attention_of(const StepContext& c, Inputs& in) {
  const size_t needed = lines(in.ids.size() * size_t(c.attended_width) * item_size(c));
  if (in.attention.size() < needed) in.attention.resize(needed);
  AttentionArgs attention{};
  attention.out = in.attention.data();
  attention.block_table_stride = attention.max_blocks = in.max_blocks;
  attention.dtype = c.dtype, attention.threads = c.threads;
  attention.deterministic = c.deterministic;
  return attention;
}

// `value` is null for latent attention, whose latents are the keys.
void tell(const AttentionLayer& layer, const Inputs& in, const Tensor& query, const Tensor& key,
          const Tensor* value, AttentionArgs* attention) {
  in.all.put_into(attention, layer.group);
  attention->tokens = int64_t(in.ids.size());
  attention->slot_mapping = in.slots[size_t(layer.group)].data();
  attention->query = query.data, attention->query_stride = query.strides[0];
  attention->key = key.data, attention->key_stride = key.strides[0];
  if (value != nullptr) attention->value = value->data, attention->value_stride = value->strides[0];
  attention->key_cache = layer.key_cache, attention->value_cache = layer.value_cache;
  attention->num_heads = layer.num_heads, attention->num_kv_heads = layer.num_kv_heads;
  attention->head_dim = layer.head_dim, attention->num_blocks = layer.num_blocks;
  attention->block_size = layer.block_size, attention->spec = layer.spec;
  attention->cache_kind = layer.cache_kind;
}

// Elements per token of a layer's output.
int64_t width_of(const AttentionLayer& layer) {
  return layer.num_heads * (layer.up == nullptr ? layer.head_dim : layer.value);
}

int compute(const AttentionLayer& layer, const AttentionArgs& a) {
  if (layer.up == nullptr) return slipstream_paged_attention(&a);
  LatentArgs latent{};
  latent.query = a.query, latent.query_stride = a.query_stride;
  latent.latent = a.key, latent.latent_stride = a.key_stride;
  latent.cache = a.key_cache, latent.up = layer.up, latent.out = a.out, latent.spec = a.spec;
  latent.block_tables = a.block_tables, latent.block_table_stride = a.block_table_stride;
  latent.query_start_loc = a.query_start_loc, latent.seq_lens = a.seq_lens;
  latent.slot_mapping = a.slot_mapping, latent.tokens = a.tokens, latent.rows = a.rows;
  latent.heads = layer.num_heads, latent.nope = layer.nope, latent.rope = layer.head_dim - layer.nope;
  latent.rank = layer.rank, latent.value = layer.value;
  latent.num_blocks = a.num_blocks, latent.block_size = a.block_size, latent.max_blocks = a.max_blocks;
  latent.dtype = a.dtype, latent.threads = a.threads, latent.deterministic = a.deterministic;
  return slipstream_latent_attention(&latent);
}

// Runs a program and holds its tensors during a step.
class Interpreter {
 public:
  Interpreter(const StepContext& c, Inputs& in, bool wants_all)
      : c_(c),
        in_(in),
        attention_(attention_of(c, in)),
        tokens_(int64_t(in.ids.size())),
        wants_all_(wants_all),
        is_whole_(wants_all || int64_t(in.sampled.size()) == tokens_) {}

  // Sets `hidden` to the hidden states of every token if all are wanted, else of the sampled tokens.
  // Leaves it null if no token is sampled.
  int run(Tensor** hidden) {
    if (!put(0, in_.ids.data()) || !put(1, in_.positions.data())) return kOutOfMemory;
    if (c_.adapter_slots != nullptr && !put(2, in_.adapters.data())) return kOutOfMemory;
    for (int64_t i = 0; i < c_.length; ++i) {
      const Instruction& step = c_.program[i];
      if (step.call == nullptr) {
        slipstream_rouse(c_.threads);
        const bool is_last = i == c_.last_attention;
        if (int status = is_last && !is_whole_ ? attend_sampled(step) : attend(step)) return status;
        if (tokens_ == 0) return kOk;
        continue;
      }
      // The last call's result goes to Python, so torch allocates it and it need not be copied.
      ByTorch result_is(i == c_.length - 1 && wants_all_);
      if (int status = call(step)) return status;
    }
    *hidden = tensors_[c_.hidden].give();
    return kOk;
  }

 private:
  bool put(int64_t number, const int64_t* data) {
    const int64_t sizes[] = {tokens_}, strides[] = {1};
    *tensors_[number].receive() = slipstream_view(const_cast<int64_t*>(data), nullptr, 1, sizes,
                                                  strides, int32_t(c_.torch_index_dtype));
    return bool(tensors_[number]);
  }

  bool put_attended(const Instruction& step) {
    const int64_t width = width_of(*step.attention);
    const int64_t sizes[] = {tokens_, width}, strides[] = {width, 1};
    Owned& attended = tensors_[step.writes[0]];
    *attended.receive() = slipstream_view(attention_.out, nullptr, 2, sizes, strides,
                                          int32_t(c_.torch_dtype));
    return bool(attended);
  }

  void release_last(const Instruction& step) {
    for (int64_t i = 0; i < step.num_reads; ++i) {
      if (step.last_reads >> i & 1) tensors_[step.reads[i]].reset();
    }
  }

  int call(const Instruction& step) {
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
    if (int status = step.call->call(tokens_, given, results)) return status;
    for (int64_t i = 0; i < step.num_writes; ++i) *tensors_[step.writes[i]].receive() = results[i];
    return kOk;
  }

  const Tensor* value_of(const Instruction& step) {
    return step.num_reads > 2 ? tensors_[step.reads[2]].get() : nullptr;
  }

  int attend(const Instruction& step) {
    const AttentionLayer& layer = *step.attention;
    tell(layer, in_, *tensors_[step.reads[0]], *tensors_[step.reads[1]], value_of(step), &attention_);
    const int status = compute(layer, attention_);
    release_last(step);
    if (status) return status;
    return put_attended(step) ? kOk : kOutOfMemory;
  }

  // The last attention, if only sampled tokens are needed. It writes all keys and values, but attends for
  // sampled tokens only. From here on the step has only those tokens.
  int attend_sampled(const Instruction& step) {
    const Tensor& query = *tensors_[step.reads[0]];
    const AttentionLayer& layer = *step.attention;
    tell(layer, in_, query, *tensors_[step.reads[1]], value_of(step), &attention_);
    attention_.rows = 0;
    if (int status = compute(layer, attention_)) return status;
    const int64_t samples = int64_t(in_.sampled.size()), width = layer.num_heads * layer.head_dim;
    tokens_ = samples;
    if (samples == 0) return kOk;
    const size_t item = item_size(c_);
    attention_.query =
        in_.pick(query.data, size_t(query.strides[0]) * item, size_t(width) * item, &in_.query);
    attention_.query_stride = width;
    in_.last.put_into(&attention_, layer.group);
    // The first call has written all keys and values.
    std::fill_n(in_.slots[size_t(layer.group)].begin(), samples, -1);
    const int status = compute(layer, attention_);
    release_last(step);
    if (status) return status;
    for (int64_t i = 0; i < kMaxStepTensors; ++i) {
      if ((c_.kept >> i & 1) && !keep(i)) return kOutOfMemory;
    }
    return put_attended(step) ? kOk : kOutOfMemory;
  }

  // Reduces a step tensor, whose rows are contiguous, to the rows of the sampled tokens.
  bool keep(int64_t number) {
    const Tensor& whole = *tensors_[number];
    int64_t sizes[kTensorDims], strides[kTensorDims];
    std::copy_n(whole.sizes, whole.dims, sizes);
    sizes[0] = tokens_;
    slipstream_contiguous_strides(whole.dims, sizes, strides);
    const size_t item = size_t(slipstream_item_size(whole.dtype));
    const char* rows = in_.pick(whole.data, size_t(whole.strides[0]) * item,
                                size_t(strides[0]) * item, &in_.kept[number]);
    Owned kept(slipstream_view(const_cast<char*>(rows), nullptr, whole.dims, sizes, strides,
                               whole.dtype));
    *tensors_[number].receive() = kept.give();
    return bool(tensors_[number]);
  }

  const StepContext& c_;
  Inputs& in_;
  AttentionArgs attention_;
  int64_t tokens_;
  const bool wants_all_, is_whole_;
  Owned tensors_[kMaxStepTensors];
};

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
  if (hidden_result != nullptr) {
    *hidden_result = slipstream_to_torch(*hidden);
    if (*hidden_result == nullptr) return kOutOfMemory;
  }
  if (logits_result != nullptr && logits) {
    *logits_result = slipstream_to_torch(*logits);
    if (*logits_result != nullptr) return kOk;
    if (hidden_result != nullptr) slipstream_torch.delete_tensor(*hidden_result);
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

int run(const StepContext& c, const RowStep* steps, int64_t count, int64_t padding, MaskGate* gate,
        int64_t* token_ids, Handle* hidden_result, Handle* logits_result) {
  thread_local Inputs in;
  const UnderWay step(c.threads);
  if (Status status = gather(c, steps, count, padding, &in)) return status;
  Owned hidden, logits;
  Interpreter interpreter(c, in, hidden_result != nullptr);
  if (int status = interpreter.run(hidden.receive())) return status;
  if (!in.sampled.empty() && (token_ids != nullptr || logits_result != nullptr)) {
    ByTorch result_is(logits_result != nullptr);
    if (int status = logits_of(c, in, *hidden, logits.receive())) return status;
    if (token_ids != nullptr) {
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
                                      int64_t num_steps, int64_t padding, MaskGate* gate,
                                      int64_t* token_ids, Handle* hidden, Handle* logits) {
  try {
    return run(*context, steps, num_steps, padding, gate, token_ids, hidden, logits);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
