// Implementation of shared_arrays.h.

#include "shared_memory/shared_arrays.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>

namespace pycollective {
namespace {

char* memory = nullptr;
size_t bytes_of_memory = 0;

std::mutex mutex;
char* free_begin = nullptr;  // of this rank's part; guarded by `mutex`
char* own_end = nullptr;

size_t OffsetIn(const void* begin, const void* data) {
  return reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(begin);  // it wraps around if `data` is below
}

}  // namespace

void SharedArrays::Open(char* begin, size_t nbytes, char* own, size_t own_bytes) {
  memory = begin;
  bytes_of_memory = nbytes;
  free_begin = own;
  own_end = own + own_bytes;
}

void SharedArrays::Close() {
  if (memory != nullptr) munmap(memory, bytes_of_memory);
  Open(nullptr, 0, nullptr, 0);
}

void* SharedArrays::Take(size_t nbytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  nbytes = (nbytes + page - 1) / page * page;
  const std::lock_guard<std::mutex> lock(mutex);
  if (nbytes > static_cast<size_t>(own_end - free_begin)) return nullptr;
  char* const taken = free_begin;
  free_begin += nbytes;
  return taken;
}

void SharedArrays::GiveBack(void* taken) {
  const std::lock_guard<std::mutex> lock(mutex);
  free_begin = static_cast<char*>(taken);
}

bool SharedArrays::Has(const void* data) { return OffsetIn(memory, data) < bytes_of_memory; }

const void* SharedArrays::begin() { return memory; }

const void* SharedArrays::Mapped(const void* begin_there, const void* data) {
  const size_t offset = OffsetIn(begin_there, data);
  return offset < bytes_of_memory ? memory + offset : nullptr;
}

}  // namespace pycollective
