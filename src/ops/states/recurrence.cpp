// Recurrent states: causal convolution and the linear recurrence, see causal_convolution.py and
// linear_recurrence.py for the definitions.
//
// Every channel, and every column of a head's state, is computed by itself and token by token. So no bit
// depends on how a row is cut into calls, on other rows, or on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "runtime/vector.h"

namespace {

constexpr double kStateCellsPerMicrosecond = 6000;
constexpr double kInputsPerMicrosecond = 2000;
constexpr int64_t kMostTaps = 16;  // MAX_TAPS of causal_convolution.py
constexpr int64_t kColumnVectors = 4;  // of a state, computed together
constexpr int64_t kChannelVectors = 4;
constexpr float kNormEps = 1e-6f;  // NORM_EPS of linear_recurrence.py

template <class T>
inline vf get(const T* from, int64_t some) {
  return some >= W ? load(from) : load_some(from, some);
}

template <class T>
inline void put(vf v, T* to, int64_t some) {
  float wide[W];
  T narrow[W];
  store(wide, v);
  from_floats(wide, narrow);
  std::memcpy(to, narrow, size_t(std::min<int64_t>(W, some)) * sizeof(T));
}

// Clears elements [begin, end). A step without tokens has no output to point to.
template <class T>
inline void clear(void* out, int64_t begin, int64_t end) {
  if (begin < end) std::memset(static_cast<T*>(out) + begin, 0, size_t(end - begin) * sizeof(T));
}

inline vf silu(vf x) {
  const vf bounded = -x < 80.0f ? -x : splat(80.0f);
  return x / (exponential(bounded) + 1.0f);
}

// Whether rows follow each other within the tokens, and every slot of a row with tokens exists.
Status check_rows(const int32_t* starts, const int64_t* slots, int64_t rows, int64_t tokens,
                  int64_t num_slots) {
  if (starts[0] != 0 || starts[rows] > tokens) return kBadLengths;
  for (int64_t i = 0; i < rows; ++i) {
    if (starts[i + 1] < starts[i]) return kBadLengths;
    if (starts[i + 1] == starts[i]) continue;
    if (slots[i] < 0 || slots[i] >= num_slots) return kBadRow;
  }
  return kOk;
}

// Calls run(item) for items of equal work in a row's token: `per_row` items for each row.
template <class Run>
void over_items(int64_t threads, int64_t rows, int64_t per_row, double microseconds, const Run& run) {
  const int64_t items = rows * per_row;
  const int64_t parts = worthwhile_parts(threads, microseconds, items) > 1 ? items : 1;
  parallel(threads, parts, [&](int64_t part) {
    for (int64_t i = items * part / parts; i < items * (part + 1) / parts; ++i) {
      run(i / per_row, i % per_row);
    }
  });
}

template <class T>
void convolve(const ConvolutionArgs& a, int64_t row, int64_t channel) {
  const int64_t some = std::min<int64_t>(W, a.channels - channel), past = a.taps - 1;
  const T* const weight = static_cast<const T*>(a.weight) + channel;
  T* const state = static_cast<T*>(a.states) + a.slots[row] * a.state_stride + channel;
  vf taps[kMostTaps], seen[kMostTaps];
  for (int64_t i = 0; i < a.taps; ++i) taps[i] = get(weight + i * a.channels, some);
  for (int64_t i = 0; i < past; ++i) seen[i] = get(state + i * a.channels, some);
  const vf bias = a.bias ? get(static_cast<const T*>(a.bias) + channel, some) : vf{};
  for (int64_t t = a.starts[row]; t < a.starts[row + 1]; ++t) {
    seen[past] = get(static_cast<const T*>(a.x) + t * a.x_stride + channel, some);
    vf sum = bias;
    for (int64_t i = 0; i <= past; ++i) sum += taps[i] * seen[i];
    put(a.silu ? silu(sum) : sum, static_cast<T*>(a.out) + t * a.channels + channel, some);
    for (int64_t i = 0; i < past; ++i) seen[i] = seen[i + 1];
  }
  for (int64_t i = 0; i < past; ++i) put(seen[i], state + i * a.channels, some);
}

template <class T>
Status run(const ConvolutionArgs& a) {
  const int64_t end = a.starts[a.rows], block = kChannelVectors * W;
  const double microseconds = double(end * a.channels) / kInputsPerMicrosecond;
  over_items(a.threads, a.rows, (a.channels + block - 1) / block, microseconds,
             [&](int64_t row, int64_t number) {
               if (a.starts[row] == a.starts[row + 1]) return;
               const int64_t last = std::min(a.channels, (number + 1) * block);
               for (int64_t c = number * block; c < last; c += W) convolve<T>(a, row, c);
             });
  clear<T>(a.out, end * a.channels, a.tokens * a.channels);
  return kOk;
}

// A query or key as floats, divided by its length and multiplied by `factor` if it is normalized.
template <class T>
void read_vector(const T* from, float* to, int64_t size, bool normalizes, float factor) {
  convert_row(from, to, int(size));
  if (!normalizes) return;
  vf squares = {};
  for (int64_t i = 0; i < size; i += W) {
    const vf x = load(to + i);  // the excess is 0
    squares += x * x;
  }
  const float scale = factor / std::sqrt(reduce(squares, add) + kNormEps);
  for (int64_t i = 0; i < size; i += W) store(to + i, load(to + i) * scale);
}

// Advances V vectors of columns of one head's state [key_dim, .], rows `stride` floats apart, by all
// tokens of a row. Only `count` columns exist; the excess of `state` may hold anything finite.
template <class T, int V>
void advance(const RecurrenceArgs& a, int64_t row, int64_t head, int64_t column, int64_t count,
             float* state, int64_t stride) {
  thread_local std::vector<float> memory;
  const int64_t room = (a.key_dim + W - 1) / W * W;
  if (int64_t(memory.size()) < 2 * room) memory.resize(size_t(2 * room));
  float *const query = memory.data(), *const key = query + room;
  const int64_t shared = a.heads / a.key_heads, source = head / shared * a.key_dim;
  const float factor = a.normalizes ? 1.0f / std::sqrt(float(a.key_dim)) : 1.0f;
  const float skip = a.skip ? a.skip[head] : 0.0f;
  for (int64_t t = a.starts[row]; t < a.starts[row + 1]; ++t) {
    read_vector(static_cast<const T*>(a.query) + t * a.query_stride + source, query, a.key_dim,
                a.normalizes, factor);
    read_vector(static_cast<const T*>(a.key) + t * a.key_stride + source, key, a.key_dim,
                a.normalizes, 1.0f);
    const float kept = std::exp(a.decay[t * a.heads + head]);
    const T* const value =
        static_cast<const T*>(a.value) + t * a.value_stride + head * a.dim + column;
    vf given[V], written[V], result[V];
    for (int v = 0; v < V; ++v) {
      const int64_t some = count - v * W;
      given[v] = some > 0 ? get(value + v * W, some) : vf{};
      written[v] = vf{};
      result[v] = vf{};
    }
    if (a.delta) {
      for (int64_t n = 0; n < a.key_dim; ++n) {
        for (int v = 0; v < V; ++v) written[v] += load(state + n * stride + v * W) * key[n];
      }
    }
    for (int v = 0; v < V; ++v) {
      written[v] = (given[v] - written[v] * kept) * a.factor[t * a.heads + head];
    }
    for (int64_t n = 0; n < a.key_dim; ++n) {
      for (int v = 0; v < V; ++v) {
        float* const cells = state + n * stride + v * W;
        const vf next = load(cells) * kept + written[v] * key[n];
        store(cells, next);
        result[v] += next * query[n];
      }
    }
    T* const out = static_cast<T*>(a.out) + (t * a.heads + head) * a.dim + column;
    for (int v = 0; v < V; ++v) {
      const int64_t some = count - v * W;
      if (some > 0) put(result[v] + given[v] * skip, out + v * W, some);
    }
  }
}

// The same for columns that do not fill a vector: in a copy of the state that is as wide as one.
template <class T>
void advance_some(const RecurrenceArgs& a, int64_t row, int64_t head, int64_t column,
                  int64_t count, float* state) {
  thread_local std::vector<float> copy;
  copy.assign(size_t(a.key_dim * W), 0.0f);
  const size_t bytes = size_t(count) * sizeof(float);
  for (int64_t n = 0; n < a.key_dim; ++n) std::memcpy(&copy[n * W], state + n * a.dim, bytes);
  advance<T, 1>(a, row, head, column, count, copy.data(), W);
  for (int64_t n = 0; n < a.key_dim; ++n) std::memcpy(state + n * a.dim, &copy[n * W], bytes);
}

template <class T>
Status run(const RecurrenceArgs& a) {
  const int64_t end = a.starts[a.rows], block = kColumnVectors * W;
  const int64_t blocks = (a.dim + block - 1) / block;
  const double cells = double(end * a.heads * a.key_dim * a.dim);
  over_items(a.threads, a.rows, a.heads * blocks, cells / kStateCellsPerMicrosecond,
             [&](int64_t row, int64_t item) {
               if (a.starts[row] == a.starts[row + 1]) return;
               const int64_t head = item / blocks, first = item % blocks * block;
               const int64_t last = std::min(a.dim, first + block);
               float* const state =
                   a.states + a.slots[row] * a.state_stride + head * a.key_dim * a.dim;
               int64_t c = first;
               if (last - first == block) {
                 advance<T, kColumnVectors>(a, row, head, c, block, state + c, a.dim);
                 return;
               }
               for (; c + W <= last; c += W) {
                 advance<T, 1>(a, row, head, c, W, state + c, a.dim);
               }
               if (c < last) advance_some<T>(a, row, head, c, last - c, state + c);
             });
  clear<T>(a.out, end * a.heads * a.dim, a.tokens * a.heads * a.dim);
  return kOk;
}

template <class Args>
int run_as(const Args& a) {
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

}  // namespace

SLIPSTREAM_EXPORT int slipstream_convolution(const ConvolutionArgs* args) {
  const ConvolutionArgs& a = *args;
  if (a.rows < 0 || a.channels < 1 || a.taps < 1 || a.taps > kMostTaps || a.threads < 1) {
    return kBadShape;
  }
  const Status status = check_rows(a.starts, a.slots, a.rows, a.tokens, a.num_slots);
  return status == kOk ? run_as(a) : status;
}

SLIPSTREAM_EXPORT int slipstream_recurrence(const RecurrenceArgs* args) {
  const RecurrenceArgs& a = *args;
  if (a.rows < 0 || a.key_heads < 1 || a.heads % a.key_heads || a.key_dim < 1 || a.dim < 1 ||
      a.threads < 1) {
    return kBadShape;
  }
  const Status status = check_rows(a.starts, a.slots, a.rows, a.tokens, a.num_slots);
  return status == kOk ? run_as(a) : status;
}
