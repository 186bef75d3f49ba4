// A mixture of experts: tokens are sorted by expert, and each expert is multiplied by its tokens
// together.
//
// There are two passes over the tokens and experts: gate and up with the activation, then down. A sum of
// each token's results follows, in the order of its choices. A pass is cut into items: some of an
// expert's tokens against some of its rows. An item is a linear layer of one thread (linear.cpp), for any
// layout of weights. A row's sums do not depend on how rows and tokens are cut, so a token's result does
// not depend on the other tokens. Weights of experts that no token chose are not read.
#include <algorithm>
#include <atomic>
#include <new>
#include <type_traits>
#include <vector>

#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "runtime/vector.h"

namespace {

constexpr int64_t kItemTokens = 256, kItemRows = 512;  // maximal size of an item
constexpr int64_t kItemsPerThread = 8;                 // about, so that threads finish together
constexpr int64_t kScratchBytes = 64 << 20;  // for intermediate results; more tokens take several turns
constexpr double kBytesPerMicrosecond = 20e3;    // of weights, by one thread
constexpr double kProductsPerMicrosecond = 50e3;
constexpr double kMovedPerMicrosecond = 4e3;  // elements

// The matrices of all experts: gate and up, or down.
struct Matrices {
  const char *weight, *scales, *offsets;  // offsets: or null
  const char* bias;                       // or null
  const int32_t* order;                   // as in ExpertsArgs, or null
  int64_t inputs, outputs, kind, group, group_dtype, bias_bytes;  // of one element of the bias

  bool in_strips() const {
    return kind == kBFloat16Strips || kind == kInt8Strips || kind == kInt4Strips;
  }
  int64_t row_bytes() const {
    switch (kind) {
      case kInt4: case kInt4Strips: case kE2M1: return inputs / 2;
      case kInt8: case kInt8Strips: case kFloat8: return inputs;
      case kFloat32: return inputs * 4;
      default: return inputs * 2;
    }
  }
  int64_t held_rows() const {
    return in_strips() ? (outputs + kStripOutputs - 1) / kStripOutputs * kStripOutputs : outputs;
  }
  // Bytes of the scales of a row, and of its offsets.
  int64_t scale_bytes() const {
    if (kind <= kFloat16 || kind == kBFloat16Strips) return 0;
    if (group == 0) return int64_t(sizeof(float));
    return inputs / group * (group_dtype == kFloat32 ? 4 : group_dtype == kPowers ? 1 : 2);
  }

