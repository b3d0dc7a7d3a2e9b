// Many small arrays as few larger ones.

#ifndef PYCOLLECTIVE_NATIVE_BUCKETS_H_
#define PYCOLLECTIVE_NATIVE_BUCKETS_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "collectives.h"
#include "mpi.h"

namespace pycollective {

// One array of an elementwise operation.
struct Part {
  const void* x;
  void* y;
  int64_t count;
  Type type;

  int64_t nbytes() const { return count * kTypeBytes[static_cast<int>(type)]; }
};

// Calls call(x, y, count, type) so that every part is served: an array of half a bucket or more by itself, the others
// packed by type, in their order. What is packed together depends on the sizes alone, so ranks agree on it. After an error
// the other calls are made all the same, since others wait in them; the first error is returned.
template <typename Call>
Outcome InBuckets(const std::vector<Part>& parts, int64_t bucket_bytes, Call call) {
  std::unique_ptr<char[]> buffer;
  std::vector<const Part*> bucket;
  Outcome first;
  const auto note = [&](const Outcome& outcome) {
    if (first.ok()) first = outcome;
  };
  for (int type = 0; type < kTypeCount; ++type) {
    int64_t filled = 0;
    const auto flush = [&] {
      if (bucket.size() == 1) {
        note(call(bucket[0]->x, bucket[0]->y, bucket[0]->count, bucket[0]->type));
      } else if (!bucket.empty()) {
        if (buffer == nullptr) buffer.reset(new char[static_cast<size_t>(bucket_bytes)]);
        char* to = buffer.get();
        for (const Part* part : bucket) {
          std::memcpy(to, part->x, static_cast<size_t>(part->nbytes()));
          to += part->nbytes();
        }
        note(call(buffer.get(), buffer.get(), filled / kTypeBytes[type], static_cast<Type>(type)));
        const char* from = buffer.get();
        for (const Part* part : bucket) {
          std::memcpy(part->y, from, static_cast<size_t>(part->nbytes()));
          from += part->nbytes();
        }
      }
      bucket.clear();
      filled = 0;
    };
    for (const Part& part : parts) {
      if (static_cast<int>(part.type) != type || part.count == 0) continue;
      if (2 * part.nbytes() >= bucket_bytes) {
        note(call(part.x, part.y, part.count, part.type));
        continue;
      }
      if (filled + part.nbytes() > bucket_bytes) flush();
      bucket.push_back(&part);
      filled += part.nbytes();
    }
    flush();
  }
  return first;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_BUCKETS_H_
