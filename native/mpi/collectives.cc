// Implementation of collectives.h.

#include "mpi/collectives.h"

#include <cstring>

namespace pycollective {

Library* library = nullptr;

Outcome Memory::Clear(void* to, size_t nbytes) const {
  std::memset(to, 0, nbytes);
  return {};
}

Outcome Memory::Copy(void* to, const void* from, size_t nbytes) const {
  std::memcpy(to, from, nbytes);
  return {};
}

}  // namespace pycollective
