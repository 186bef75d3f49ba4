// AMX tile registers (Intel, "Advanced Matrix Extensions", Software Developer's Manual vol. 1,
// ch. 18). Their operands are those of pairs.h.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#define SLIPSTREAM_TILES 1
#include "runtime/pairs.h"
#include "runtime/tile_permission.h"

namespace {

// GCC's tile load intrinsics do not declare that they read memory; this keeps earlier stores before them.
inline void tile_loads_follow() { asm volatile("" : : : "memory"); }

// The tile registers of this thread. Sums (0 to 3) are `left_rows` rows of 64 bytes. Left-hand operands (4 and 5)
// are as many rows of `depth` bytes, right-hand ones (6 and 7) a quarter of `depth` rows of 64 bytes.
class TileRegisters {
 public:
  explicit TileRegisters(bool used, int depth = 64, int left_rows = 16) : used(used) {
    if (!used) return;
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    configuration.row_bytes[4] = configuration.row_bytes[5] = uint16_t(depth);
    for (int i = 0; i < 6; ++i) configuration.rows[i] = uint8_t(left_rows);
    configuration.rows[6] = configuration.rows[7] = uint8_t(depth / 4);
    tile_loads_follow();
    _tile_loadconfig(&configuration);
  }
  ~TileRegisters() {
    if (used) _tile_release();  // otherwise every context switch of this thread would save 8 KiB
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  const bool used;
};

}  // namespace

#endif
