// Asks Linux for AMX tile registers; every process must do so before its first tile instruction.
#pragma once

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Whether this process may use tiles. Linux before 5.16 refuses; so does any version if a thread's
// alternative signal stack is too small for the 8 KiB of tile registers that a signal would save.
inline bool tiles_permitted() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h
  constexpr long kTileData = 18;     // the state's number in XCR0
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace
