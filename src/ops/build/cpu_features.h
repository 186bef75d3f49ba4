// Features of this CPU that `__builtin_cpu_supports` of older compilers does not know.
#pragma once
#include "runtime/tile_permission.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

inline bool has_byte_products() {
  constexpr unsigned kBytes = 1u << 11;  // leaf 7: AVX512_VNNI
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ecx & kBytes);
}

inline bool has_pair_products() {
  constexpr unsigned kBFloat16 = 1u << 5;  // leaf 7, subleaf 1: AVX512_BF16
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kBFloat16);
}

inline bool has_avx_vnni() {
  constexpr unsigned kBytes = 1u << 4;  // leaf 7, subleaf 1: AVX-VNNI
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kBytes);
}

inline bool has_tiles() {
  constexpr unsigned kTiles = 1u << 25 | 1u << 24 | 1u << 22;  // leaf 7: AMX-INT8, AMX-TILE, AMX-BF16
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kTiles) != kTiles) return false;
  return tiles_permitted();
}

}  // namespace
#endif
