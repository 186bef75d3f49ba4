// Compares another build of these kernels with this one (the portable level) on synthetic inputs. Python
// runs it in a separate process, once per level, so that an illegal instruction or a miscompilation only
// costs that level.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "runtime/abi.h"
#include "build/cpu_features.h"
#include "build/drawn.h"
#include "runtime/vector.h"

namespace {

constexpr int kDiffers = 3;
constexpr int kNoCheck = 4;

template <class T>
bool same_attention(AttentionFunction* other, DType dtype, int64_t head_dim, int64_t window,
                    int64_t chunk, int64_t ahead, bool modified, int64_t deterministic, int64_t kv_heads,
                    CacheKind cache_kind, int64_t value_dim = 0) {
  constexpr int64_t kHeads = 6, kBlock = 16, kRows = 6, kMaxBlocks = 45;
  // A prefill, a decode, two tokens, a prompt longer than a step and an item, a decode after few keys,
  // and a decode that shares the keys of the second row.
  const int32_t starts[kRows + 1] = {0, 100, 101, 103, 393, 394, 395};
  const int32_t lengths[kRows] = {150, 700, 30, 290, 3, 650};
  // As many as the rows have; 7 does not divide them.
  const int64_t tokens = 396, blocks = 117;
  Random random;
  const auto query = draw<T>(random, size_t(tokens * kHeads * head_dim));
  const auto key = draw<T>(random, size_t(tokens * kv_heads * head_dim));
  const auto value = draw<T>(random, size_t(tokens * kv_heads * head_dim));
  const size_t cached_rows = size_t(blocks * kBlock * kv_heads);
  auto keys = draw_rows<T>(random, cached_rows, size_t(head_dim), cache_kind);
  auto values = draw_rows<T>(random, cached_rows, size_t(head_dim), cache_kind);
  auto other_keys = keys, other_values = values;
  std::vector<T> out(query.size()), other_out(query.size());
  std::vector<int32_t> tables(kRows * kMaxBlocks);
  for (int64_t row = 0, used = 0; row < kRows; ++row) {
    for (int64_t i = 0; i * kBlock < lengths[row]; ++i, ++used) {
      tables[size_t(row * kMaxBlocks + i)] = int32_t(used * 7 % blocks);
    }
  }
  std::copy_n(tables.begin() + kMaxBlocks, 32, tables.begin() + 5 * kMaxBlocks);
  std::vector<int64_t> slots(size_t(tokens), -1);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int32_t token = starts[row]; token < starts[row + 1]; ++token) {
      const int64_t position = lengths[row] - (starts[row + 1] - token);
      slots[size_t(token)] =
          tables[size_t(row * kMaxBlocks + position / kBlock)] * kBlock + position % kBlock;
    }
  }
  // Sinks as large as the largest scores, and a cap that most scores feel.
  const auto sinks = draw<float>(random, kHeads);
  AttentionSpec spec{};
  spec.scale = 1.0f / std::sqrt(float(head_dim)), spec.cap = modified ? 1.0f : 0.0f;
  spec.window = window, spec.chunk = chunk, spec.ahead = ahead;
  spec.sinks = modified ? sinks.data() : nullptr;
  AttentionArgs args{};
  args.query = query.data(), args.key = key.data(), args.value = value.data();
  args.key_cache = keys.data(), args.value_cache = values.data();
  args.block_tables = tables.data(), args.query_start_loc = starts, args.seq_lens = lengths;
  args.slot_mapping = slots.data(), args.out = out.data(), args.spec = &spec;
  args.query_stride = kHeads * head_dim, args.key_stride = kv_heads * head_dim;
  args.value_stride = kv_heads * head_dim, args.block_table_stride = kMaxBlocks;
  args.tokens = tokens, args.rows = kRows, args.num_heads = kHeads, args.num_kv_heads = kv_heads;
  args.head_dim = head_dim, args.num_blocks = blocks, args.block_size = kBlock;
  args.max_blocks = kMaxBlocks, args.dtype = dtype, args.threads = 2;
  args.deterministic = deterministic, args.cache_kind = cache_kind, args.value_dim = value_dim;
  if (value_dim > 0) args.value = args.key, args.value_cache = args.key_cache;
  if (slipstream_paged_attention(&args) != kOk) return false;
  args.key_cache = other_keys.data();
  args.value_cache = value_dim > 0 ? other_keys.data() : other_values.data();
  args.out = other_out.data();
  if (other(&args) != kOk) return false;
  if (keys != other_keys || values != other_values) return false;
  const float tolerance = dtype == kFloat32 ? 1e-5f : dtype == kFloat16 ? 2e-3f : 2e-2f;
  for (size_t i = 0; i < out.size(); ++i) {
    if (value_dim > 0 && int64_t(i) % head_dim >= value_dim) continue;
    const float a = as_float(&out[i]), b = as_float(&other_out[i]);
    if (!(std::fabs(a - b) <= tolerance * (1.0f + std::fabs(a)))) return false;
  }
  return true;
}

