// Loaded before all other libraries (LD_PRELOAD), this one takes large blocks away from malloc, and so from new: a lack
// of memory that comes to each rank and each device in the same call, whatever is free. XLA's arrays are aligned, and
// come from another function.

#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {

void* __libc_malloc(size_t bytes);

static std::atomic<size_t> most{static_cast<size_t>(-1)};

void allow_blocks_of(size_t bytes) { most = bytes; }

void* malloc(size_t bytes) {
  if (bytes <= most) return __libc_malloc(bytes);
  errno = ENOMEM;
  return nullptr;
}

}