  // Rows [row, row + rows) of an expert as a layer; in strips, `row` is at the start of a strip.
  LinearArgs rows_of(int64_t expert, int64_t row, int64_t rows) const {
    LinearArgs args{};
    const int64_t numbers = (expert * outputs + row) * scale_bytes();
    args.weight = weight + (expert * held_rows() + row) * row_bytes();
    args.scales = scales + numbers;
    if (offsets != nullptr) args.offsets = offsets + numbers;
    if (bias != nullptr) args.bias = bias + (expert * outputs + row) * bias_bytes;
    args.inputs = inputs, args.outputs = rows;
    args.kind = kind, args.group = group, args.group_dtype = group_dtype, args.threads = 1;
    return args;
  }
};

// Some of an expert's tokens, in sorted order, against some of its rows.
struct Item {
  int64_t expert, first, tokens, row, rows;
};

// Joins gates and ups. The activations are x / (1 + exp(-y)): silu with y = x, and the tanh approximation
// of gelu with another y. Comparisons are such that a NaN stays one.
inline vf joined(vf gate, vf up, const ExpertsArgs& a) {
  if (a.activation == kClampedSwiglu) {
    const vf most = splat(float(a.limit));
    gate = gate > most ? most : gate;
    up = up > most ? most : up;
    up = (up < -most ? -most : up) + 1.0f;
  }
  vf y = gate;
  if (a.activation == kClampedSwiglu) y = gate * float(a.alpha);
  if (a.activation == kGeluTanh) y = (y + y * y * y * 0.044715f) * 1.5957691216057308f;
  const vf bounded = -y < 80.0f ? -y : splat(80.0f);
  return gate / (exponential(bounded) + 1.0f) * up;
}

// Rounds values to the dtype of `to`, and stores the first `count`.
template <class T>
inline void put(T* to, vf values, int64_t count) {
  float wide[W];
  T narrow[W];
  store(wide, values);
  from_floats(wide, narrow);
  std::memcpy(to, narrow, size_t(count) * sizeof(T));
}

// Returns the memory of a vector with room for `count` elements, uninitialized.
template <class T>
T* room(std::vector<T>& memory, int64_t count) {
  if (int64_t(memory.size()) < count) memory.resize(size_t(count));
  return memory.data();
}

inline const char* bytes(const void* at) { return static_cast<const char*>(at); }

template <class T>
class Experts {
 public:
  explicit Experts(const ExpertsArgs& args)
      : a(args),
        gate_up{bytes(a.gate_up), bytes(a.gate_up_scales), bytes(a.gate_up_offsets),
                bytes(a.gate_up_bias), a.gate_up_order, a.hidden, 2 * a.intermediate,
                a.gate_up_kind, a.gate_up_group, a.gate_up_group_dtype, sizeof(T)},
        down{bytes(a.down), bytes(a.down_scales), bytes(a.down_offsets), bytes(a.down_bias),
             a.down_order, a.intermediate, a.hidden, a.down_kind, a.down_group,
             a.down_group_dtype, sizeof(T)} {}

  Status run() {
    if (gate_up.in_strips() && a.intermediate % kStripOutputs) return kBadShape;
    const int64_t of_a_token =
        std::max<int64_t>(1, a.chosen * (2 * a.hidden + a.intermediate) * int64_t(sizeof(T)));
    const int64_t most = std::max(kItemTokens, kScratchBytes / of_a_token);
    const int64_t turns = (a.tokens + most - 1) / most;
    for (int64_t turn = 0; turn < turns; ++turn) {
      run_some(a.tokens * turn / turns, a.tokens * (turn + 1) / turns);
    }
    return Status(failed.load());
  }

 private:
  bool is_expert(int64_t id) const { return id >= 0 && id < a.experts; }

  // Computes tokens [begin, end).
  void run_some(int64_t begin, int64_t end) {
    order(begin, end);
    const int64_t pairs = int64_t(ordered.size()), places = (end - begin) * a.chosen;
    thread_local std::vector<T> inputs_memory, activated_memory, results_memory;
    inputs = room(inputs_memory, pairs * a.hidden);
    activated = room(activated_memory, pairs * a.intermediate);
    results = room(results_memory, places * a.hidden);
    spread(pairs, double(pairs * a.hidden), [&](int64_t i) {
      const T* from = static_cast<const T*>(a.x) + (begin + ordered[i] / a.chosen) * a.x_stride;
      T* const to = inputs + i * a.hidden;
      if (a.weighs_inputs) {
        weigh(from, a.weights[begin * a.chosen + ordered[i]], to);
      } else {
        std::memcpy(to, from, size_t(a.hidden) * sizeof(T));
      }
    });
    over_items(a.intermediate, gate_up, [&](const Item& item) { project(item); });
    over_items(a.hidden, down, [&](const Item& item) { project_down(item); });
    spread(end - begin, double(places * a.hidden), [&](int64_t i) { combine(begin, i); });
  }

  // A token's input times its weight.
  void weigh(const T* from, float weight, T* to) const {
    for (int64_t h = 0; h < a.hidden; h += W) {
      const int64_t some = std::min<int64_t>(W, a.hidden - h);
      put(to + h, (some == W ? load(from + h) : load_some(from + h, some)) * weight, some);
    }
  }

