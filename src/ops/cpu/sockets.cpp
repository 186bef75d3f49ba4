// What a step's tokens put into many sockets, in one call: each `send` takes the kernel some 20
// microseconds, and between two of them Python would ask for its lock.
#include <cerrno>
#include <cstdint>
#include <sys/socket.h>

#include "abi.h"

#ifndef MSG_NOSIGNAL  // Where it is missing, Python has the signal ignored.
#define MSG_NOSIGNAL 0
#endif

// Of each socket, sent[i]: bytes that it took, or the negated errno. Never waits for a reader.
SLIPSTREAM_EXPORT void slipstream_send(int64_t count, const int32_t* sockets,
                                       const char* const* data, const int64_t* sizes,
                                       int64_t* sent) {
  for (int64_t i = 0; i < count; ++i) {
    ssize_t taken;
    do {
      taken = send(sockets[i], data[i], sizes[i], MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (taken < 0 && errno == EINTR);
    sent[i] = taken < 0 ? -errno : taken;
  }
}