bool same_gumbel(GumbelFunction* other) {
  constexpr int64_t kRows = 8, kVocab = 1003;
  Random random;
  const auto logits = draw<float>(random, kRows * kVocab);
  std::vector<int64_t> seeds, positions, tokens(kRows), other_tokens(kRows);
  std::vector<float> temperatures;
  for (int64_t row = 0; row < kRows; ++row) {
    seeds.push_back(int64_t(0x9E3779B97F4A7C15ull * uint64_t(row + 1)));
    positions.push_back(row << 30);
    temperatures.push_back(float(row) * 0.25f);
  }
  GumbelArgs args{};
  args.logits = logits.data(), args.seeds = seeds.data(), args.positions = positions.data();
  args.temperatures = temperatures.data(), args.tokens = tokens.data(), args.rows = kRows;
  args.vocab_size = kVocab, args.logits_stride = kVocab, args.threads = 2;
  if (slipstream_gumbel_argmax(&args) != kOk) return false;
  args.tokens = other_tokens.data();
  return other(&args) == kOk && tokens == other_tokens;
}

// Whether two results of bfloat16 tokens that rounding to 8 bits does not change differ by no more than
// weights that one of them has rounded to bfloat16 allow. That moves a weight by 2^-8 of itself at most, so a
// sum by 2^-8 of the sum of all products' magnitudes. Either result is rounded once, by 2^-8 of itself.
template <class T>
bool differ_by_rounded_weights(const LinearArgs& args, const std::vector<T>& out,
                               const std::vector<T>& other_out) {
  // The weights, as results of tokens that have one input each, rounded to T.
  std::vector<T> ones(size_t(args.inputs * args.inputs)), weights(size_t(args.inputs * args.outputs));
  for (int64_t k = 0; k < args.inputs; ++k) from_float(1.0f, &ones[size_t(k * (args.inputs + 1))]);
  LinearArgs of_ones = args;
  of_ones.x = ones.data(), of_ones.out = weights.data(), of_ones.bias = nullptr;
  of_ones.tokens = of_ones.x_stride = args.inputs;
  if (slipstream_linear(&of_ones) != kOk) return false;
  std::vector<float> magnitudes(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) magnitudes[i] = std::fabs(as_float(&weights[i]));
  std::vector<float> products(size_t(args.outputs));
  for (int64_t token = 0; token < args.tokens; ++token) {
    std::fill(products.begin(), products.end(), 0.0f);
    for (int64_t k = 0; k < args.inputs; ++k) {
      const float x = std::fabs(as_float(static_cast<const T*>(args.x) + token * args.x_stride + k));
      for (int64_t n = 0; n < args.outputs; ++n) {
        products[size_t(n)] += x * magnitudes[size_t(k * args.outputs + n)];
      }
    }
    for (int64_t n = 0; n < args.outputs; ++n) {
      const size_t i = size_t(token * args.outputs + n);
      const float a = as_float(&out[i]), b = as_float(&other_out[i]);
      // The magnitudes are rounded too, by 2^-8, and sums in float32 by less: a sixteenth is for both.
      const float bound = 0x1p-8f * (products[size_t(n)] * 1.0625f + std::fabs(a) + std::fabs(b));
      if (!(std::fabs(a - b) <= bound)) return false;
    }
  }
  return true;
}

// Results at the beginning of a cache line, as a tensor's are: long ones are written past the caches there.
template <class T>
class AlignedResults {
 public:
  explicit AlignedResults(int64_t count) : held_(size_t(count) + kLine), count_(count) {}
  T* data() {
    const auto address = reinterpret_cast<uintptr_t>(held_.data());
    return held_.data() + (64 - address % 64) % 64 / sizeof(T);
  }
  std::vector<T> values() { return std::vector<T>(data(), data() + count_); }

 private:
  static constexpr size_t kLine = 64 / sizeof(T);
  std::vector<T> held_;
  const int64_t count_;
};

