// Which keys a query sees.
#pragma once
#include <algorithm>

#include "runtime/abi.h"

namespace {

// The first key that the query at a position sees. It never decreases from one position to the next.
inline int64_t first_visible(int64_t position, const AttentionSpec& spec) {
  int64_t first = spec.window > 0 ? std::max<int64_t>(0, position - spec.window + 1) : 0;
  if (spec.chunk > 0) first = std::max(first, position / spec.chunk * spec.chunk);
  return first;
}

// The position behind the last key that it sees, if its sequence has so many. It never decreases, either.
inline int64_t visible_end(int64_t position, const AttentionSpec& spec) {
  return position + 1 + spec.ahead;
}

}  // namespace
