// Which of a library's ways multiplies rounded weights in strips, by the number of tokens. The fastest one
// differs by machine, so it is measured when the library is built (ways.py) and chosen here.
#pragma once
#include <atomic>
#include <cstdint>

#include "runtime/abi.h"
#include "projections/integer_tiles.h"
#include "runtime/tile_permission.h"

namespace {

// Ways to multiply quantized strips. The first two give the same bits.
enum Way : int64_t {
  kFours = 0,        // products of four bytes, or what the level has instead
  kByteTiles = 1,    // integer_tiles.h
  kSpreadTiles = 2,  // as bfloat16, and bfloat16 tokens, which are not rounded (pair_tiles.h)
};
constexpr int kWays = 3;

// Formats with ways of their own: int8 by row; int8 and int4 in groups, by the inputs of a unit. Those in
// groups follow once more, with offsets: these cost tiles of bytes more than tiles of bfloat16.
enum Format : int64_t { kInt8Rows, kInt8By16, kInt8By32, kInt8By64, kInt4By32, kInt4By64, kWithOffsets };
constexpr int64_t kFormats = 2 * kWithOffsets - 1;

// The largest number of tokens of each class.
constexpr int64_t kClassEnds[] = {4, 15, 47, 127, INT64_MAX};
constexpr int kClasses = sizeof kClassEnds / sizeof *kClassEnds;

template <class Slices>
inline int64_t format_of(int64_t unit, bool has_offsets) {
  if (!Slices::kInGroups) return kInt8Rows;
  const int64_t format = Slices::kInputs == 8 ? (unit == 32 ? kInt4By32 : kInt4By64)
                                              : (unit == 16   ? kInt8By16
                                                 : unit == 32 ? kInt8By32
                                                              : kInt8By64);
  return has_offsets ? format + kWithOffsets - 1 : format;
}

inline bool has_way(int64_t format, int64_t way) {
#if defined(SLIPSTREAM_BYTE_TILES)
  if (!tiles_permitted()) return way == kFours;
  return way <= kByteTiles || format != kInt8Rows;
#else
  (void)format;
  return way == kFours;
#endif
}

// What is chosen until something else is: as measured on a Xeon with AMX.
constexpr Way usual_way(int64_t format, int rows_class, bool keeps_bits) {
  if (rows_class < 2) return kFours;
  if (rows_class == 2) return format == kInt8Rows ? kFours : kByteTiles;
  return keeps_bits || format == kInt8Rows ? kByteTiles : kSpreadTiles;
}

// Ways of all formats and classes: of those with the same bits alone, and of all.
class Ways {
 public:
  Ways() {
    for (int format = 0; format < kFormats; ++format) {
      for (int rows = 0; rows < kClasses; ++rows) {
        for (int bits = 0; bits < 2; ++bits) {
          const Way usual = usual_way(format, rows, bits);
          chosen[bits][format][rows] = has_way(format, usual) ? usual : kFours;
        }
      }
    }
  }

  // The way of bfloat16 or (keeps_bits) other tokens.
  Way of(int64_t format, int64_t tokens, bool keeps_bits) const {
    int rows = 0;
    while (tokens > kClassEnds[rows]) ++rows;
    const bool keeps = keeps_bits || keeps_one();
    return Way(chosen[keeps][format][rows].load(std::memory_order_relaxed));
  }

  bool choose(int64_t format, int64_t rows, bool keeps_bits, int64_t way) {
    if (format < 0 || format >= kFormats || rows < 0 || rows >= kClasses || way < 0 || way >= kWays ||
        !has_way(format, way) || (keeps_bits && way == kSpreadTiles)) {
      return false;
    }
    chosen[keeps_bits][format][rows] = uint8_t(way);
    return true;
  }

  // Whether a token's result may not depend on the number of tokens: somebody keeps one way.
  bool keeps_one() const { return keepers.load(std::memory_order_relaxed) > 0; }

  void keep_one(bool keep) { keepers += keep ? 1 : -1; }

 private:
  std::atomic<int> keepers{0};
  std::atomic<uint8_t> chosen[2][kFormats][kClasses];
};

inline Ways& ways() {
  static Ways all;
  return all;
}

}  // namespace