template <class T>
bool same_linear(LinearFunction* other, DType dtype, int64_t kind, int64_t tokens,
                 int64_t outputs, int64_t inputs = 192, int64_t group = 64,
                 bool has_offsets = false, int64_t group_dtype = kFloat32, bool has_steps = false) {
  Random random;
  auto x = draw<T>(random, size_t(tokens * inputs));
  // Multiples of a step, so that rounding to 8 bits changes none: a level may round them, or not.
  for (size_t i = 0; has_steps && i < x.size(); ++i) {
    from_float(float(i % 16 == 0 ? 127 : int64_t(i * 2654435761u >> 7) % 255 - 127) / 64, &x[i]);
  }
  // For quantized kinds, any bits will do; the size includes a padded last strip.
  const auto weight = draw<T>(random, size_t((outputs + 63) * inputs));
  // As many as groups have, or rows.
  auto scales = draw<float>(random, size_t(outputs * (group == 0 ? 1 : inputs / group)));
  for (float& scale : scales) scale *= 0.01f;
  const auto offsets = draw<float>(random, has_offsets ? scales.size() : 0);
  std::vector<bf16> narrow_scales(scales.size()), narrow_offsets(offsets.size());
  for (size_t i = 0; i < scales.size(); ++i) from_float(scales[i], &narrow_scales[i]);
  for (size_t i = 0; i < offsets.size(); ++i) from_float(offsets[i], &narrow_offsets[i]);
  const bool is_narrow = group_dtype == kBFloat16;
  const auto powers = draw_powers(random, scales.size());
  const void* const its_scales = group_dtype == kPowers ? (const void*)powers.data()
                                 : is_narrow            ? (const void*)narrow_scales.data()
                                                        : scales.data();
  const void* const its_offsets = is_narrow ? (const void*)narrow_offsets.data() : offsets.data();
  AlignedResults<T> results(tokens * outputs), other_results(tokens * outputs);
  LinearArgs args{};
  args.x = x.data(), args.weight = weight.data(), args.scales = its_scales;
  args.bias = weight.data(), args.out = results.data();
  args.offsets = has_offsets ? its_offsets : nullptr, args.tokens = tokens, args.inputs = inputs;
  args.outputs = outputs, args.x_stride = inputs, args.dtype = dtype, args.kind = kind;
  args.group = group, args.threads = 2, args.group_dtype = group_dtype;
  if (slipstream_linear(&args) != kOk) return false;
  args.out = other_results.data();
  if (other(&args) != kOk) return false;
  const std::vector<T> out = results.values(), other_out = other_results.values();
  if (has_steps) return differ_by_rounded_weights(args, out, other_out);
  // Where sums cancel, their order shows in the last bits of the largest summand.
  const float tolerance = dtype == kFloat32 ? 1e-5f : 1e-2f;
  for (size_t i = 0; i < out.size(); ++i) {
    const float a = as_float(&out[i]), b = as_float(&other_out[i]);
    if (!(std::fabs(a - b) <= tolerance * (32.0f + std::fabs(a)))) return false;
  }
  return true;
}

// Runs every combination of parameters that select another path.
template <class T>
bool same_attentions(AttentionFunction* other, DType dtype) {
  // Keys that are values too.
  for (const int64_t fixed : {0, 1}) {
    if (!same_attention<T>(other, dtype, 96, 0, 0, 0, false, fixed, 1, kAsQueries, 64)) return false;
  }
  for (const int64_t head_dim : {64, 72, 128, 256}) {
    // All keys, a window, chunks.
    for (const int64_t reach : {0, 65, -96}) {
      for (const int64_t fixed : {0, 1}) {
        for (const int64_t kv_heads : {2, 6}) {
          for (const bool modified : {false, true}) {
            const int64_t window = std::max<int64_t>(reach, 0), chunk = std::max<int64_t>(-reach, 0);
            for (const CacheKind kind : {kAsQueries, kInt8Codes, kFloat8Codes}) {
              // The check must stay short.
              if (kind != kAsQueries && (head_dim != 64 || kv_heads == 6 || !modified)) continue;
              // The window has two sides in half of the checks.
              const int64_t ahead = reach >= 0 && modified ? 40 : 0;
              if (!same_attention<T>(other, dtype, head_dim, window, chunk, ahead, modified, fixed,
                                     kv_heads, kind)) {
                return false;
              }
            }
          }
        }
      }
    }
  }
  return true;
}