  // Calls run(0) to run(count - 1) in parallel; together they move `elements` elements.
  template <class Run>
  void spread(int64_t count, double elements, const Run& run) const {
    const int64_t parts = worthwhile_parts(a.threads, elements / kMovedPerMicrosecond, count);
    parallel(a.threads, parts, [&](int64_t part) {
      for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) run(i);
    });
  }

  // Sorts the (token, expert) pairs by expert, then by token, with a counting sort.
  void order(int64_t begin, int64_t end) {
    const int64_t* ids = a.ids + begin * a.chosen;
    const int64_t places = (end - begin) * a.chosen;
    starts.assign(size_t(a.experts + 1), 0);
    for (int64_t i = 0; i < places; ++i) starts[is_expert(ids[i]) ? ids[i] + 1 : 0] += 1;
    starts[0] = 0;
    for (int64_t i = 0; i < a.experts; ++i) starts[i + 1] += starts[i];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    ordered.resize(size_t(starts[a.experts]));
    for (int64_t i = 0; i < places; ++i) {
      if (is_expert(ids[i])) ordered[size_t(next[ids[i]]++)] = i;
    }
  }

  // Estimated time of one thread for some tokens of an expert, in microseconds.
  static double cost(const Matrices& matrices, int64_t tokens) {
    const double cells = double(matrices.outputs * matrices.inputs);
    return std::max(double(matrices.row_bytes() * matrices.outputs) / kBytesPerMicrosecond,
                    cells * double(tokens) / kProductsPerMicrosecond);
  }

