// Low-rank updates of a projection's results (LoRA). Tokens are sorted by slot, and a slot's matrices are
// read once for a block of its tokens.
//
// There are two passes over the blocks: inputs to inner results, then inner results to outputs. An inner
// result is a sum along the inputs, and an output a sum along the rank, both in one fixed order. So a
// token's result does not depend on the other tokens, nor on how blocks are cut.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "runtime/vector.h"

namespace {

constexpr int64_t kBlock = 8;          // tokens of a slot that are computed together
constexpr int kTogether = 4;           // of these, tokens whose sums are in registers at a time
constexpr int64_t kColumns = 512;      // outputs of an item of the second pass
constexpr double kProductsPerMicrosecond = 15e3;
constexpr double kMovedPerMicrosecond = 4e3;  // elements

// Tokens [first, first + count) of those that are sorted by slot.
struct Block {
  int64_t slot, first, count;
};

inline float total(vf v) {
  float sums[W];
  store(sums, v);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
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

template <class T>
inline vf take(const T* from, int64_t count) {
  return count == W ? load(from) : load_some(from, count);
}

int64_t whole_vectors(int64_t count) { return (count + W - 1) / W * W; }

template <class T>
class Lora {
 public:
  explicit Lora(const LoraArgs& args)
      : a(args),
        base(static_cast<const T*>(a.base)),
        x(static_cast<const T*>(a.x)),
        down(static_cast<const T*>(a.down)),
        up(static_cast<const T*>(a.up)),
        out(static_cast<T*>(a.out)),
        width(a.parts * a.room) {}

  Status run() {
    if (Status status = order()) return status;
    const int64_t count = int64_t(blocks.size());
    inner.resize(sorted.size() * size_t(width));
    spread(count, products(a.inputs) / kProductsPerMicrosecond,
           [&](int64_t i) { project(blocks[size_t(i)]); });
    const int64_t pieces = (a.outputs + kColumns - 1) / kColumns;
    const double copied = double(a.tokens * a.outputs) / kMovedPerMicrosecond;
    // Tokens without an update are copied by the items behind those of the blocks.
    spread(count * pieces + int64_t(without.size()),
           products(a.outputs) / kProductsPerMicrosecond / double(a.parts) + copied, [&](int64_t i) {
             if (i < count * pieces) {
               const int64_t begin = i % pieces * kColumns;
               expand(blocks[size_t(i / pieces)], begin, std::min(begin + kColumns, a.outputs));
             } else {
               const int64_t token = without[size_t(i - count * pieces)];
               std::memcpy(out + token * a.outputs, base + token * a.outputs,
                           size_t(a.outputs) * sizeof(T));
             }
           });
    return kOk;
  }

 private:
  // Sorts tokens by slot, then by their number, and cuts each slot's tokens into blocks.
  Status order() {
    for (int64_t part = 0; part < a.parts; ++part) {
      if (a.starts[part] < 0 || a.starts[part] > a.starts[part + 1]) return kBadShape;
    }
    if (a.starts[0] != 0 || a.starts[a.parts] != a.outputs) return kBadShape;
    for (int64_t i = 0; i < a.slots * a.parts; ++i) {
      if (a.ranks[i] < 0 || a.ranks[i] > a.room) return kBadShape;
    }
    std::vector<int64_t> ends(size_t(a.slots + 1), 0);
    for (int64_t token = 0; token < a.tokens; ++token) {
      const int64_t slot = a.chosen[token];
      if (slot >= a.slots) return kBadSlot;
      if (slot < 0) {
        without.push_back(token);
      } else {
        ends[size_t(slot + 1)] += 1;
      }
    }
    for (int64_t slot = 0; slot < a.slots; ++slot) {
      const int64_t first = ends[size_t(slot)], tokens = ends[size_t(slot + 1)];
      for (int64_t done = 0; done < tokens; done += kBlock) {
        blocks.push_back({slot, first + done, std::min(kBlock, tokens - done)});
      }
      ends[size_t(slot + 1)] += first;
    }
    sorted.resize(size_t(ends[size_t(a.slots)]));
    for (int64_t token = 0; token < a.tokens; ++token) {
      const int64_t slot = a.chosen[token];
      if (slot >= 0) sorted[size_t(ends[size_t(slot)]++)] = token;
    }
    return kOk;
  }

  // Products of all blocks' ranks with `size` elements.
  double products(int64_t size) const {
    double ranks = 0;
    for (const Block& block : blocks) {
      for (int64_t part = 0; part < a.parts; ++part) {
        ranks += double(block.count) * double(a.ranks[block.slot * a.parts + part]);
      }
    }
    return ranks * double(size);
  }

  template <class Run>
  void spread(int64_t count, double microseconds, const Run& run) const {
    const int64_t parts = worthwhile_parts(a.threads, microseconds, count);
    parallel(a.threads, parts, [&](int64_t part) {
      for (int64_t i = count * part / parts; i < count * (part + 1) / parts; ++i) run(i);
    });
  }

  // Inner results of a block's tokens.
  void project(const Block& block) {
    const int64_t padded = whole_vectors(a.inputs);
    thread_local std::vector<float> memory;
    if (memory.size() < size_t(kBlock * padded)) memory.resize(size_t(kBlock * padded));
    float* const wide = memory.data();
    for (int64_t i = 0; i < block.count; ++i) {
      convert_row(x + sorted[size_t(block.first + i)] * a.x_stride, wide + i * padded,
                  int(a.inputs));
    }
    for (int64_t first = 0; first < block.count; first += kTogether) {
      const float* inputs = wide + first * padded;
      const int64_t to = block.first + first;
      switch (std::min<int64_t>(kTogether, block.count - first)) {
        case 1: project<1>(block.slot, inputs, padded, to); break;
        case 2: project<2>(block.slot, inputs, padded, to); break;
        case 3: project<3>(block.slot, inputs, padded, to); break;
        default: project<kTogether>(block.slot, inputs, padded, to);
      }
    }
  }

  template <int N>
  void project(int64_t slot, const float* inputs, int64_t padded, int64_t to) {
    for (int64_t part = 0; part < a.parts; ++part) {
      const int64_t rank = a.ranks[slot * a.parts + part];
      const T* rows = down + (slot * width + part * a.room) * a.inputs;
      float* results = inner.data() + to * width + part * a.room;
      int64_t row = 0;
      for (; row + 2 <= rank; row += 2) {
        dot<N, 2>(rows + row * a.inputs, inputs, padded, results + row);
      }
      if (row < rank) dot<N, 1>(rows + row * a.inputs, inputs, padded, results + row);
    }
  }

  // Products of N tokens with R rows.
  template <int N, int R>
  void dot(const T* rows, const float* inputs, int64_t padded, float* results) const {
    vf sums[N][R] = {};
    int64_t at = 0;
    for (; at + W <= a.inputs; at += W) step<N, R>(rows, inputs, padded, at, W, sums);
    if (at < a.inputs) step<N, R>(rows, inputs, padded, at, a.inputs - at, sums);
    for (int n = 0; n < N; ++n) {
      for (int r = 0; r < R; ++r) results[n * width + r] = total(sums[n][r]);
    }
  }

  template <int N, int R>
  void step(const T* rows, const float* inputs, int64_t padded, int64_t at, int64_t count,
            vf (&sums)[N][R]) const {
    vf weights[R];
    for (int r = 0; r < R; ++r) weights[r] = take(rows + r * a.inputs + at, count);
    for (int n = 0; n < N; ++n) {
      const vf values = load(inputs + n * padded + at);
      for (int r = 0; r < R; ++r) sums[n][r] += values * weights[r];
    }
  }

  // Outputs [begin, end) of a block's tokens.
  void expand(const Block& block, int64_t begin, int64_t end) {
    for (int64_t part = 0; part < a.parts; ++part) {
      const int64_t from = std::max<int64_t>(begin, a.starts[part]);
      const int64_t to = std::min<int64_t>(end, a.starts[part + 1]);
      for (int64_t first = 0; first < block.count && from < to; first += kTogether) {
        const int64_t* tokens = sorted.data() + block.first + first;
        const float* results = inner.data() + (block.first + first) * width + part * a.room;
        const int64_t rank = a.ranks[block.slot * a.parts + part];
        const T* rows = up + block.slot * a.room * a.outputs;
        switch (std::min<int64_t>(kTogether, block.count - first)) {
          case 1: expand<1>(tokens, results, rows, rank, from, to); break;
          case 2: expand<2>(tokens, results, rows, rank, from, to); break;
          case 3: expand<3>(tokens, results, rows, rank, from, to); break;
          default: expand<kTogether>(tokens, results, rows, rank, from, to);
        }
      }
    }
  }

  template <int N>
  void expand(const int64_t* tokens, const float* results, const T* rows, int64_t rank,
              int64_t from, int64_t to) {
    for (int64_t at = from; at < to; at += W) {
      const int64_t count = std::min<int64_t>(W, to - at);
      vf sums[N] = {};
      for (int64_t r = 0; r < rank; ++r) {
        const vf weights = take(rows + r * a.outputs + at, count);
        for (int n = 0; n < N; ++n) sums[n] += weights * results[n * width + r];
      }
      for (int n = 0; n < N; ++n) {
        const int64_t place = tokens[n] * a.outputs + at;
        put(out + place, take(base + place, count) + sums[n], count);
      }
    }
  }

  const LoraArgs& a;
  const T *base, *x, *down, *up;
  T* out;
  const int64_t width;                   // inner results of a token
  std::vector<int64_t> sorted, without;  // tokens with an update, by slot; tokens that have none
  std::vector<Block> blocks;
  std::vector<float> inner;              // [tokens with an update, width]
};

}  // namespace

SLIPSTREAM_EXPORT int slipstream_lora(const LoraArgs* args) {
  const LoraArgs& a = *args;
  if (a.tokens < 0 || a.inputs < 1 || a.outputs < 1 || a.slots < 1 || a.parts < 1 || a.room < 1 ||
      a.threads < 1) {
    return kBadShape;
  }
  try {
    switch (a.dtype) {
      case kFloat32: return Lora<float>(a).run();
      case kBFloat16: return Lora<bf16>(a).run();
      case kFloat16: return Lora<f16>(a).run();
      default: return kBadShape;
    }
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