// Levels in groups, with and without offsets, of so many bits.
template <class T>
bool same_groups(LinearFunction* other, DType dtype, int64_t tokens, int64_t inputs,
                 bool has_steps = false) {
  for (const int64_t group : {16, 32, 64, 128}) {
    for (const bool has_offsets : {false, true}) {
      for (const int64_t kind : {kInt8, kFloat8, kInt8Strips, kInt4, kInt4Strips}) {
        if (group < 32 && (kind == kInt4 || kind == kInt4Strips)) continue;
        const int64_t outputs = kind == kInt8Strips || kind == kInt4Strips ? 64 : 29;
        const DType narrow = group == 32 && has_offsets ? kBFloat16 : kFloat32;
        if (!same_linear<T>(other, dtype, kind, tokens, outputs, inputs, group, has_offsets, narrow,
                            has_steps)) {
          return false;
        }
      }
    }
    if (group >= 32 &&
        !same_linear<T>(other, dtype, kE2M1, tokens, 29, inputs, group, false, kPowers)) {
      return false;
    }
  }
  return true;
}

template <class T>
bool same_linears(LinearFunction* other, DType dtype) {
  // Every number of tokens that a tile may have, and more than fit into a core's cache.
  for (const int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 30, 300}) {
    if (!same_linear<T>(other, dtype, dtype, tokens, 37, 201)) return false;
    for (const int64_t kind :
         {int64_t(dtype), int64_t(kInt8), int64_t(kFloat8), int64_t(kInt4)}) {
      // Numbers of outputs that leave several kinds of partial tiles.
      for (const int64_t outputs : {37, 48, 57}) {
        const int64_t group = kind == kInt8 || kind == kFloat8 ? 0 : 64;
        if (!same_linear<T>(other, dtype, kind, tokens, outputs, 192, group)) return false;
      }
    }
    // Every kind of tile once; what is beyond them is the same as without groups.
    // Many bfloat16 tokens have a way of their own.
    const bool has_steps = dtype == kBFloat16 && tokens == 300;
    if (tokens < 8 || tokens == 30 || has_steps) {
      if (!same_groups<T>(other, dtype, tokens, 256, has_steps)) return false;
    }
    // A partial strip.
    if (!same_linear<T>(other, dtype, kInt8Strips, tokens, 150, 256, 0)) return false;
    if (dtype == kBFloat16 && !(same_linear<T>(other, dtype, kBFloat16Strips, tokens, 192, 202) &&
                                same_linear<T>(other, dtype, kBFloat16Strips, tokens, 64, 224))) {
      return false;
    }
  }
  // Tokens and results that no cache holds (pair_tiles.h): 1 MiB and 2 MiB of bfloat16.
  if (dtype == kBFloat16 &&
      !(same_linear<T>(other, dtype, kBFloat16Strips, 8200, 128, 64) &&
        same_linear<T>(other, dtype, kInt4Strips, 8200, 128, 64, 32, false, kFloat32, true))) {
    return false;
  }
  // Strips of several chunks (strip_panels.h).
  for (const int64_t tokens : {1, 2, 5, 13}) {
    if (!same_groups<T>(other, dtype, tokens, 1152)) return false;
    if (!same_linear<T>(other, dtype, kInt8Strips, tokens, 70, 1152, 0)) return false;
    if (dtype == kBFloat16 && !same_linear<T>(other, dtype, kBFloat16Strips, tokens, 64, 602)) {
      return false;
    }
  }
  return true;
}

