// A whole step in one call: the rows' tokens in, the sampled tokens back in the rows.
//
// Between the layers, and between forward pass and draw, runs no Python, and the interpreter lock
// is free for the event loop from one end to the other.
#include <algorithm>
#include <cstring>
#include <new>

#include "bound.h"
#include "mask_gate.h"
#include "parallel.h"

namespace {

// Tensors begin where torch's own do: nothing computes otherwise for where its input lies.
struct alignas(64) Line {
  char bytes[64];
};

size_t lines(size_t bytes) { return (bytes + sizeof(Line) - 1) / sizeof(Line); }

// Rows of attention, of so many tokens each.
struct Batch {
  std::vector<int32_t> starts, lengths, blocks;  // [B + 1], [B], [B, max_blocks]

  void clear() {
    for (auto* each : {&starts, &lengths, &blocks}) each->clear();
    starts.push_back(0);
  }

  void add(int64_t tokens, int64_t length, const int32_t* table, int64_t max_blocks) {
    starts.push_back(starts.back() + int32_t(tokens));
    lengths.push_back(int32_t(length));
    blocks.insert(blocks.end(), table, table + max_blocks);
  }

  void put_into(AttentionArgs* attention) const {
    attention->rows = int64_t(lengths.size()), attention->tokens = starts.back();
    attention->query_start_loc = starts.data(), attention->seq_lens = lengths.data();
    attention->block_tables = blocks.data();
  }
};

// What a step computes with, gathered from the rows. Kept from step to step for its memory.
struct Inputs {
  std::vector<int64_t> ids, positions, slots;  // [T]
  Batch all, last;                             // every token; the last one of each row that samples
  std::vector<int64_t> sampled, seeds, next;   // [S]: token index; of the token to be drawn
  std::vector<int64_t> rows;                   // [S]
  std::vector<float> temperatures;             // [S]
  std::vector<Line> attention;                 // [T, num_heads, head_dim]
  std::vector<Line> query, residual, hidden;   // [S, num_heads, head_dim], [S, H], [S, H]
  int64_t max_blocks = 0;

  void clear() {
    for (auto* each : {&ids, &positions, &slots, &sampled, &seeds, &next, &rows}) each->clear();
    all.clear(), last.clear();
    temperatures.clear();
    max_blocks = 0;
  }

  // `from` has a row of `width` bytes for each token, `stride` apart: those that are sampled from.
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
  in->clear();
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
      // Compiled code checks it too, but where threads share its loop that ends the process.
      if (tokens[position] < 0 || tokens[position] >= c.vocab_size) return kNoToken;
      in->ids.push_back(tokens[position]);
      in->positions.push_back(position);
      const int64_t block = table[position / c.block_size];
      // Negative, that is nowhere, for a row that has no block there.
      in->slots.push_back(block * c.block_size + position % c.block_size);
    }
    in->all.add(step.tokens, end, table, in->max_blocks);
    if (!step.samples) continue;
    in->last.add(1, end, table, in->max_blocks);
    in->sampled.push_back(int64_t(in->ids.size()) - 1);
    gather_sampling(c, step, in);
  }
  in->ids.insert(in->ids.end(), size_t(padding), 0);
  in->positions.insert(in->positions.end(), size_t(padding), 0);
  in->slots.insert(in->slots.end(), size_t(padding), -1);
  return kOk;
}

AttentionArgs attention_of(const StepContext& c, Inputs& in) {
  const size_t width = size_t(c.num_heads * c.head_dim) * item_size(c);
  const size_t needed = lines(in.ids.size() * width);
  if (in.attention.size() < needed) in.attention.resize(needed);
  AttentionArgs attention{};
  in.all.put_into(&attention);
  attention.tokens = int64_t(in.ids.size());
  attention.slot_mapping = in.slots.data(), attention.out = in.attention.data();
  attention.block_table_stride = attention.max_blocks = in.max_blocks;
  attention.num_heads = c.num_heads, attention.num_kv_heads = c.num_kv_heads;
  attention.head_dim = c.head_dim, attention.num_blocks = c.num_blocks;
  attention.block_size = c.block_size, attention.dtype = c.dtype, attention.threads = c.threads;
  attention.deterministic = c.deterministic, attention.scale = c.scale;
  return attention;
}

