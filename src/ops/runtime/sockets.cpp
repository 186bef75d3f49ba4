// Sends a step's tokens to many sockets in one call. Each `send` takes the kernel some 20 microseconds;
// in Python, each would release and re-acquire the GIL.
#include <cerrno>
#include <cstdint>
#include <sys/socket.h>

#include "runtime/abi.h"

#ifndef MSG_NOSIGNAL  // Where it is missing, rely on Python, which ignores SIGPIPE.
#define MSG_NOSIGNAL 0
#endif

// sent[i]: bytes that socket i took, or the negated errno. Never waits for a reader.
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