template <class T>
bool same_expert_layers(ExpertsFunction* other, DType dtype, int64_t kind, int64_t tokens,
                        int64_t activation, bool biased) {
  constexpr int64_t kExperts = 5, kChosen = 2, kHidden = 192;
  // In strips, `intermediate` must be a multiple of a strip; rows may have any length.
  const int64_t intermediate = kind > kInt8 || kind == kInt4Strips ? 128 : 96;
  Random random;
  const auto x = draw<T>(random, size_t(tokens * kHidden));
  const auto gate_up = draw<T>(random, size_t(kExperts * 2 * intermediate * kHidden));
  const auto down = draw<T>(random, size_t(kExperts * intermediate * kHidden));
  // For quantized kinds, any bits will do.
  const auto scales = [&](size_t count) {
    auto drawn = draw<float>(random, count);
    for (float& scale : drawn) scale *= 1e-3f;
    return drawn;
  };
  const auto gate_up_scales = scales(gate_up.size()), down_scales = scales(down.size());
  const auto powers = draw_powers(random, gate_up.size());
  const bool has_offsets = kind == kInt4 || kind == kInt4Strips;
  const auto weights = draw<float>(random, size_t(tokens * kChosen));
  const auto biases = draw<T>(random, size_t(kExperts * 2 * std::max(intermediate, kHidden)));
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < tokens * kChosen; ++i) ids.push_back(i * i % 7 - 1);  // -1 to 5, some unused
  std::vector<T> out(x.size()), other_out(x.size());
  const int64_t group = kind == kInt8 || kind == kInt8Strips ? 0 : 32;
  const void* const of_rows[] = {
      kind == kE2M1 ? (const void*)powers.data() : gate_up_scales.data(),
      kind == kE2M1 ? (const void*)powers.data() : down_scales.data()};
  const int64_t group_dtype = kind == kE2M1 ? kPowers : int64_t(kFloat32);
  ExpertsArgs args{};
  args.x = x.data(), args.gate_up = gate_up.data(), args.down = down.data();
  args.gate_up_scales = of_rows[0], args.down_scales = of_rows[1], args.weights = weights.data();
  args.ids = ids.data(), args.out = out.data(), args.tokens = tokens, args.hidden = kHidden;
  args.intermediate = intermediate, args.experts = kExperts, args.chosen = kChosen;
  args.x_stride = kHidden, args.dtype = dtype, args.gate_up_kind = kind;
  args.gate_up_group = group, args.down_kind = kind, args.down_group = group;
  args.activation = activation, args.threads = 2;
  args.gate_up_bias = biased ? biases.data() : nullptr;
  args.down_bias = biased ? biases.data() : nullptr, args.alpha = 1.702, args.limit = 1.0;
  args.weighs_inputs = biased;
  args.gate_up_offsets = has_offsets ? gate_up_scales.data() : nullptr;
  args.down_offsets = has_offsets ? down_scales.data() : nullptr;
  args.gate_up_group_dtype = group_dtype, args.down_group_dtype = group_dtype;
  if (slipstream_experts(&args) != kOk) return false;
  args.out = other_out.data();
  if (other(&args) != kOk) return false;
  // A last bit of the intermediate result is one of many summands of the second product.
  float largest = 0;
  for (const T& value : out) largest = std::max(largest, std::fabs(as_float(&value)));
  const float tolerance = (dtype == kFloat32 ? 1e-4f : 2e-2f) * (1.0f + largest);
  for (size_t i = 0; i < out.size(); ++i) {
    if (!(std::fabs(as_float(&out[i]) - as_float(&other_out[i])) <= tolerance)) return false;
  }
  return true;
}

// Two parts, of which the second has no whole vector; a slot without a second part.
template <class T>
bool same_lora(LoraFunction* other, DType dtype) {
  constexpr int64_t kTokens = 23, kInputs = 83, kSlots = 3, kRoom = 5, kOutputs = 91;
  Random random;
  const auto base = draw<T>(random, size_t(kTokens * kOutputs));
  const auto x = draw<T>(random, size_t(kTokens * kInputs));
  const auto down = draw<T>(random, size_t(kSlots * 2 * kRoom * kInputs));
  const auto up = draw<T>(random, size_t(kSlots * kRoom * kOutputs));
  const int32_t ranks[] = {5, 3, 4, 0, 1, 2}, starts[] = {0, 80, kOutputs};
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < kTokens; ++i) chosen.push_back(i * i % 5 - 2);  // -2 to 2
  std::vector<T> out(base.size()), other_out(base.size());
  LoraArgs args{};
  args.base = base.data(), args.x = x.data(), args.down = down.data(), args.up = up.data();
  args.ranks = ranks, args.starts = starts, args.chosen = chosen.data(), args.out = out.data();
  args.tokens = kTokens, args.inputs = kInputs, args.outputs = kOutputs, args.x_stride = kInputs;
  args.slots = kSlots, args.parts = 2, args.room = kRoom, args.dtype = dtype, args.threads = 2;
  if (slipstream_lora(&args) != kOk) return false;
  args.out = other_out.data();
  if (other(&args) != kOk) return false;
  float largest = 0;
  for (const T& value : out) largest = std::max(largest, std::fabs(as_float(&value)));
  const float tolerance = (dtype == kFloat32 ? 1e-4f : 2e-2f) * (1.0f + largest);
  for (size_t i = 0; i < out.size(); ++i) {
    if (!(std::fabs(as_float(&out[i]) - as_float(&other_out[i])) <= tolerance)) return false;
  }
  return true;
}

