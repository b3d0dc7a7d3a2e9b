// Implementation of process_memory.h.

#include "shared_memory/process_memory.h"

#include <errno.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pycollective {
namespace {

// Where the C library does not know a cache, it says 0 or -1.
int64_t KnownOr(int64_t usual, long found) { return found > 0 ? found : usual; }

}  // namespace

void LetOthersRead(bool lets) {
#if defined(PR_SET_PTRACER) && defined(PR_SET_PTRACER_ANY)
  static bool has_let = false;  // MPI may let others read, too, and then it still needs that
  if (std::exchange(has_let, lets) == lets) return;
  prctl(PR_SET_PTRACER, lets ? PR_SET_PTRACER_ANY : 0, 0, 0, 0);  // without Yama it fails, and nothing needs it
#else
  static_cast<void>(lets);
#endif
}

int CopyFromProcess(int64_t process, void* to, const void* from, size_t nbytes) {
  constexpr size_t kAtOnce = size_t{1} << 30;  // a call moves at most 2 GiB less a page
  while (nbytes > 0) {
    const size_t wanted = std::min(nbytes, kAtOnce);
    const iovec here{to, wanted};
    const iovec there{const_cast<void*>(from), wanted};
    const ssize_t moved = process_vm_readv(static_cast<pid_t>(process), &here, 1, &there, 1, 0);
    if (moved < 0) return errno;
    if (moved == 0) return EFAULT;
    to = static_cast<char*>(to) + moved;
    from = static_cast<const char*>(from) + moved;
    nbytes -= static_cast<size_t>(moved);
  }
  return 0;
}

void CopyPastCaches(void* to, const void* from, size_t nbytes) {
#ifdef __SSE2__
  constexpr size_t kLine = 64;
  constexpr size_t kAhead = 16 * kLine;
  char* y = static_cast<char*>(to);
  const char* x = static_cast<const char*>(from);
  const size_t before = std::min(nbytes, (kLine - reinterpret_cast<uintptr_t>(y) % kLine) % kLine);
  std::memcpy(y, x, before);
  size_t at = before;
  for (; at + kLine <= nbytes; at += kLine) {
    _mm_prefetch(x + at + kAhead, _MM_HINT_T0);
    for (size_t part = 0; part < kLine; part += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(y + at + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + at + part)));
    }
  }
  _mm_sfence();
  std::memcpy(y + at, x + at, nbytes - at);
#else
  std::memcpy(to, from, nbytes);
#endif
}

int64_t CacheBytesOfCore() {
  static const int64_t nbytes = KnownOr(int64_t{1} << 20, sysconf(_SC_LEVEL2_CACHE_SIZE));
  return nbytes;
}

int64_t CacheBytesOfHost() {
  static const int64_t nbytes = KnownOr(int64_t{32} << 20, sysconf(_SC_LEVEL3_CACHE_SIZE));
  return nbytes;
}

}  // namespace pycollective
