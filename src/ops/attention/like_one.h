// Rows that verify drafts: the call says which they are.
#pragma once
#include <cstdint>

namespace {

// So many tokens of a row are summed as one alone is, unless it has more keys: partial results of all
// their splits take memory, and keys are read more often. A row with 16 drafts has up to 25 tokens, if
// recurrent states lack some that were accepted before.
constexpr int64_t kLikeOne = 25;
constexpr int64_t kLikeOneKeys = 8192;

template <class Args>
bool is_like_one(const Args& a, int64_t row) {
  if (a.deterministic || a.verifies == nullptr || !a.verifies[row]) return false;
  return a.query_start_loc[row + 1] - a.query_start_loc[row] <= kLikeOne && a.seq_lens[row] <= kLikeOneKeys;
}

}  // namespace