template <class T>
bool same_experts(ExpertsFunction* other, DType dtype) {
  for (const int64_t kind :
       {int64_t(dtype), int64_t(kInt8), int64_t(kFloat8), int64_t(kInt8Strips), int64_t(kInt4),
        int64_t(kE2M1), int64_t(kInt4Strips), int64_t(kBFloat16Strips)}) {
    if (kind == kBFloat16Strips && dtype != kBFloat16) continue;
    for (const int64_t tokens : {1, 9, 70}) {
      for (const int64_t activation : {kSilu, kGeluTanh, kClampedSwiglu}) {
        const bool biased = activation == kClampedSwiglu;
        if (!same_expert_layers<T>(other, dtype, kind, tokens, activation, biased)) return false;
      }
    }
  }
  return true;
}

// Results must be identical.
template <class T>
bool same_quantize(QuantizeFunction* other, DType dtype) {
  constexpr int64_t kWeights = 192 * 256;
  Random random;
  const auto weight = draw<T>(random, kWeights);
  for (const int64_t kind : {kInt8, kInt8Strips, kInt4, kInt4Strips}) {
    std::vector<uint8_t> values(kWeights), other_values(kWeights);
    std::vector<float> scales(kWeights / 64), other_scales(kWeights / 64);
    std::vector<uint16_t> offsets(kWeights / 64), other_offsets(kWeights / 64);
    // int8 with a padded last strip.
    const int64_t rows = kind == kInt8Strips ? 150 : 192;
    QuantizeArgs args{};
    args.weight = weight.data(), args.values = values.data(), args.scales = scales.data();
    args.offsets = offsets.data(), args.rows = rows, args.inputs = 256, args.dtype = dtype;
    args.kind = kind, args.group = 64, args.threads = 2;
    if (slipstream_quantize(&args) != kOk) return false;
    args.values = other_values.data(), args.scales = other_scales.data();
    args.offsets = other_offsets.data();
    if (other(&args) != kOk || values != other_values || scales != other_scales) return false;
    if (offsets != other_offsets) return false;
  }
  return true;
}

bool same_layout(LayOutFunction* other) {
  Random random;
  // Includes words that do not fill a vector.
  auto weight = draw<bf16>(random, 192 * 2 * 75), other_weight = weight;
  LayOutArgs args{};
  args.weight = weight.data(), args.strips = 3, args.words = 75, args.threads = 2;
  if (slipstream_lay_out(&args) != kOk) return false;
  args.weight = other_weight.data();
  return other(&args) == kOk &&
         std::memcmp(weight.data(), other_weight.data(), weight.size() * sizeof(bf16)) == 0;
}

template <class T>
bool same_values(const std::vector<T>& ours, const std::vector<T>& others, float tolerance) {
  for (size_t i = 0; i < ours.size(); ++i) {
    const float expected = as_float(&ours[i]);
    if (!(std::fabs(expected - as_float(&others[i])) <= tolerance * (1.0f + std::fabs(expected)))) {
      return false;
    }
  }
  return true;
}

// A decode, a row without tokens, and a chunk; the last token is padding.
constexpr int32_t kStateStarts[] = {0, 1, 1, 20};
constexpr int64_t kStateSlots[] = {2, 0, 3}, kStateTokens = 21;

template <class T>
bool same_convolution(ConvolutionFunction* other, DType dtype, int64_t silu) {
  constexpr int64_t kChannels = 150, kTaps = 4, kStride = (kTaps - 1) * kChannels + 5;
  Random random;
  const auto x = draw<T>(random, kStateTokens * kChannels), bias = draw<T>(random, kChannels);
  const auto weight = draw<T>(random, kTaps * kChannels);
  auto states = draw<T>(random, 4 * kStride), other_states = states;
  std::vector<T> out(x.size()), other_out(x.size());
  ConvolutionArgs args{};
  args.x = x.data(), args.weight = weight.data(), args.bias = bias.data();
  args.states = states.data(), args.slots = kStateSlots, args.starts = kStateStarts;
  args.out = out.data(), args.x_stride = kChannels, args.state_stride = kStride;
  args.tokens = kStateTokens, args.rows = 3, args.channels = kChannels, args.taps = kTaps;
  args.num_slots = 4, args.silu = silu, args.dtype = dtype, args.threads = 2;
  if (slipstream_convolution(&args) != kOk) return false;
  args.states = other_states.data(), args.out = other_out.data();
  return other(&args) == kOk && same_values(out, other_out, dtype == kFloat32 ? 1e-5f : 2e-2f) &&
         std::memcmp(states.data(), other_states.data(), states.size() * sizeof(T)) == 0;
}

template <class T>
bool same_convolutions(ConvolutionFunction* other, DType dtype) {
  return same_convolution<T>(other, dtype, 1) && same_convolution<T>(other, dtype, 0);
}

