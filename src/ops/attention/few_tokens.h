// Rows of a few tokens, as a step has them that verifies drafts.
#pragma once
#include <cstdint>

namespace {

// So many tokens of a row are summed as one alone is, unless it has more keys: partial results of all
// their splits take memory, and keys are read more often.
constexpr int64_t kLikeOne = 17;
constexpr int64_t kLikeOneKeys = 8192;

inline bool is_like_one(bool deterministic, int64_t query_len, int64_t seq_len) {
  return !deterministic && query_len <= kLikeOne && seq_len <= kLikeOneKeys;
}

}  // namespace