// The last layer from its attention on, for tokens that are sampled from: what it has for others
// nobody reads, but for their keys and values.
int finish_sampled(const StepContext& c, Inputs& in, AttentionArgs attention, const Tensor& residual,
                   Tensor** hidden) {
  attention.rows = 0;
  if (int status = slipstream_paged_attention(&attention)) return status;
  const int64_t samples = int64_t(in.sampled.size()), heads = c.num_heads * c.head_dim;
  if (samples == 0) return kOk;
  const size_t item = item_size(c);
  const auto* query = static_cast<const char*>(attention.query);
  attention.query = in.pick(query, size_t(attention.query_stride) * item, size_t(heads) * item,
                            &in.query);
  attention.query_stride = heads;
  in.last.put_into(&attention);
  // All are written.
  std::fill_n(in.slots.begin(), samples, -1);
  if (int status = slipstream_paged_attention(&attention)) return status;
  const Bound& last = *c.calls[c.layers];
  const char* around = in.pick(residual.data, size_t(residual.strides[0]) * item,
                               size_t(residual.sizes[1]) * item, &in.residual);
  Owned given[2];
  *given[0].receive() = view(last.token_input(0), attention.out, samples);
  *given[1].receive() = view(last.token_input(1), around, samples);
  if (!given[0] || !given[1]) return kOutOfMemory;
  return last.call(samples, given, hidden);
}

// Hidden states of every token, or, unless all are wanted, of those that are sampled from; none, if
// there are none of these.
int forward(const StepContext& c, Inputs& in, bool wants_all, Tensor** hidden) {
  const int64_t tokens = int64_t(in.ids.size());
  const bool is_whole = wants_all || int64_t(in.sampled.size()) == tokens;
  AttentionArgs attention = attention_of(c, in);
  Owned given[kMaxTokenInputs];
  Tensor* results[4] = {};
  const auto& positions = c.calls[0]->token_input(1);
  *given[0].receive() = view(c.calls[0]->token_input(0), in.ids.data(), tokens);
  *given[1].receive() = view(positions, in.positions.data(), tokens);
  if (!given[0] || !given[1]) return kOutOfMemory;
  if (int status = c.calls[0]->call(tokens, given, results)) return status;
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    slipstream_rouse(c.threads);
    Owned query(results[0]), key(results[1]), value(results[2]), residual(results[3]);
    attention.query = query->data;
    attention.key = key->data;
    attention.value = value->data;
    attention.query_stride = query->strides[0];
    attention.key_stride = key->strides[0];
    attention.value_stride = value->strides[0];
    attention.key_cache = c.key_caches[layer];
    attention.value_cache = c.value_caches[layer];
    attention.sliding_window = c.sliding_windows[layer];
    const bool is_last = layer == c.layers - 1;
    if (is_last && !is_whole) return finish_sampled(c, in, attention, *residual, hidden);
    if (int status = slipstream_paged_attention(&attention)) return status;
    const Bound& next = *c.calls[layer + 1];
    *given[0].receive() = view(next.token_input(0), attention.out, tokens);
    *given[1].receive() = residual.give();
    if (!is_last) *given[2].receive() = view(positions, in.positions.data(), tokens);
    if (!given[0] || (!is_last && !given[2])) return kOutOfMemory;
    // Python takes all of them.
    ByTorch result_is(is_last && wants_all);
    if (int status = next.call(tokens, given, is_last ? hidden : results)) return status;
  }
  return kOk;
}

// Logits [S, V] of the hidden states [T, H] or [S, H] that are sampled from.
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
    // A row that could draw none gets a harmless one: a step behind this one may name it still.
    const int64_t token = std::max<int64_t>(token_ids[i], 0);
    c.tokens[in.rows[i] * c.token_stride + in.next[i]] = int32_t(token);
  }
  return kOk;
}

// To Python, which wants those that it has a place for, and gets all or none.
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

// A step, as long as this is there.
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
  if (int status = forward(c, in, hidden_result != nullptr, hidden.receive())) return status;
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