template <class T>
bool same_recurrence(RecurrenceFunction* other, DType dtype, int64_t delta) {
  constexpr int64_t kHeads = 4, kKeyHeads = 2, kKeyDim = 33, kDim = 150;
  constexpr int64_t kState = kHeads * kKeyDim * kDim;
  Random random;
  const auto query = draw<T>(random, kStateTokens * kKeyHeads * kKeyDim);
  const auto key = draw<T>(random, query.size());
  const auto value = draw<T>(random, kStateTokens * kHeads * kDim);
  auto decay = draw<float>(random, kStateTokens * kHeads), factor = decay;
  const auto skip = draw<float>(random, kHeads);
  // Small factors keep states bounded where nothing is subtracted.
  for (float& each : decay) each = -std::fabs(each);
  for (float& each : factor) each = 0.1f * std::fabs(each);
  auto states = draw<float>(random, 4 * kState), other_states = states;
  std::vector<T> out(value.size()), other_out(value.size());
  RecurrenceArgs args{};
  args.query = query.data(), args.key = key.data(), args.value = value.data();
  args.decay = decay.data(), args.factor = factor.data(), args.skip = skip.data();
  args.states = states.data(), args.slots = kStateSlots, args.starts = kStateStarts;
  args.out = out.data(), args.query_stride = kKeyHeads * kKeyDim;
  args.key_stride = kKeyHeads * kKeyDim, args.value_stride = kHeads * kDim;
  args.state_stride = kState, args.tokens = kStateTokens, args.rows = 3;
  args.key_heads = kKeyHeads, args.heads = kHeads, args.key_dim = kKeyDim, args.dim = kDim;
  args.num_slots = 4, args.dtype = dtype, args.delta = delta, args.normalizes = delta;
  args.threads = 2;
  if (slipstream_recurrence(&args) != kOk) return false;
  args.states = other_states.data(), args.out = other_out.data();
  return other(&args) == kOk && same_values(out, other_out, dtype == kFloat32 ? 1e-3f : 3e-2f) &&
         same_values(states, other_states, 1e-3f);
}

template <class T>
bool same_recurrences(RecurrenceFunction* other, DType dtype) {
  return same_recurrence<T>(other, dtype, 0) && same_recurrence<T>(other, dtype, 1);
}

// Both ways of each row: a decode, a prompt that is expanded, one that shares a step's tokens with
// padding, and a chunk behind many keys; `shrinks` leaves sizes that no vector divides.
template <class T>
bool same_latents(LatentFunction* other, DType dtype, int64_t deterministic, bool shrinks) {
  constexpr int64_t kHeads = 3, kBlock = 16, kRows = 4, kMaxBlocks = 20, kBlocks = 45, kTokens = 250;
  const int64_t nope = shrinks ? 20 : 64, rope = shrinks ? 12 : 32, rank = shrinks ? 60 : 128;
  const int64_t value = shrinks ? 33 : 64, width = rank + rope;
  const int32_t starts[kRows + 1] = {0, 1, 201, 204, 244}, lengths[kRows] = {300, 200, 3, 150};
  Random random;
  const auto query = draw<T>(random, size_t(kTokens * kHeads * (nope + rope)));
  const auto latent = draw<T>(random, size_t(kTokens * width));
  auto up = draw<float>(random, size_t(kHeads * (nope + value) * rank));
  std::vector<T> narrow_up(up.size());
  // Keys and values of the size of queries.
  for (size_t i = 0; i < up.size(); ++i) from_float(up[i] / std::sqrt(float(rank)), &narrow_up[i]);
  auto cache = draw<T>(random, size_t(kBlocks * kBlock * width)), other_cache = cache;
  std::vector<T> out(size_t(kTokens * kHeads * value)), other_out(out.size());
  std::vector<int32_t> tables(kRows * kMaxBlocks);
  std::vector<int64_t> slots(size_t(kTokens), -1);
  for (int64_t row = 0, used = 0; row < kRows; ++row) {
    for (int64_t i = 0; i * kBlock < lengths[row]; ++i, ++used) {
      tables[size_t(row * kMaxBlocks + i)] = int32_t(used * 7 % kBlocks);
    }
    for (int32_t token = starts[row]; token < starts[row + 1]; ++token) {
      const int64_t position = lengths[row] - (starts[row + 1] - token);
      slots[size_t(token)] =
          tables[size_t(row * kMaxBlocks + position / kBlock)] * kBlock + position % kBlock;
    }
  }
  AttentionSpec spec{};
  spec.scale = 1.0f / std::sqrt(float(nope + rope));
  LatentArgs args{};
  args.query = query.data(), args.latent = latent.data(), args.cache = cache.data();
  args.up = narrow_up.data(), args.block_tables = tables.data(), args.query_start_loc = starts;
  args.seq_lens = lengths, args.slot_mapping = slots.data(), args.out = out.data(), args.spec = &spec;
  args.query_stride = kHeads * (nope + rope), args.latent_stride = width;
  args.block_table_stride = args.max_blocks = kMaxBlocks, args.tokens = kTokens, args.rows = kRows;
  args.heads = kHeads, args.nope = nope, args.rope = rope, args.rank = rank, args.value = value;
  args.num_blocks = kBlocks, args.block_size = kBlock, args.dtype = dtype, args.threads = 2;
  args.deterministic = deterministic;
  if (slipstream_latent_attention(&args) != kOk) return false;
  args.cache = other_cache.data(), args.out = other_out.data();
  return other(&args) == kOk && same_values(out, other_out, dtype == kFloat32 ? 1e-4f : 3e-2f) &&
         std::memcmp(cache.data(), other_cache.data(), cache.size() * sizeof(T)) == 0;
}