  // Cuts the pairs into items of up to kItemTokens tokens, and calls run(item), in memory order.
  template <class Run>
  void over_items(int64_t rows, const Matrices& matrices, const Run& run) {
    double work = 0;
    for (int64_t e = 0; e < a.experts; ++e) {
      if (starts[e + 1] > starts[e]) work += cost(matrices, starts[e + 1] - starts[e]);
    }
    const double piece = work / double(kItemsPerThread * a.threads);
    const int64_t strips = (rows + kStripOutputs - 1) / kStripOutputs;
    items.clear();
    for (int64_t e = 0; e < a.experts; ++e) {
      const int64_t first = starts[e], tokens = starts[e + 1] - first;
      if (tokens == 0) continue;
      const int64_t ranges = (tokens + kItemTokens - 1) / kItemTokens;
      const int64_t fewest = (rows + kItemRows - 1) / kItemRows;
      const int64_t wanted = int64_t(cost(matrices, tokens) / piece + 0.5) / ranges;
      const int64_t pieces = std::clamp(wanted, fewest, strips);
      for (int64_t i = 0; i < pieces * ranges; ++i) {
        const int64_t range = i % ranges, from = tokens * range / ranges;
        const int64_t row = strips * (i / ranges) / pieces * kStripOutputs;
        const int64_t next = strips * (i / ranges + 1) / pieces * kStripOutputs;
        items.push_back({e, first + from, tokens * (range + 1) / ranges - from, row,
                         std::min(rows, next) - row});
      }
    }
    const int64_t count = int64_t(items.size());
    const int64_t parts = worthwhile_parts(a.threads, work, count) > 1 ? count : 1;
    parallel_along(a.threads, parts, [&](int64_t part) {
      for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) run(items[i]);
    });
  }

  // An item's tokens, with inputs in the order of the expert's columns.
  static const T* in_order(const Matrices& matrices, const Item& item, const T* x) {
    thread_local std::vector<T> memory;
    const int64_t inputs = matrices.inputs;
    T* const ordered = room(memory, item.tokens * inputs);
    const int32_t* order = matrices.order + item.expert * inputs;
    for (int64_t t = 0; t < item.tokens; ++t) {
      const T* from = x + t * inputs;
      for (int64_t k = 0; k < inputs; ++k) ordered[t * inputs + k] = from[order[k]];
    }
    return ordered;
  }

  // Multiplies an item's tokens in `x` by rows of the expert, from `row` on: out [tokens, rows].
  void multiply(const Matrices& matrices, int64_t row, const Item& item, const T* x, T* out) {
    LinearArgs args = matrices.rows_of(item.expert, row, item.rows);
    x += item.first * args.inputs;
    args.x = matrices.order == nullptr ? x : in_order(matrices, item, x);
    args.x_stride = args.inputs;
    args.out = out;
    args.tokens = item.tokens;
    args.dtype = a.dtype;
    const int status = slipstream_linear(&args);
    if (status == kOutOfMemory) throw std::bad_alloc();
    if (status != kOk) failed.store(status, std::memory_order_relaxed);
  }

  // Computes gate and up of an item, and joins them with the activation.
  void project(const Item& item) {
    thread_local std::vector<T> memory;
    const int64_t count = item.tokens * item.rows;
    T* const gates = room(memory, 2 * count);
    T* const ups = gates + count;
    multiply(gate_up, item.row, item, inputs, gates);
    multiply(gate_up, a.intermediate + item.row, item, inputs, ups);
    for (int64_t t = 0; t < item.tokens; ++t) {
      T* const to = activated + (item.first + t) * a.intermediate + item.row;
      const T *gate = gates + t * item.rows, *up = ups + t * item.rows;
      for (int64_t i = 0; i < item.rows; i += W) {
        const int64_t some = std::min<int64_t>(W, item.rows - i);
        const vf g = some == W ? load(gate + i) : load_some(gate + i, some);
        const vf u = some == W ? load(up + i) : load_some(up + i, some);
        put(to + i, joined(g, u, a), some);
      }
    }
  }

  void project_down(const Item& item) {
    thread_local std::vector<T> memory;
    T* const outs = room(memory, item.tokens * item.rows);
    multiply(down, item.row, item, activated, outs);
    for (int64_t t = 0; t < item.tokens; ++t) {
      std::memcpy(results + ordered[size_t(item.first + t)] * a.hidden + item.row,
                  outs + t * item.rows, size_t(item.rows) * sizeof(T));
    }
  }

  // Sums the results of token begin + i.
  void combine(int64_t begin, int64_t i) const {
    const int64_t first = (begin + i) * a.chosen;
    const T* from = results + i * a.chosen * a.hidden;
    T* const to = static_cast<T*>(a.out) + (begin + i) * a.hidden;
    for (int64_t h = 0; h < a.hidden; h += W) {
      const int64_t some = std::min<int64_t>(W, a.hidden - h);
      vf sums = {};
      for (int64_t j = 0; j < a.chosen; ++j) {
        if (!is_expert(a.ids[first + j])) continue;
        const T* result = from + j * a.hidden + h;
        sums += (some == W ? load(result) : load_some(result, some)) *
                (a.weighs_inputs ? 1.0f : a.weights[first + j]);
      }
      put(to + h, sums, some);
    }
  }

  const ExpertsArgs& a;
  const Matrices gate_up, down;
  std::vector<int64_t> starts;   // [experts + 1], expert -> its first index in `ordered`
  std::vector<int64_t> ordered;  // sorted pairs -> index into [tokens, chosen]
  std::vector<Item> items;
  T *inputs, *activated;  // [pairs, hidden], [pairs, intermediate], sorted like `ordered`
  T* results;             // [tokens, chosen, hidden]
  std::atomic<int> failed{kOk};
};

template <class T>
Status run(const ExpertsArgs& a) {
  return Experts<T>(a).run();
}

}  // namespace

SLIPSTREAM_EXPORT int slipstream_experts(const ExpertsArgs* args) {
  const ExpertsArgs& a = *args;
  if (a.tokens < 0 || a.hidden < 1 || a.intermediate < 1 || a.experts < 1 || a.chosen < 0 ||
      a.threads < 1 || a.activation < kSilu || a.activation > kClampedSwiglu) {
    return kBadShape;
  }
  try {
    switch (a.dtype) {
      case kFloat32: return run<float>(a);
      case kBFloat16: return run<bf16>(a);
      case kFloat16: return run<f16>(a);
      default: return kBadShape;
    }
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
