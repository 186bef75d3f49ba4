// Token masks: computed by grammars, combined with the requests' other constraints, applied to logits.
#include <cstring>
#include <ctime>
#include <limits>
#include <new>

#include "runtime/mask_gate.h"
#include "runtime/parallel.h"
#include "runtime/vector.h"

namespace {

constexpr double kMaskedPerMicrosecond = 6e3;  // logits

struct Found {
  uint32_t others = 0, ends = 0;  // non-zero if the grammar allows other tokens; tokens that end the output
};

Found look(const uint32_t* mask, const uint32_t* ends, const uint32_t* allowed, int64_t words) {
  Found found;
  for (int64_t i = 0; i < words; ++i) {
    found.others |= mask[i] & ~ends[i] & allowed[i];
    found.ends |= mask[i] & ends[i];
  }
  return found;
}

// Applies a row's constraints to its mask. Returns whether any token is left.
bool restrict_row(uint32_t* mask, const uint32_t* ends, const uint32_t* allowed, bool goes_on,
                  int64_t words) {
  const Found found = look(mask, ends, allowed, words);
  uint32_t left = found.others;
  for (int64_t i = 0; i < words; ++i) {
    uint32_t kept = found.ends ? ends[i] : 0;
    // If other tokens are possible, keep no end token (goes_on), or only those in `allowed`.
    if (found.others) kept &= goes_on ? 0 : allowed[i];
    mask[i] = (mask[i] & ~ends[i] & allowed[i]) | kept;
    left |= kept;
  }
  return left != 0;
}

bool has_bits(const uint32_t* mask, int64_t words) {
  uint32_t any = 0;
  for (int64_t i = 0; i < words; ++i) any |= mask[i];
  return any != 0;
}

bool restrict(const MaskArgs& a, int64_t row) {
  const int64_t start = row * a.words;
  const uint8_t constraint = a.constraints[row];
  if (constraint == kUnconstrained) return has_bits(a.masks + start, a.words);
  return restrict_row(a.masks + start, a.ends + start, a.allowed + start, constraint == kMayNotEnd,
                      a.words);
}

// CPU time instead of wall time: a busy machine is not the grammar's fault.
double processor_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

Outcome make(const MatcherFunctions& functions, const MaskArgs& a, const GrammarStep& step) {
  if (step.token >= 0) {
    const uint32_t ends = a.ends[step.row * a.words + step.token / 32];
    if (ends >> (step.token % 32) & 1) return kEnded;
    CommitResult taken{};
    if (functions.commit_token(step.matcher, uint32_t(step.token), &taken)) return kMatcherFailed;
    // Only an end token could follow, and no mask is requested after one.
    if (taken.is_stop) return kMatcherFailed;
  }
  MaskResult next{};
  if (functions.compute_mask(step.matcher, &next)) return kMatcherFailed;
  if (next.is_stop) return kComplete;
  if (!next.sample_mask) return kMatcherFailed;
  std::memcpy(a.masks + step.row * a.words, next.sample_mask, size_t(a.words) * sizeof(uint32_t));
  return restrict(a, step.row) ? kAdvanced : kNothingPossible;
}

// Sets logits to -inf where a bit is not set, but keeps NaN and turns +inf into NaN: adding -inf does
// both, so broken logits stay visible.
void bar(const uint32_t* mask, int64_t vocab_size, float* logits) {
  vu bits;
  for (int lane = 0; lane < W; ++lane) bits[lane] = 1u << lane;
  const float lowest = -std::numeric_limits<float>::infinity();
  const int64_t whole = vocab_size / 32;
  for (int64_t i = 0; i < whole; ++i) {
    if (mask[i] == ~0u) continue;
    for (int lane = 0; lane < 32; lane += W) {
      float* to = logits + i * 32 + lane;
      const vf given = load(to);
      store(to, ((vu{} + (mask[i] >> lane)) & bits) != 0 ? given : given + splat(lowest));
    }
  }
  for (int64_t token = whole * 32; token < vocab_size; ++token) {
    if (!(mask[whole] >> (token % 32) & 1)) logits[token] += lowest;
  }
}

}  // namespace

void MaskGate::open(const uint32_t* masks, int64_t words, const int64_t* rows, int64_t count) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    rows_.assign(rows, rows + count);
    masks_ = masks, words_ = words, is_open_ = true;
  }
  opened_.notify_one();
}

Status MaskGate::apply(float* logits, int64_t rows, int64_t vocab_size, int64_t stride,
                       int64_t threads) {
  std::unique_lock<std::mutex> lock(mutex_);
  opened_.wait(lock, [this] { return is_open_; });
  if (int64_t(rows_.size()) != rows || words_ * 32 < vocab_size) return kBadMasks;
  const int64_t parts =
      worthwhile_parts(threads, double(rows * vocab_size) / kMaskedPerMicrosecond, rows);
  parallel(threads, parts, [&](int64_t part) {
    for (int64_t i = rows * part / parts; i < rows * (part + 1) / parts; ++i) {
      if (rows_[size_t(i)] < 0) continue;
      bar(masks_ + rows_[size_t(i)] * words_, vocab_size, logits + i * stride);
    }
  });
  return kOk;
}

SLIPSTREAM_EXPORT MaskGate* slipstream_new_gate() { return new (std::nothrow) MaskGate; }

SLIPSTREAM_EXPORT void slipstream_delete_gate(MaskGate* gate) { delete gate; }

SLIPSTREAM_EXPORT int slipstream_open_gate(MaskGate* gate, const uint32_t* masks, int64_t words,
                                           const int64_t* rows, int64_t count) {
  try {
    gate->open(masks, words, rows, count);
    return kOk;
  } catch (const std::bad_alloc&) {
    // Open the gate all the same, without rows: the waiting step then fails with kBadMasks.
    gate->open(masks, words, rows, 0);
    return kOutOfMemory;
  }
}

SLIPSTREAM_EXPORT int64_t slipstream_restrict_masks(const MaskArgs* args, const int64_t* rows,
                                                    int64_t count, uint8_t* possible) {
  const MaskArgs& a = *args;
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= a.rows) return -1;
  }
  int64_t impossible = 0;
  for (int64_t i = 0; i < count; ++i) {
    possible[i] = restrict(a, rows[i]);
    impossible += !possible[i];
  }
  return impossible;
}

SLIPSTREAM_EXPORT int64_t slipstream_grammar_steps(const MatcherFunctions* functions,
                                                   const MaskArgs* args, const GrammarStep* steps,
                                                   int64_t count, double ordinary,
                                                   LastGrammarStep* last) {
  for (int64_t i = 0; i < count; ++i) {
    if (steps[i].row < 0 || steps[i].row >= args->rows) return -1;
    if (steps[i].token >= args->words * 32) return -1;
  }
  double before = processor_seconds();
  for (int64_t i = 0; i < count; ++i) {
    last->outcome = make(*functions, *args, steps[i]);
    const double now = processor_seconds();
    last->seconds = now - before;
    before = now;
    if (last->outcome != kAdvanced || last->seconds > ordinary) return i + 1;
  }
  return count;
}
