// A call's inputs as floats, [tokens, inputs], in this thread's memory; valid until its next call.
#pragma once
#include <type_traits>
#include <vector>

#include "runtime/abi.h"
#include "runtime/parallel.h"
#include "runtime/vector.h"

namespace {

constexpr double kWidenedPerMicrosecond = 2e3;  // inputs

template <class T>
const float* widened_inputs(const LinearArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  if constexpr (std::is_same_v<T, float>) {
    if (a.x_stride == a.inputs) return x;
  }
  thread_local std::vector<float> wide;
  // A row's last vector may write beyond its end; the next row overwrites that.
  const int64_t floats = a.tokens * a.inputs + W;
  if (int64_t(wide.size()) < floats) wide.resize(size_t(floats));
  // A pointer, because `wide` is thread-local: other threads would see their own vector.
  float* const to = wide.data();
  const double work = double(a.tokens * a.inputs) / kWidenedPerMicrosecond;
  const int64_t parts = a.inputs % W ? 1 : worthwhile_parts(a.threads, work, a.tokens);
  parallel(a.threads, parts, [&](int64_t part) {
    for (int64_t t = a.tokens * part / parts; t < a.tokens * (part + 1) / parts; ++t) {
      convert_row(x + t * a.x_stride, to + t * a.inputs, int(a.inputs));
    }
  });
  return to;
}

}  // namespace
