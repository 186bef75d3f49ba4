// A step waits here before it samples, if the masks of its rows are computed meanwhile.
#pragma once
#include <condition_variable>
#include <mutex>
#include <vector>

#include "runtime/abi.h"

struct MaskGate {
 public:
  void open(const uint32_t* masks, int64_t words, const int64_t* rows, int64_t count);

  // Waits until the gate is open, then sets the logits of forbidden tokens to -inf.
  Status apply(float* logits, int64_t rows, int64_t vocab_size, int64_t stride, int64_t threads);

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false;
  const uint32_t* masks_ = nullptr;
  int64_t words_ = 0;
  std::vector<int64_t> rows_;
};