template <class T>
bool same_latent(LatentFunction* other, DType dtype) {
  for (const int64_t deterministic : {0, 1}) {
    for (const bool shrinks : {false, true}) {
      if (!same_latents<T>(other, dtype, deterministic, shrinks)) return false;
    }
  }
  return true;
}

// A check of two forms of a kernel, for the dtypes that it takes.
template <class Function, bool float32(Function*, DType), bool bfloat16(Function*, DType),
          bool float16(Function*, DType)>
bool same_in_all_dtypes(void* other) {
  const auto function = reinterpret_cast<Function*>(other);
  return float32(function, kFloat32) && bfloat16(function, kBFloat16) && float16(function, kFloat16);
}

// Of every kernel in abi.py; without one a level is not built.
struct Check {
  const char* kernel;
  bool (*passes)(void* other);
};
constexpr Check kChecks[] = {
    {"paged_attention", same_in_all_dtypes<AttentionFunction, same_attentions<float>,
                                           same_attentions<bf16>, same_attentions<f16>>},
    {"latent_attention",
     same_in_all_dtypes<LatentFunction, same_latent<float>, same_latent<bf16>, same_latent<f16>>},
    {"gumbel_argmax", [](void* other) { return same_gumbel(reinterpret_cast<GumbelFunction*>(other)); }},
    {"linear",
     same_in_all_dtypes<LinearFunction, same_linears<float>, same_linears<bf16>, same_linears<f16>>},
    {"experts", same_in_all_dtypes<ExpertsFunction, same_experts<float>, same_experts<bf16>,
                                   same_experts<f16>>},
    {"lora",
     same_in_all_dtypes<LoraFunction, same_lora<float>, same_lora<bf16>, same_lora<f16>>},
    {"quantize", same_in_all_dtypes<QuantizeFunction, same_quantize<float>, same_quantize<bf16>,
                                    same_quantize<f16>>},
    {"lay_out", [](void* other) { return same_layout(reinterpret_cast<LayOutFunction*>(other)); }},
    {"convolution", same_in_all_dtypes<ConvolutionFunction, same_convolutions<float>,
                                       same_convolutions<bf16>, same_convolutions<f16>>},
    {"recurrence", same_in_all_dtypes<RecurrenceFunction, same_recurrences<float>,
                                      same_recurrences<bf16>, same_recurrences<f16>>},
};

}  // namespace

// Whether this CPU and its operating system support a level (levels.py): 0 portable, 1 AVX2, 2 AVX-VNNI,
// 3 AVX-512, 4 AVX512_VNNI, 5 AVX512_BF16, 6 AMX.
SLIPSTREAM_EXPORT int slipstream_cpu_claims(int level) {
  if (level == 0) return 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (level <= 2) return avx2 && (level == 1 || has_avx_vnni());
  const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (level == 3) return avx512;
  return avx512 && has_byte_products() && (level == 4 || has_pair_products()) &&
         (level <= 5 || has_tiles());
#else
  return 0;
#endif
}

// Whether a kernel of another library computes what this library's does: 0, kDiffers, or kNoCheck.
SLIPSTREAM_EXPORT int slipstream_self_check(const char* kernel, void* other) {
  for (const Check& check : kChecks) {
    if (std::strcmp(check.kernel, kernel) == 0) return check.passes(other) ? 0 : kDiffers;
  }
  return kNoCheck;
}
