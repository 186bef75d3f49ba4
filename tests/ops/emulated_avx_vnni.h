// The AVX-VNNI intrinsic that the kernels use, in plain C++: see emulated_amx.h.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AVXVNNI__ 1

namespace emulated {

// Of four unsigned bytes with four signed ones each.
inline __m256i dot_bytes(__m256i sums, __m256i left, __m256i right) {
  uint8_t a[32];
  int8_t b[32];
  int32_t result[8];
  std::memcpy(a, &left, sizeof a);
  std::memcpy(b, &right, sizeof b);
  std::memcpy(result, &sums, sizeof result);
  for (int i = 0; i < 32; ++i) result[i / 4] += a[i] * b[i];
  std::memcpy(&sums, result, sizeof sums);
  return sums;
}

}  // namespace emulated

#define _mm256_dpbusd_avx_epi32(sums, left, right) emulated::dot_bytes(sums, left, right)
