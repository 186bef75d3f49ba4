// AMX tile registers (Intel, "Advanced Matrix Extensions", Software Developer's Manual vol. 1,
// ch. 18). Their operands are those of pairs.h.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define SLIPSTREAM_TILES 1
#include "pairs.h"
#include "tile_permission.h"

namespace {

// GCC's tile load intrinsics do not declare that they read memory; this keeps earlier stores before them.
inline void tile_loads_follow() { asm volatile("" : : : "memory"); }

// The tile registers of this thread: all eight are 16 rows of 64 bytes.
class TileRegisters {
 public:
  explicit TileRegisters(bool used) : used(used) {
    if (!used) return;
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
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
